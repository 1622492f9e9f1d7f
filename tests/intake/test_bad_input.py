"""Bad input: refused before any work starts, with the value, the limit and the remedy, and the engine stays usable."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from nanovllm import LLM, EngineConfig, SamplingParams, UnsupportedModelError
from nanovllm.errors import PromptTooLongError
from tests.support.tiny_models import VOCAB_SIZE, random_prompts, tiny_model, tiny_tokenizer

OPTIONS: dict[str, Any] = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 33, "max_model_len": 128}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@functools.cache
def shared_llm() -> LLM:
    return LLM(tiny_model(), tokenizer=tiny_tokenizer(), **OPTIONS)


@functools.cache
def llm_without_tokenizer() -> LLM:
    return LLM(tiny_model(), **OPTIONS)


@functools.cache
def expected_answer() -> list[int]:
    return answer_of(LLM(tiny_model(), **OPTIONS))


def answer_of(llm: LLM) -> list[int]:
    return llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def refused(kind: type[Exception], *arguments: Any, llm: LLM | None = None, **options: Any) -> str:
    """The message of a call to generate that is refused, leaving the engine as it was and usable."""
    llm = llm or shared_llm()
    before = llm.stats()
    with pytest.raises(kind) as caught:
        llm.generate(*arguments, use_tqdm=False, **options)
    assert llm.stats() == before, "work had started, or something was left in the queue"
    llm._engine.check_integrity()
    assert answer_of(llm) == expected_answer()
    return str(caught.value)


def assert_names(message: str, *parts: Any) -> None:
    for part in parts:
        assert str(part) in message, f"{part!r} is not in {message!r}"


# ------------------------------------------------------------------------------------------------------------- prompts


def test_an_empty_string_is_refused():
    assert_names(refused(ValueError, "", GREEDY), "empty", "at least one token")


def test_an_empty_list_of_prompts_is_refused():
    assert_names(refused(ValueError, [], GREEDY), "empty", "at least one prompt")


def test_an_empty_list_of_token_ids_is_refused():
    assert_names(refused(ValueError, [[]], GREEDY), "empty", "at least one token")


@pytest.mark.parametrize("prompts", [None, 7, 3.5, {"prompt": "a"}, b"bytes", object()], ids=repr)
def test_prompts_of_a_wrong_type_are_refused(prompts):
    message = refused(TypeError, prompts, GREEDY)
    assert_names(message, "string", "list of token ids", "not ")


@pytest.mark.parametrize("prompt", [None, 3.5, {"prompt": "a"}, b"bytes", bytearray(b"bytes")], ids=repr)
def test_a_prompt_of_a_wrong_type_in_a_list_is_refused_by_its_number(prompt):
    assert_names(refused(TypeError, ["good", prompt], GREEDY), "prompt 1", "string", "list of token ids")


@pytest.mark.parametrize("token_id", [2.0, "a", None, True, [1]], ids=repr)
def test_a_token_id_of_a_wrong_type_is_refused_with_its_value(token_id):
    assert_names(refused(TypeError, [[5, token_id]], GREEDY), "whole numbers", repr(token_id))


def test_a_flat_list_that_mixes_token_ids_and_text_is_refused():
    assert_names(refused(TypeError, [5, "text"], GREEDY), "prompt 0", "not 5")


def test_numpy_integers_are_token_ids_or_refused_as_what_they_are():
    """A list of numpy's integers is what `list(array)` gives; it must not be taken for a list of prompts."""
    prompt = list(np.array([5, 6, 7]))
    try:
        (output,) = shared_llm().generate(prompt, GREEDY, use_tqdm=False)
    except TypeError as error:
        assert_names(str(error), "token ids", "int64")
    else:
        assert output.prompt_token_ids == [5, 6, 7]


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**31, 2**80])
def test_a_token_id_outside_the_vocabulary_is_refused_with_the_limit(token_id):
    assert_names(refused(ValueError, [5, token_id], GREEDY), token_id, f"vocabulary of {VOCAB_SIZE}")


