"""Two ranks in two processes give the tokens of one: those of `transformers`, and with every sampling parameter alike.

Both engines of this file are float32 on a CPU. In the first, prompts are chunked, preempted and found in the prefix
cache; the second has the kernels and the overlap.
"""

import functools

import numpy as np
import pytest

from nanovllm import LLM, EmbeddingParams, SamplingParams
from tests.support.equality import NUM_NEW_TOKENS, model, prompts, reference
from tests.support.llms import check_engine, greedy
from tests.support.logprobs import assert_same_reports
from tests.support.structured import FORMS, check_text, form
from tests.support.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("programs_are_forked")

GREEDY = greedy(NUM_NEW_TOKENS)
CROWDED = {
    "attention_backend": "sdpa", "enforce_eager": True, "num_kv_blocks": 17, "block_size": 16, "max_model_len": 230,
    "max_num_batched_tokens": 80,
}  # fmt: skip
FAST = {"attention_backend": "auto", "overlap": True, "max_num_batched_tokens": 128, "max_num_seqs": 8}


@functools.cache
def expected():
    return [reference(model("llama"), prompt) for prompt in prompts()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), "llama", eos_token_ids=[3])


@pytest.fixture(scope="module")
def crowded(folder):
    with LLM(folder, tensor_parallel_size=2, **CROWDED) as llm:
        assert llm._engine.model_runner.binding.layers[0].traits.num_heads == 3, "of 6"
        yield llm


@pytest.fixture(scope="module")
def pair(folder):
    """An engine of two ranks, and one of a single one with the same options."""
    with LLM(folder, tensor_parallel_size=2, **FAST) as two, LLM(folder, **FAST) as one:
        yield two, one


def generate(llm, params, batch=None):
    outputs = llm.generate(prompts() if batch is None else batch, params, use_tqdm=False)
    check_engine(llm)
    return outputs


