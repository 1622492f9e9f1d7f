"""Models with recurrent states, alone or beside K and V: greedy tokens of `transformers`, and modules as found."""

import random

import pytest
import torch

from nanovllm import LLM, SamplingParams, UnsupportedModelError
from nanovllm.errors import StepError
from nanovllm.features.composition.binding import build_binding
from nanovllm.features.states.state_layers import recurrent_modules
from tests.support.class_cases import own_answers
from tests.support.class_outcomes import CHUNKS
from tests.support.llms import check_engine, fail_in_step, greedy, token_ids
from tests.support.logprobs import assert_right
from tests.support.tiny_classes import VOCAB_SIZE, tiny_class_model
from tests.support.tiny_models import tiny_tokenizer

NUM_TOKENS = 4
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)
# Around chunks of 64, short of a convolution's width, and with a token alone, which is no decode.
LENGTHS = (1, 3, 63, 64, 65, 130, 200)
OPTIONS = {
    "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4, "num_kv_blocks": 60, "max_num_batched_tokens": 90,
}  # fmt: skip
# Of each kind of state: the delta rule, a state space beside attention and by itself, convolutions.
FAMILIES = ("Qwen3NextForCausalLM", "FalconH1ForCausalLM", "MambaForCausalLM", "Lfm2ForCausalLM")


