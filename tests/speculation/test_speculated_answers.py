"""Outputs with drafts are those without, token for token, whatever the drafts are and whatever a request asks for."""

import functools
import random

import pytest

from nanovllm import SamplingParams
from tests.support import layer_kinds, llms
from tests.support.equality import model, prompts, reference
from tests.support.llms import assert_idle_and_whole, greedy, token_ids
from tests.support.mock_drafts import KnownAnswers, known_answers
from tests.support.overlap import requests
from tests.support.structured import EOS, FORMS, form
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE, random_prompts, tiny_model

PROMPTS = random_prompts(5, low=5, high=70, seed=1)
PARAMS = {
    "greedy": {"temperature": 0.0},
    "T = 0.7": {"temperature": 0.7},
    "T = 1.0, top-p": {"top_p": 0.9},
    "top-k, min-p": {"temperature": 0.9, "top_k": 20, "min_p": 0.05},
    "cold": {"temperature": 1e-4},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.4,
        "logit_bias": {7: 3.0, 9: -4.0},
    },
    "logprobs": {"logprobs": 3, "prompt_logprobs": 1},
    "logprobs, penalties": {"temperature": 0.0, "logprobs": 0, "frequency_penalty": 0.5},
    "bad words": {"temperature": 0.0, "bad_words": ["the cat", "e", "a"]},
    "allowed tokens": {"allowed_token_ids": tuple(range(3, 40))},
    "stop tokens": {"stop_token_ids": tuple(range(0, VOCAB_SIZE, 9))},
    "min_tokens": {"stop_token_ids": tuple(range(0, VOCAB_SIZE, 9)), "min_tokens": 9},
    "stop strings": {"stop": ("e", "at", "o")},
    "kept stop strings": {
        "stop": ("th", "in"),
        "min_tokens": 5,
        "include_stop_str_in_output": True,
    },
    "n": {"n": 3},
    "end of sequence": {"logit_bias": {EOS: 4.0}},
    "no end of sequence": {"logit_bias": {EOS: 4.0}, "ignore_eos": True},
}  # fmt: skip
RNG = random.Random()


@pytest.fixture(autouse=True)
def _drafts_of_a_test_depend_on_no_other():
    RNG.seed(0)


def _noisy(request, drafts):
    return [token_id if RNG.random() < 0.8 else RNG.randrange(VOCAB_SIZE) for token_id in drafts]


def _nearly_right(request, drafts):
    """Of answers so short that more noise would leave no run of drafts whole."""
    return [token_id if RNG.random() < 0.95 else RNG.randrange(VOCAB_SIZE) for token_id in drafts]


def _with_a_stop_inside(request, drafts):
    stops = sorted(request.sequence.stop_token_ids) or [EOS]
    place = RNG.randint(0, len(drafts))
    return [*drafts[:place], RNG.choice(stops), *drafts[place:]]


CHANGES = {
    "right": lambda _, drafts: drafts,
    "random": lambda request, _: [RNG.randrange(VOCAB_SIZE) for _ in range(request.max_tokens)],
    "always wrong": lambda _, drafts: [(token_id + 1) % VOCAB_SIZE for token_id in drafts],
    "mostly right": _noisy,
    "past the end": lambda _, drafts: drafts + [RNG.randrange(VOCAB_SIZE) for _ in range(40)],
    "with a stop token inside": _with_a_stop_inside,
    "one": lambda _, drafts: drafts[:1],
}


@functools.cache
def ending_model():
    return tiny_model(num_layers=1, eos_token_id=EOS)


def open_llm(module=None, **options):
    return llms.open_llm(module or ending_model(), **options)


def described(outputs):
    """Fields of an output without times; log-probabilities by token."""
    return [
        (
            [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs and list(map(list, c.logprobs)))],
            output.error,
            output.prompt_logprobs and [entry and list(entry) for entry in output.prompt_logprobs],
            output.metrics.num_output_tokens,
        )
        for output in outputs
        for c in output.outputs
    ]


def generate(llm, batch, params):
    outputs = llms.generate(llm, batch, params)
    assert_idle_and_whole(llm)
    return outputs


def answers_of(batch, outputs):
    return {tuple(p): [c.token_ids for c in o.outputs] for p, o in zip(batch, outputs, strict=True)}


def params_of(name):
    return SamplingParams(**{"seed": 5, "max_tokens": 30} | PARAMS[name])


@functools.cache
def expected(name):
    with open_llm() as llm:
        return generate(llm, PROMPTS, params_of(name))


# Each kind of request with drafts of which some are right, and some kinds with all others; the rest are slow ones.
EVERY_CHANGE = ("T = 1.0, top-p", "stop strings", "end of sequence", "preemption", "overlap", "json_schema")