def tokens(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_greedy_tokens_equal_those_of_transformers(pair):
    for _ in range(2):  # with a cold and a warm cache
        assert tokens(generate(pair[0], GREEDY)) == [[own] for own in expected()]


def test_greedy_tokens_equal_those_of_transformers_in_chunks_and_after_preemption(crowded):
    assert tokens(generate(crowded, GREEDY)) == [[own] for own in expected()]
    assert crowded.stats().prefix_cache_hits > 0
    assert crowded.stats().num_preemptions > 0


@pytest.mark.full
def test_seeded_samples_are_the_same_in_chunks_and_after_preemption(crowded, pair):
    params = SamplingParams(seed=2, n=2, max_tokens=12)
    before = crowded.stats().num_preemptions
    assert tokens(generate(crowded, params)) == tokens(generate(pair[1], params))
    assert crowded.stats().num_preemptions > before


def favour_the_last(token_ids, logits):
    logits[token_ids[-1] :] += 1.0
    return logits


PARAMS = {
    "seeded": {"seed": 3},
    "hot and cold": {"seed": 4, "temperature": 1.7},
    "next to greedy": {"seed": 4, "temperature": 1e-6},
    "top-k": {"seed": 5, "top_k": 7},
    "top-p": {"seed": 6, "top_p": 0.8},
    "min-p": {"seed": 7, "min_p": 0.1},
    "several samples": {"seed": 8, "n": 3, "top_p": 0.95},
    "penalties": {"seed": 9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "bias": {"temperature": 0.0, "logit_bias": {7: 9.0, 400: 9.0}},
    "bad words": {"temperature": 0.0, "bad_words": (" the",)},
    "allowed tokens": {"seed": 10, "allowed_token_ids": (3, 300, 400, 500)},
    "stop tokens, minimum": {"seed": 11, "stop_token_ids": tuple(range(0, 512, 3)), "min_tokens": 4},
    "stop strings": {"seed": 12, "stop": ("e", "a"), "max_tokens": 40},
    "structure": {"seed": 15, "structured_output": {"regex": "[a-f]{2,5}(,[a-f]{2,5}){0,3}"}, "max_tokens": 40},
    "own function": {"seed": 13, "logits_processors": (favour_the_last,)},
}


@pytest.mark.costly
@pytest.mark.parametrize("kind", PARAMS)
def test_every_parameter_gives_the_tokens_of_one_rank(pair, kind):
    params = SamplingParams(**({"max_tokens": 12} | PARAMS[kind]))
    outputs, others = (generate(llm, params, prompts()[5:9]) for llm in pair)
    assert tokens(outputs) == tokens(others)
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in others]
    assert [o.outputs[0].finish_reason for o in outputs] == [o.outputs[0].finish_reason for o in others]
    assert len({tuple(own) for output in tokens(outputs) for own in output}) > 2


@pytest.mark.full
def test_structured_outputs_are_those_of_one_rank_in_chunks_and_after_preemption(pair, crowded):
    kinds = [kind for kind in FORMS if kind != "json_object"] * 2
    params = [
        SamplingParams(seed=number, max_tokens=60, structured_output=form(kind), n=1 + number // 4)
        for number, kind in enumerate(kinds)
    ]
    before = crowded.stats().num_preemptions
    outputs, *others = (generate(llm, params, prompts()[2:10]) for llm in (pair[1], *pair[:1], crowded))
    assert [tokens(each) for each in others] == [tokens(outputs)] * 2
    assert crowded.stats().num_preemptions > before
    ended = [(kind, c.text) for kind, o in zip(kinds, outputs, strict=True) for c in o.outputs if c.stop_reason == 3]
    assert {kind for kind, _ in ended} == set(kinds)
    for kind, text in ended:
        check_text(kind, text)


def test_log_probabilities_are_those_of_one_rank(pair):
    params = SamplingParams(seed=14, max_tokens=6, logprobs=3, prompt_logprobs=2)
    for output, other in zip(*(generate(llm, params, prompts()[4:9]) for llm in pair), strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
        assert_same_reports(output.outputs[0].logprobs, other.outputs[0].logprobs, atol=1e-3)
        assert_same_reports(output.prompt_logprobs, other.prompt_logprobs, atol=1e-3)


def assert_same_embeddings(outputs, others):
    for output, other in zip(outputs, others, strict=True):
        assert output.embedding is not None and output.error is None
        np.testing.assert_allclose(output.embedding, other.embedding, atol=1e-4)


def test_embeddings_are_those_of_one_rank(pair, crowded):
    expected_states = pair[1].embed(prompts(), normalize=False, use_tqdm=False)
    for llm in (pair[0], crowded):  # at once, and in chunks after preemption
        assert_same_embeddings(llm.embed(prompts(), normalize=False, use_tqdm=False), expected_states)


def test_embeddings_beside_requests_of_every_kind_change_neither(pair):
    """Steps that embed alone, that embed and draw, and that embed beside a prompt's log-probabilities."""
    kinds = [EmbeddingParams(), GREEDY, SamplingParams(seed=3, max_tokens=6, logprobs=1, prompt_logprobs=1)]
    params = [kinds[number % 3] for number in range(9)]
    outputs, others = (generate(llm, params, prompts()[2:11]) for llm in pair)
    assert_same_embeddings(outputs[::3], others[::3])
    assert tokens(outputs[1::3]) == [[own] for own in expected()[3:11:3]]
    assert tokens(outputs[2::3]) == tokens(others[2::3])


def test_requests_that_draw_by_shards_and_others_run_in_one_batch(pair):
    kinds = [SamplingParams(**({"max_tokens": 10} | PARAMS[kind])) for kind in list(PARAMS)[:8]]
    outputs, others = (tokens(generate(llm, kinds, prompts()[2:10])) for llm in pair)
    assert outputs == others


def test_streams_priorities_and_aborts_work(pair):
    two, _ = pair
    stream = two.stream(prompts()[5], GREEDY)
    next(stream)
    urgent = two.generate(prompts()[6:8], GREEDY, priority=[3, -3], use_tqdm=False)
    assert tokens(urgent) == [[own] for own in expected()[6:8]]
    stream.close()  # its request is aborted
    assert tokens(generate(two, GREEDY, prompts()[:3])) == [[own] for own in expected()[:3]]


@pytest.mark.full
def test_what_the_table_refuses_is_refused_and_the_engine_goes_on(pair):
    two, _ = pair
    with pytest.raises(ValueError, match=r"weights_changed does not work with tensor_parallel_size: .* new engine"):
        two.weights_changed()
    assert tokens(generate(two, GREEDY, prompts()[:1])) == [expected()[:1]]