def prompts_of(class_name, lengths=LENGTHS):
    choice = random.Random(class_name)
    return [[choice.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def generate(llm, prompts, params=GREEDY):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check_engine(llm)
    return token_ids(outputs)


def attributes_of(model):
    return [dict(vars(module)) for module in model.modules()]


@pytest.mark.costly
@pytest.mark.parametrize("class_name", CHUNKS)
def test_greedy_tokens_are_those_of_transformers_in_chunks_and_batches_of_decodes(class_name):
    model, prompts = tiny_class_model(class_name), prompts_of(class_name)
    before = attributes_of(model)
    with LLM(model, **OPTIONS) as llm:
        found = generate(llm, prompts)
        assert attributes_of(model) == before, "a live module is its owner's between steps"
        assert llm._engine.model_runner.binding.mixers.chunk == CHUNKS[class_name]
    assert found == own_answers(model, prompts, NUM_TOKENS)
    assert len({token for tokens in found for token in tokens}) > 2, "its tokens do not depend on the prompts"


@pytest.mark.full
@pytest.mark.parametrize("class_name", FAMILIES)
def test_a_saved_model_with_packed_weights_answers_alike(class_name, tmp_path):
    model, prompts = tiny_class_model(class_name), prompts_of(class_name)
    model.save_pretrained(tmp_path)
    options = OPTIONS | {"enforce_eager": False}
    with LLM(tmp_path, tokenizer=tiny_tokenizer(), **options) as llm:
        found = generate(llm, prompts)
    assert found == own_answers(model, prompts, NUM_TOKENS)


@pytest.mark.parametrize("class_name", FAMILIES)
def test_a_binding_that_is_closed_hands_the_module_back(class_name):
    model = tiny_class_model(class_name)
    before = attributes_of(model)
    binding = build_binding(model, is_live=False)
    binding.caches.allocate(64, num_records=3)
    with binding.installed():
        assert any("forward" in vars(layer.module) for layer in binding.mixers.layers)
    binding.close()
    assert attributes_of(model) == before


# Two prompts with a common beginning of two blocks, and two whose answers begin another block of 64.
CROSSED = (60, 64, 125, 190)
SCARCE = OPTIONS | {"max_model_len": 224, "num_kv_blocks": 10}
ANSWER = 14
SINGLE = greedy(ANSWER, ignore_eos=True)


def crossed_prompts(class_name):
    *own, shared = prompts_of(class_name, (*CROSSED, 130))
    return [*own, shared + own[0][:9], shared + own[1][:40]]


@pytest.fixture(scope="module", params=FAMILIES)
def crossed(request):
    """A model, prompts and answers."""
    model, prompts = tiny_class_model(request.param), crossed_prompts(request.param)
    return model, prompts, own_answers(model, prompts, ANSWER)


def answers(llm, prompts):
    return generate(llm, prompts, SINGLE)


@pytest.mark.costly
@pytest.mark.parametrize("overlap", [False, True])
def test_prefixes_are_hit_with_the_same_tokens_cold_and_warm(crossed, overlap):
    model, prompts, expected = crossed
    with LLM(model, block_size=64, overlap=overlap, **OPTIONS) as llm:
        assert answers(llm, prompts) == expected
        cold = llm.stats().prefix_cache_hits
        assert cold >= 128, "two prompts of one call share two blocks"
        assert answers(llm, prompts) == expected
        assert llm.stats().prefix_cache_hits >= cold + 64 + 128 + 2 * 128


@pytest.mark.costly
def test_preempted_requests_go_on_with_the_same_tokens(crossed):
    model, prompts, expected = crossed
    with LLM(model, block_size=64, **SCARCE) as llm:
        for _ in range(2):
            assert answers(llm, prompts) == expected
        assert llm.stats().num_preemptions > 0


@pytest.mark.costly
@pytest.mark.parametrize("number", [3, 9])
def test_a_failed_step_returns_to_the_last_state_that_is_kept(crossed, monkeypatch, number):
    """It has overwritten states in place; the requests of the step are computed again from there."""
    model, prompts, expected = crossed
    with LLM(model, block_size=64, overlap=True, **SCARCE) as llm:
        with monkeypatch.context() as patch:
            fail_in_step(patch, llm, number, RuntimeError("once"))
            with pytest.raises((StepError, RuntimeError)):
                answers(llm, prompts)
        assert answers(llm, prompts) == expected


def test_a_stream_goes_on_behind_a_failed_step(crossed, monkeypatch):
    """The step ends the stream that is read; the state of the other one was overwritten by it."""
    model, prompts, expected = crossed
    with LLM(model, block_size=64, **OPTIONS) as llm:
        fail_in_step(monkeypatch, llm, 8, RuntimeError("once"))
        read, other = (llm.stream(prompt, SINGLE) for prompt in (prompts[0], prompts[3]))
        next(other)
        with pytest.raises((StepError, RuntimeError)):
            list(read)
        assert list(other)[-1].outputs[0].token_ids == expected[3]
        check_engine(llm)


@pytest.mark.costly
def test_samples_and_aborted_streams_change_no_token(crossed):
    model, prompts, expected = crossed
    with LLM(model, block_size=64, **OPTIONS) as llm:
        aborted = llm.stream(prompts[3], SINGLE)
        next(aborted)
        aborted.close()
        samples = SamplingParams(n=2, top_k=1, max_tokens=ANSWER, ignore_eos=True)
        outputs = llm.generate(prompts, samples, use_tqdm=False)
        assert [[sample.token_ids for sample in output.outputs] for output in outputs] == [[e, e] for e in expected]
        check_engine(llm)


def test_padding_and_other_sequences_do_not_reach_a_state():
    """Slots that a step does not read hold NaN."""
    model, prompts = tiny_class_model("Qwen3NextForCausalLM"), prompts_of("Qwen3NextForCausalLM")
    with LLM(model, **OPTIONS) as llm:
        for states in llm._engine.model_runner.binding.caches.of_records:
            for state in states:
                state.fill_(float("nan"))
        assert generate(llm, prompts) == own_answers(model, prompts, NUM_TOKENS)


def test_embeddings_and_logprobs_of_prompts_are_the_models_own():
    model, prompt = tiny_class_model("LaraMiniForCausalLM"), prompts_of("LaraMiniForCausalLM")[5]
    params = greedy(1, prompt_logprobs=0)
    with LLM(model, **OPTIONS) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        (embedded,) = llm.embed([prompt], normalize=False, use_tqdm=False)
    assert_right(model, output, params, atol=1e-3)
    with torch.no_grad():
        states = model.base_model(torch.tensor([prompt])).last_hidden_state[0]
    torch.testing.assert_close(torch.tensor(embedded.embedding), states[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    "class_name, chunk, expected", [("Mamba2ForCausalLM", 256, 256), ("Qwen3_5ForCausalLM", 64, 64)]
)
def test_blocks_hold_whole_chunks_of_the_prefill(class_name, chunk, expected):
    model = tiny_class_model(class_name)
    for module in model.modules():
        if hasattr(module, "chunk_size"):
            module.chunk_size = chunk
    options = OPTIONS | {"max_num_batched_tokens": 512}
    with pytest.raises(ValueError, match=f"block_size is 16, but .* {chunk} tokens at a time.* Set it to .*256"):
        LLM(model, block_size=16, **options)
    with LLM(model, **options) as llm:
        assert llm.config.block_size == expected


def test_slots_of_states_suffice_for_all_running_sequences_where_memory_does():
    model = tiny_class_model("FalconH1ForCausalLM")
    with LLM(model, **OPTIONS) as llm:
        runner = llm._engine.model_runner
        assert runner.pools.num_blocks[-1] >= 1 + 2.1 * OPTIONS["max_num_seqs"]
        states = sum(state.nbytes for layer in runner.binding.caches.of_records for state in layer)
        assert states == runner.pools.groups[-1].block_bytes * runner.pools.num_blocks[-1]


def test_a_backend_is_refused_where_no_layer_attends():
    with pytest.raises(ValueError, match="attention_backend is 'flex', but no layer of this model attends"):
        LLM(tiny_class_model("MambaForCausalLM"), attention_backend="flex", max_model_len=128)


def test_a_mixer_that_runs_twice_in_a_pass_is_refused():
    model = tiny_class_model("Lfm2ForCausalLM")
    convolution = recurrent_modules(model)[0]
    layer = next(layer for layer in model.model.layers if convolution in layer.modules())
    model.model.layers.append(layer)
    model.config.layer_types = [*model.config.layer_types, "conv"]
    model.config.num_hidden_layers = 3
    with pytest.raises(UnsupportedModelError, match="more than once per forward pass"):
        LLM(model, max_model_len=128)