def cells(names):
    """Each name with each change of drafts."""
    return [
        pytest.param(name, change, marks=[] if change == "mostly right" or name in EVERY_CHANGE else pytest.mark.slow)
        for name in names
        for change in CHANGES
    ]


@pytest.mark.costly
@pytest.mark.parametrize("name, change", cells(PARAMS))
def test_outputs_with_drafts_are_those_without(name, change):
    wanted = expected(name)
    with open_llm(speculation=KnownAnswers(answers_of(PROMPTS, wanted), CHANGES[change])) as llm:
        assert described(generate(llm, PROMPTS, params_of(name))) == described(wanted)
        counts = llm._engine.scheduler.proposer.counts
        assert sum(counts.drafted) > 0 or change == "with a stop token inside"
        assert llm.stats().num_output_tokens == sum(len(c.token_ids) for o in wanted for c in o.outputs)
        if change == "right" and name != "stop tokens":
            assert llm.stats().num_steps < max(len(c.token_ids) for o in wanted for c in o.outputs) * 0.6 + 4
        if change == "mostly right":
            assert described(generate(llm, PROMPTS, params_of(name))) == described(wanted), "with a warm cache"


def structured_params(kind):
    return [SamplingParams(seed=s, max_tokens=60, structured_output=form(kind)) for s in range(5)]


@functools.cache
def structured(kind):
    with open_llm() as llm:
        return generate(llm, PROMPTS, structured_params(kind))


@pytest.mark.costly
@pytest.mark.parametrize("kind, change", cells(FORMS))
def test_structured_outputs_with_drafts_are_those_without(kind, change):
    params, wanted = structured_params(kind), structured(kind)
    with open_llm(speculation=KnownAnswers(answers_of(PROMPTS, wanted), CHANGES[change])) as llm:
        assert described(generate(llm, PROMPTS, params)) == described(wanted)
        counts = llm._engine.scheduler.proposer.counts
        assert sum(counts.drafted) > 0
        assert counts.accepted == counts.drafted or change != "right"


def assert_drafts_leave(wanted, module, batch, **options):
    for change in ("right", "mostly right"):
        with open_llm(module, speculation=known_answers(batch, wanted, CHANGES[change]), **options) as llm:
            assert token_ids(generate(llm, batch, greedy(len(wanted[0])))) == wanted
            counts = llm._engine.scheduler.proposer.counts
            assert len(counts.accepted) == 7 and (counts.accepted == counts.drafted) == (change == "right")


@pytest.mark.costly
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_outputs_with_drafts_are_those_of_transformers(family):
    wanted = [reference(model(family), prompt) for prompt in prompts()]
    assert_drafts_leave(wanted, model(family), prompts(), max_num_seqs=256)  # rows for all drafts


SETTINGS = {
    "smallest budget": {"max_num_batched_tokens": 80, "max_num_seqs": 8},
    "preemption": {"num_kv_blocks": 17, "max_model_len": 230, "max_num_batched_tokens": 80},
    "no prefix cache": {"enable_prefix_caching": False},
    "overlap": {"overlap": True},
    "overlap, preemption": {"overlap": True, "num_kv_blocks": 17, "max_model_len": 230, "max_num_batched_tokens": 80},
    "C++ kernels": {"attention_backend": "cpp", "enforce_eager": False},
    "one draft": {"num_speculative_tokens": 1},
    "blocks of 32": {"block_size": 32},
}


@functools.cache
def of_every_kind():
    with open_llm() as llm:
        return generate(llm, *requests())


@pytest.mark.costly
@pytest.mark.parametrize("name, change", cells(SETTINGS))
def test_requests_of_every_kind_have_their_outputs_in_every_setting(name, change):
    (batch, params), wanted = requests(), of_every_kind()
    drafter = KnownAnswers(answers_of(batch, wanted), CHANGES[change])
    with open_llm(speculation=drafter, **SETTINGS[name]) as llm:
        for _ in range(2 if change == "mostly right" else 1):  # cold, and then warm
            assert described(generate(llm, batch, params)) == described(wanted)
        counts, stats = llm._engine.scheduler.proposer.counts, llm.stats()
        assert sum(counts.drafted) > (0 if change == "with a stop token inside" else 40)
        assert stats.prefix_cache_hits > 0 or name == "no prefix cache"
        assert stats.num_preemptions > 0 or "preemption" not in name or change != "mostly right"


@pytest.mark.costly
@pytest.mark.parametrize("family", ["Gemma3Text", "Mistral", "GptOss", "Llama4Text"])
def test_models_with_windows_and_chunks_have_the_outputs_of_transformers(family):
    """A rejected draft must free no block that a window still needs, and read none that was freed."""
    wanted = layer_kinds.expected(family, 40)
    assert_drafts_leave(wanted, layer_kinds.model(family), layer_kinds.prompts(), max_model_len=256)