def test_the_last_token_id_of_the_vocabulary_is_served():
    (output,) = shared_llm().generate([VOCAB_SIZE - 1], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8


@pytest.mark.parametrize("length", [128, 129, 5000])
def test_a_prompt_without_room_for_one_new_token_is_refused_with_numbers_and_remedy(length):
    assert_names(refused(ValueError, [5] * length, GREEDY), f"{length} tokens", "max_model_len (128)", "127", "raise")


def test_a_prompt_with_room_for_just_one_new_token_is_served():
    (output,) = shared_llm().generate([5] * 127, GREEDY, use_tqdm=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")


def test_text_is_refused_without_a_tokenizer():
    assert_names(refused(ValueError, "text", GREEDY, llm=llm_without_tokenizer()), "tokenizer=...", "token ids")


def test_a_stop_string_is_refused_without_a_tokenizer():
    params = SamplingParams(stop="x")
    assert_names(refused(ValueError, [5], params, llm=llm_without_tokenizer()), "stop", "tokenizer=...")


def test_half_of_a_surrogate_pair_is_refused_with_its_place_its_code_and_a_remedy():
    half = "half a pair: \ud83d"
    named = "U+D83D, as character 13", "errors='replace'"
    assert_names(refused(ValueError, half, GREEDY), "the prompt holds", *named)
    assert_names(refused(ValueError, ["good", half], GREEDY), "prompt 1: the prompt holds", *named)
    for name in ("stop", "bad_words"):
        with pytest.raises(ValueError) as caught:
            SamplingParams(**{name: ["good", half]})
        assert_names(str(caught.value), f"{name} holds half", *named)


CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("conversation", "options", "name"),
    [
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "\udfff"}], {}, "messages[1].content holds"),
        ([{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}], {}, "messages[0].content[0].text holds"),
        ([{"role": "user", "content": "a", "\udfff": 1}], {}, "a key of messages[0] holds"),
        ([{"role": "user", "content": "a"}], {"tools": [{"name": "\udfff"}]}, "tools[0].name holds"),
        ([{"role": "user", "content": "a"}], {"tone": "\udfff"}, "template_options.tone holds"),
    ],
)
def test_half_of_a_surrogate_pair_in_a_conversation_is_refused(conversation, options, name):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    with LLM(tiny_model(), tokenizer=tokenizer, **OPTIONS) as llm, pytest.raises(ValueError) as caught:
        llm._engine.input_processor.apply_chat_template_to(conversation, **options)
    assert_names(str(caught.value), name, "U+DFFF, as character 0", "errors='replace'")


