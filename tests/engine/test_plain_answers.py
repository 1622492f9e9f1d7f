"""The engine answers as `transformers` does, whatever it computes beside a request and however it cuts it."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from nanovllm.errors import UnsupportedModelError
from nanovllm.model import ModelBinding
from nanovllm.sampling_params import SamplingParams
from tests.engine.models import GREEDY, OPTIONS, byte_tokenizer, generate, open_llm, own_answer, tiny_model, token_ids

HAS_COMPILER = shutil.which("g++") is not None
NEEDS_COMPILER = pytest.mark.skipif(not HAS_COMPILER, reason="FlexAttention on a CPU is compiled, and no g++ is here")
STEM = [(7 * position) % 256 for position in range(40)]
# Chunks, decodes and hits in one batch: lengths around blocks, and prompts with a common beginning.
PROMPTS = [
    [1], [2, 3, 4], STEM[:16], STEM[1:18], [5] * 47, [*STEM, 9], [*STEM, 9, 8], STEM[::-1],
    [*STEM, 1, *STEM, 2, *STEM[:30]],
]  # fmt: skip


def assert_equals_transformers(model, prompts=PROMPTS, **options) -> None:
    with open_llm(model, **options) as llm:
        first = token_ids(generate(llm, prompts))
        again = generate(llm, prompts)  # with their prefixes in the cache
    assert first == token_ids(again) == [own_answer(model, prompt) for prompt in prompts]


def test_a_mixed_batch_has_the_tokens_of_transformers():
    model = tiny_model()
    assert_equals_transformers(model)
    answers = {tuple(own_answer(model, prompt)) for prompt in PROMPTS}
    assert len(answers) == len(PROMPTS) and all(len({*answer}) > 1 for answer in answers)  # else equality says little


@pytest.mark.full
@NEEDS_COMPILER
def test_a_mixed_batch_by_flex_attention_has_the_tokens_of_transformers():
    assert_equals_transformers(tiny_model(), attention_backend="flex", enforce_eager=False)


@pytest.mark.costly
@pytest.mark.parametrize("options", [
    {"overlap": True},
    {"enable_prefix_caching": False},
    {"num_kv_blocks": 10, "overlap": True},
    {"max_num_batched_tokens": 17, "max_num_seqs": 1},
    {"block_size": 64, "num_kv_blocks": 9, "max_num_batched_tokens": 128},
    {"max_num_batched_tokens": 512},
], ids=str)  # fmt: skip
def test_tokens_do_not_depend_on_how_steps_are_cut(options):
    assert_equals_transformers(tiny_model(), **options)


@pytest.mark.costly
@pytest.mark.parametrize("options", [
    {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"tie_word_embeddings": True}, {"attention_bias": True},
], ids=str)  # fmt: skip
def test_models_of_other_shapes_have_the_tokens_of_transformers(options):
    assert_equals_transformers(tiny_model(**options))


def test_a_model_in_bfloat16_is_computed_as_it_is():
    model = tiny_model().to(torch.bfloat16)
    with open_llm(model) as llm:
        assert llm._engine.model_runner.binding.dtype is torch.bfloat16
        assert all(len(tokens) == 12 for tokens in token_ids(generate(llm, PROMPTS)))


def test_a_scarce_pool_preempts_and_loses_no_token():
    model = tiny_model()
    prompts = [[number, *STEM[: 20 + number]] for number in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with open_llm(model, num_kv_blocks=10) as llm:
        outputs = generate(llm, prompts, params)
        assert llm._engine.scheduler.stats.num_preemptions > 0
    assert token_ids(outputs) == [own_answer(model, prompt, 40) for prompt in prompts]


def test_a_cached_prefix_is_not_computed_again():
    with open_llm() as llm:
        (first,) = generate(llm, [PROMPTS[-1]])
        num_tokens = llm._engine.scheduler.stats.num_scheduled_tokens
        (second,) = generate(llm, [PROMPTS[-1]])
        cached = (len(PROMPTS[-1]) - 1) // 16 * 16
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
        assert llm._engine.scheduler.stats.num_scheduled_tokens == num_tokens + len(PROMPTS[-1]) - cached + 11
        llm.reset_prefix_cache()
        assert generate(llm, [PROMPTS[-1]])[0].num_cached_tokens == 0
        assert generate(llm, [PROMPTS[-1]], cache_salt="other")[0].num_cached_tokens == 0


def test_a_folder_is_loaded_with_its_tokenizer(tmp_path):
    model, tokenizer = tiny_model(), byte_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    expected = [own_answer(model, prompt) for prompt in PROMPTS[:3]]
    with open_llm(tmp_path) as llm:
        assert token_ids(generate(llm, PROMPTS[:3])) == expected
        (of_text,) = generate(llm, ["abc"])
        assert of_text.outputs[0].token_ids == own_answer(model, tokenizer("abc")["input_ids"])
    with open_llm(str(tmp_path), skip_tokenizer_init=True, dtype="float32", device="cpu") as llm:
        assert not llm._engine.model_runner.capture_ahead()
        assert llm.tokenizer is None and token_ids(generate(llm, PROMPTS[:3])) == expected
    with open_llm(tmp_path, tokenizer) as llm:
        assert llm.tokenizer is tokenizer


def test_the_owner_of_a_module_gets_it_back_as_it_was():
    model = tiny_model().train()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    implementation = model.config._attn_implementation
    with open_llm(model) as llm:
        generate(llm, PROMPTS[:2])
        assert model.training and {name: dict(vars(module)) for name, module in model.named_modules()} == before
        assert model.config._attn_implementation == implementation
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_computed_kv_is_forgotten_when_the_owner_says_that_weights_changed():
    model = tiny_model()
    with open_llm(model) as llm:
        generate(llm, [PROMPTS[-1]])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        llm._engine.drop_computed()
        (output,) = generate(llm, [PROMPTS[-1]])
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == own_answer(model, PROMPTS[-1])


def test_two_engines_may_share_a_module():
    model = tiny_model()
    expected = own_answer(model, PROMPTS[5])
    with open_llm(model) as first, open_llm(model, block_size=32) as second:
        for llm in (first, second, first):
            assert token_ids(generate(llm, [PROMPTS[5]])) == [expected]


def test_a_model_that_needs_more_than_the_engine_has_is_refused_by_name():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = MistralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, sliding_window=16)
    with pytest.raises(UnsupportedModelError, match=r"layer 0 .* sliding window"):
        ModelBinding(MistralForCausalLM(config).eval(), is_live=True)


def test_nan_ends_its_request_with_an_error_and_harms_nobody():
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[200] = torch.nan
    spoilt = [200 if position == 30 else position for position in range(60)]
    with open_llm(model) as llm:
        outputs = generate(llm, [PROMPTS[0], spoilt, PROMPTS[5], spoilt[:33]])
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length", "error"]
        assert "not finite" in outputs[1].error and outputs[1].outputs[0].token_ids == []
        for _ in range(3):  # successors get the blocks that held NaN
            llm.reset_prefix_cache()
            assert token_ids(generate(llm, [PROMPTS[5]])) == [own_answer(model, PROMPTS[5])]


def test_the_cache_has_its_default_size_where_none_is_set():
    options = {name: value for name, value in OPTIONS.items() if name not in ("num_kv_blocks", "max_model_len")}
    model = tiny_model()
    with open_llm(model, num_kv_blocks=None, max_model_len=None) as llm:
        assert llm.config.max_model_len == 512
        assert llm.config.num_kv_blocks == 512 // 16 * options["max_num_seqs"] + 1
        assert token_ids(generate(llm, PROMPTS[:1], GREEDY)) == [own_answer(model, PROMPTS[0])]
    with open_llm(model, num_kv_blocks=9, max_model_len=None) as llm:
        assert llm.config.max_model_len == 128
    with open_llm(model, num_kv_blocks=None, kv_cache_memory_bytes=2**18) as llm:
        assert llm.config.num_kv_blocks == 2**18 // (2 * 2 * 2 * 16 * 16 * 4)
    with pytest.raises(ValueError, match="holds sequences of at most 48 tokens, but max_model_len is 128"):
        open_llm(model, num_kv_blocks=4)