class Unreadable:
    """A tokenizer whose errors take more than a message."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, prompt: str, **_: Any) -> dict[str, list[int]]:
        if prompt == "bad":
            raise self.error
        return {"input_ids": [5]}

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return ""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), ValueError),
        (type("Odd", (TypeError,), {"__init__": lambda self, a, b: None})(1, 2), TypeError),
        (PromptTooLongError("long"), PromptTooLongError),
    ],
    ids=["unicode", "odd", "long"],
)
def test_an_error_of_one_prompt_keeps_its_kind_and_names_the_prompt(error, kind):
    with LLM(tiny_model(), tokenizer=Unreadable(error), **OPTIONS) as llm:
        with pytest.raises(kind, match=r"^prompt 1: ") as caught:
            llm.generate(["good", "bad"], GREEDY, use_tqdm=False)
        assert caught.type is kind and caught.value.__cause__ is error


@pytest.mark.parametrize(
    "bad", ["", [], [5, VOCAB_SIZE], [5] * 128, 7.5, [5, None]], ids=["text", "list", "id", "length", "type", "item"]
)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_one_bad_request_among_good_ones_is_named_before_any_work_starts(bad, place):
    prompts: list[Any] = random_prompts(4)
    prompts.insert(place, bad)
    assert_names(refused((ValueError, TypeError), prompts, GREEDY), f"prompt {place}")


# ------------------------------------------------------------------------------------------------ sampling parameters


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"temperature": -0.1}, "at least 0"),
        ({"temperature": math.nan}, "at least 0"),
        ({"temperature": math.inf}, "finite"),
        ({"temperature": 1e-9}, "Use 0 for greedy"),
        ({"top_p": 0.0}, "(0, 1]"),
        ({"top_p": -0.5}, "between 0 and 1"),
        ({"top_p": 1.5}, "between 0 and 1"),
        ({"top_p": math.nan}, "between 0 and 1"),
        ({"min_p": -0.5}, "between 0 and 1"),
        ({"min_p": 1.5}, "between 0 and 1"),
        ({"min_p": math.nan}, "between 0 and 1"),
        ({"top_k": -2}, "at least -1"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_tokens": -5}, "at least 1"),
        ({"min_tokens": -1}, "at least 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "max_tokens (8)"),
        ({"stop_token_ids": [-1]}, "at least 0"),
        ({"stop": ""}, "empty string"),
        ({"stop": ["a", ""]}, "empty string"),
        ({"seed": -1}, "between 0 and"),
        ({"seed": 2**64}, "between 0 and"),
    ],
    ids=str,
)
def test_a_parameter_out_of_range_is_refused_with_its_name_value_and_limit(options, allowed):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**options)
    name, value = next(iter(options.items()))
    assert_names(str(caught.value), name, allowed)
    if isinstance(value, (int, float)) and value == value and value != 0.0:
        assert_names(str(caught.value), value)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": "hot"},
        {"temperature": None},
        {"temperature": True},
        {"top_p": "0.9"},
        {"min_p": [0.1]},
        {"top_k": 1.5},
        {"top_k": "5"},
        {"max_tokens": 2.0},
        {"max_tokens": True},
        {"min_tokens": None},
        {"ignore_eos": 1},
        {"stop_token_ids": 5},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": [1.0]},
        {"stop": 5},
        {"stop": [5]},
        {"stop": b"x"},
        {"seed": 1.5},
        {"seed": "one"},
    ],
    ids=str,
)
def test_a_parameter_of_a_wrong_type_is_refused_with_its_name(options):
    with pytest.raises(TypeError) as caught:
        SamplingParams(**options)
    assert_names(str(caught.value), next(iter(options)))


def test_an_unknown_sampling_parameter_is_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)


def test_sampling_params_cannot_be_changed_after_their_check():
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.temperature = -1.0
    assert params.temperature == 1.0


@pytest.mark.parametrize("params", [{"temperature": 0.0}, "greedy", 5, 0, "", False], ids=repr)
def test_sampling_params_of_a_wrong_type_are_refused(params):
    assert_names(refused(TypeError, [[5], [6]], params), "sampling_params", "SamplingParams")


def test_sampling_params_of_a_wrong_type_in_a_list_are_refused():
    assert_names(refused(TypeError, [[5], [6]], [GREEDY, None]), "sampling_params", "SamplingParams", "None")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_lists_of_different_lengths_are_refused_with_both_lengths(count):
    message = refused(ValueError, [[5], [6]], [GREEDY] * count)
    assert_names(message, "sampling_params", f"{count} entries", "2 prompts", "one for all, or one each")


@pytest.mark.parametrize(("name", "values"), [("priority", [1]), ("cache_salt", ["a", "b", "c"])])
def test_other_options_of_another_length_are_refused(name, values):
    message = refused(ValueError, [[5], [6]], GREEDY, **{name: values})
    assert_names(message, name, f"{len(values)} entries", "2 prompts")


@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", "high"), ("priority", 1.5), ("priority", True), ("cache_salt", 5), ("cache_salt", None)],
)
def test_other_options_of_a_wrong_type_are_refused(name, value):
    assert_names(refused(TypeError, [[5], [6]], GREEDY, **{name: value}), name, repr(value))


def test_a_stop_token_outside_the_vocabulary_is_refused_with_the_limit():
    message = refused(ValueError, [5], SamplingParams(stop_token_ids=[5, VOCAB_SIZE]))
    assert_names(message, "stop_token_ids", VOCAB_SIZE, "vocabulary")


def test_min_tokens_beyond_the_room_is_refused_with_the_numbers():
    message = refused(ValueError, [5] * 100, SamplingParams(min_tokens=29))
    assert_names(message, "min_tokens is 29", "100 tokens", "max_model_len (128)", "28")


def test_an_unknown_argument_of_generate_is_a_type_error():
    assert_names(refused(TypeError, [5], GREEDY, temperature=0.0), "temperature")


# ---------------------------------------------------------------------------------------------------------------- chat


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        None,
        [[]],
        [{"role": "user"}],
        [{"content": "hello"}],
        [{"role": "user", "content": "a"}, "b"],
        [[{"role": "user", "content": "a"}], "b"],
    ],
    ids=repr,
)
def test_messages_that_are_no_conversation_are_refused(messages):
    with pytest.raises(ValueError) as caught:
        shared_llm().chat(messages, GREEDY, use_tqdm=False)
    assert_names(str(caught.value), "conversation")


def test_chat_is_refused_without_a_chat_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    for llm in (LLM(tiny_model(), tokenizer=tokenizer, **OPTIONS), llm_without_tokenizer()):
        with pytest.raises(ValueError, match="chat template"):
            llm.chat([{"role": "user", "content": "a"}])


# -------------------------------------------------------------------------------------------------------------- options


def test_an_unknown_option_is_a_type_error_that_lists_the_near_names():
    with pytest.raises(TypeError) as caught:
        LLM(tiny_model(), max_num_batch_tokens=128)
    assert_names(str(caught.value), "max_num_batch_tokens", "Did you mean", "max_num_batched_tokens")


def test_an_unknown_option_like_no_other_lists_them_all():
    with pytest.raises(TypeError) as caught:
        LLM(tiny_model(), qqq=1)
    assert_names(str(caught.value), "qqq", "block_size", "enforce_eager", "gpu_memory_utilization")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_model_len": 0}, ["0", "at least 1"]),
        ({"max_model_len": 4096}, ["4096", "2048"]),
        ({"max_num_batched_tokens": 0}, ["0", "at least 1"]),
        ({"max_num_batched_tokens": 16}, ["16", "17", "block_size"]),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 64}, ["64", "max_num_seqs", "80"]),
        ({"max_num_seqs": -1}, ["-1", "at least 1"]),
        ({"block_size": 48}, ["48", "16, 32, 64"]),
        ({"num_kv_blocks": 1}, ["1", "at least 2"]),
        ({"kv_cache_memory_bytes": 0}, ["0", "at least 1"]),
        ({"gpu_memory_utilization": 0.0}, ["0.0", "above 0"]),
        ({"gpu_memory_utilization": 1.5}, ["1.5", "at most 1"]),
        ({"gpu_memory_utilization": math.nan}, ["nan", "above 0"]),
        ({"long_prefill_token_threshold": 8, "block_size": 16}, ["8", "16"]),
        ({"max_long_partial_prefills": 5, "max_num_partial_prefills": 2}, ["5", "2"]),
        ({"attention_backend": "paged"}, ["paged", "flex", "sdpa"]),
        ({"attention_backend": "flex", "enforce_eager": True}, ["flex", "enforce_eager", "sdpa"]),
        ({"dtype": "int8"}, ["int8", "bfloat16"]),
        ({"device": "tpu"}, ["tpu", "cuda"]),
        ({"device": "cuda:one"}, ["cuda:one", "cuda:N"]),
        ({"seed": -1}, ["-1", "at least 0"]),
        ({"seed": 2**64}, [2**64, "at most"]),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused_with_its_name_value_and_limit(options, named):
    with pytest.raises(ValueError) as caught:
        LLM(tiny_model(), **options)
    assert_names(str(caught.value), next(iter(options)), *named)


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": "128"},
        {"max_num_seqs": 2.0},
        {"block_size": True},
        {"enforce_eager": 1},
        {"enable_prefix_caching": "yes"},
        {"trust_remote_code": None},
        {"seed": None},
        {"seed": 0.5},
        {"revision": 5},
    ],
    ids=str,
)
def test_an_option_of_a_wrong_type_is_refused_with_its_name_and_value(options):
    with pytest.raises(TypeError) as caught:
        LLM(tiny_model(), **options)
    ((name, value),) = options.items()
    assert_names(str(caught.value), name, repr(value))


def test_a_config_cannot_be_changed_after_its_check():
    config = EngineConfig()
    with pytest.raises(AttributeError):
        config.block_size = 48
    assert config.block_size is None


@pytest.mark.parametrize("pool", [{"num_kv_blocks": 8}, {"kv_cache_memory_bytes": 8 * 16 * 2 * 2 * 2 * 64 * 4}])
def test_a_pool_smaller_than_one_sequence_is_refused_and_names_what_would_fit(pool):
    """Eight blocks of 16 tokens, one of them the null block: 112 tokens fit, max_model_len asks for 128."""
    options = OPTIONS | {"num_kv_blocks": None} | pool
    with pytest.raises(ValueError) as caught:
        LLM(tiny_model(), **options)
    assert_names(str(caught.value), "8 blocks", "max_model_len is 128", "at most 112", "9 blocks", "num_kv_blocks")


def test_a_pool_of_exactly_one_sequence_is_accepted():
    assert answer_of(LLM(tiny_model(), **(OPTIONS | {"num_kv_blocks": 9}))) == expected_answer()


def test_a_max_model_len_that_nobody_asked_for_yields_to_the_pool():
    options = OPTIONS | {"max_model_len": None, "num_kv_blocks": 8}
    assert LLM(tiny_model(), **options).config.max_model_len == 112


# --------------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("model", [None, 5, ["a"], b"name"], ids=repr)
def test_a_model_of_a_wrong_type_is_refused(model):
    with pytest.raises(TypeError) as caught:
        LLM(model)
    assert_names(str(caught.value), "name", "folder", "module", repr(model))


def test_a_module_that_is_no_language_model_is_refused():
    with pytest.raises(TypeError) as caught:
        LLM(nn.Linear(2, 2))
    assert_names(str(caught.value), "causal language model", "Linear")


@pytest.mark.parametrize("tokenizer", [5, object(), ["a"]], ids=["number", "object", "list"])
def test_a_tokenizer_of_a_wrong_type_is_refused(tokenizer):
    with pytest.raises(TypeError, match="tokenizer must be"):
        LLM(tiny_model(), tokenizer=tokenizer, **OPTIONS)


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def small(family: str, *, model_class: str | None = None, without: tuple[str, ...] = (), **fields: Any) -> Any:
    """A small model of any architecture of `transformers`."""
    config_class = getattr(transformers, f"{family}Config")
    known = {name: value for name, value in SMALL.items() if name not in without}
    model = getattr(transformers, model_class or f"{family.removesuffix('Text')}ForCausalLM")
    return model(config_class(**(known | fields))).eval()


def refused_model(model: nn.Module, **options: Any) -> str:
    """The message that refuses a model, which is left as it was."""
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(UnsupportedModelError) as caught:
        LLM(model, **(OPTIONS | options))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    return str(caught.value)


def test_a_sliding_window_is_refused_with_its_size_and_the_remedy():
    message = refused_model(tiny_model("mistral", sliding_window=64))
    assert_names(message, "MistralForCausalLM", "sliding window of 64", "max_model_len to at most 64")


def test_a_sliding_window_that_no_sequence_can_leave_is_served_exactly():
    windowed, full = tiny_model("mistral", sliding_window=128), tiny_model("mistral")
    answers = [
        [o.outputs[0].token_ids for o in LLM(model, **OPTIONS).generate(random_prompts(3, high=110), use_tqdm=False,
                                                                       sampling_params=GREEDY)]
        for model in (windowed, full)
    ]  # fmt: skip
    assert answers[0] == answers[1]


def test_a_sliding_window_of_a_few_layers_only_is_refused_too():
    model = small("Gemma3Text", head_dim=32, sliding_window=32, layer_types=["sliding_attention", "full_attention"])
    assert_names(refused_model(model), "sliding window of 32", "max_model_len")


def test_a_sliding_window_that_only_the_mask_knows_is_refused_too():
    """These layers pass no window to attention: the library puts it into the mask, which the engine replaces."""
    sizes = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "max_window_layers": 2}
    sizes |= {"shared_expert_intermediate_size": 32, "sliding_window": 32}
    message = refused_model(small("Qwen2Moe", use_sliding_window=True, **sizes))
    assert_names(message, "Qwen2MoeForCausalLM", "sliding window of 32")
    LLM(small("Qwen2Moe", use_sliding_window=False, **sizes), **OPTIONS).close()
    message = refused_model(small("Phimoe", num_local_experts=2, sliding_window=32))
    assert_names(message, "PhimoeForCausalLM", "sliding window of 32")


def test_soft_capping_is_refused_by_name():
    assert_names(refused_model(small("Gemma2", head_dim=32)), "Gemma2", "softcap", "not implemented")


def test_attention_sinks_are_refused_by_name():
    model = small("GptOss", head_dim=32, num_local_experts=2, num_experts_per_tok=1)
    assert_names(refused_model(model), "GptOss", "s_aux", "sinks", "not implemented")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "longrope",
            "factor": 2.0,
            "short_factor": [1.0] * 16,
            "long_factor": [2.0] * 16,
            "original_max_position_embeddings": 128,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_that_depends_on_the_batch_is_refused_by_name(rope):
    message = refused_model(small("Llama", rope_parameters=rope | {"rope_theta": 10_000.0}))
    assert_names(message, "LlamaForCausalLM", repr(rope["rope_type"]), "neighbours")


def test_rope_that_is_scaled_once_and_for_all_is_served():
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 128}
    model = small("Llama", rope_parameters=rope)
    prompt = random_prompts(1, low=60, high=60)[0]
    ids = torch.tensor([prompt])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    (output,) = LLM(model, **OPTIONS).generate(prompt, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected[0, 60:].tolist()


def test_an_encoder_is_refused_since_it_attends_in_both_directions():
    model = small("Bert", model_class="BertForMaskedLM", without=("num_key_value_heads",))
    assert_names(refused_model(model), "Bert", "both directions", "causal")


def test_an_encoder_with_a_language_modelling_head_is_refused_too():
    model = small("Bert", model_class="BertLMHeadModel", without=("num_key_value_heads",))
    assert_names(refused_model(model), "Bert", "both directions")


def test_an_encoder_decoder_is_refused():
    model = small("T5", model_class="T5ForConditionalGeneration", d_model=64, d_ff=64, num_layers=2, num_heads=2)
    assert_names(refused_model(model), "T5")


def test_a_state_space_model_is_refused_with_the_layers_that_cannot_be_served():
    model = small("Mamba", without=("num_attention_heads", "num_key_value_heads", "intermediate_size"))
    assert_names(refused_model(model), "MambaForCausalLM", "linear_attention")


def test_a_hybrid_of_attention_and_other_layers_is_refused():
    model = small("Lfm2", layer_types=["conv", "full_attention"])
    assert_names(refused_model(model), "Lfm2ForCausalLM", "'conv'")


def test_a_model_with_its_own_attention_code_is_refused():
    model = small("Bloom", without=("num_key_value_heads",))
    assert_names(refused_model(model), "BloomForCausalLM", "attention interface")


def test_attention_in_chunks_is_refused_or_bounded_like_a_window():
    """It is made by the mask alone, which the engine replaces: sequences beyond a chunk would be wrong in silence."""
    model = small("Llama4Text", head_dim=32, num_local_experts=2, attention_chunk_size=32, intermediate_size_mlp=64)
    assert_names(refused_model(model), "Llama4", "32")


def test_a_mask_that_the_model_computes_itself_is_refused():
    """It reaches attention as `attention_mask`, which the engine does not read."""
    assert_names(refused_model(small("Doge")), "Doge", "mask")


def test_a_base_model_without_a_head_is_refused():
    assert_names(refused_model(tiny_model().model), "LlamaModel")


def test_a_classifier_is_refused():
    model = small("Llama", model_class="LlamaForSequenceClassification", pad_token_id=0)
    assert_names(refused_model(model), "LlamaForSequenceClassification")
