"""A latency goal and shares of three clients, crossed with every other feature: the answers of an engine without them.

The goal is one that every step misses, so that each prompt is cut into single blocks beside decodes.
"""

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from nanovllm import LLM, SamplingParams, StepError, StructuredOutput
from tests.support import structured
from tests.support.llms import assert_idle_and_whole, fail_in_step, generate, greedy, open_llm, token_ids
from tests.support.replicas import REPLICAS, completions, tiny_folder
from tests.support.tiny_models import random_prompts

pytestmark = pytest.mark.usefixtures("programs_are_forked")

ON = {"itl_goal": 1e-3, "ttft_goal": 30.0, "client_weights": {"b": 2.0, "c": 0.5}}
FEW_SLOTS = {"max_num_seqs": 4, "max_num_batched_tokens": 96}
PROMPTS = random_prompts(9, low=3, high=110, seed=8)
LONG = greedy(16, ignore_eos=True)
GREEDY = greedy(8)
LONGER = greedy(40, ignore_eos=True)
FORM = StructuredOutput(regex="[a-c]{10}")

Answer = Callable[[LLM, list[str]], Any]


@pytest.fixture(autouse=True)
def goals_that_no_step_keeps(monkeypatch):
    monkeypatch.setattr("nanovllm.features.goals.building.resolve_goal", lambda config, seconds: config)


def generated(params=GREEDY, **options):
    def answer(llm, clients):
        return completions(llm.generate(PROMPTS, params, client=clients, use_tqdm=False, **options))

    return answer


def cached(llm, clients):
    both = [completions(generate(llm, PROMPTS, GREEDY, client=each)) for each in (clients, clients[::-1])]
    assert llm.stats().prefix_cache_hits > 0
    return both


class Near:
    """Numbers that are equal within the rounding of sums in another order."""

    def __init__(self, values):
        self._values = np.array(values)

    def __eq__(self, other):
        return isinstance(other, Near) and np.allclose(self._values, other._values, atol=1e-3)


def log_probabilities(llm, clients):
    params = greedy(8, logprobs=2, prompt_logprobs=1)
    outputs = generate(llm, PROMPTS, params, client=clients)
    tokens = [token for o in outputs for token in [*o.outputs[0].token_ids, *o.prompt_token_ids[1:]]]
    entries = [entry for o in outputs for entry in [*o.outputs[0].logprobs, *o.prompt_logprobs[1:]]]
    return completions(outputs), Near([entry[token].logprob for entry, token in zip(entries, tokens, strict=True)])


def streamed(llm, clients):
    streams = [llm.stream(p, LONG, client=client) for p, client in zip(PROMPTS, clients, strict=True)]
    seen = [[] for _ in streams]
    for _ in range(16):  # in turn
        for tokens, stream in zip(seen, streams, strict=True):
            with suppress(StopIteration):
                tokens[:] = next(stream).outputs[0].token_ids
    for stream in streams:
        stream.close()
    return seen


def aborted(llm, clients):
    """Some streams are closed half-way; the others go on."""
    streams = [llm.stream(p, LONG, client=c) for p, c in zip(PROMPTS, clients, strict=True)]
    for stream in streams:
        next(stream)
    for stream in streams[::2]:
        stream.close()
    return token_ids([list(stream)[-1] for stream in streams[1::2]])


def timed_out(llm, clients):
    timeouts = [1e-9 if number % 3 == 0 else 600.0 for number in range(len(PROMPTS))]
    outputs = generate(llm, PROMPTS, GREEDY, client=clients, timeout=timeouts)
    assert {output.outputs[0].finish_reason for output in outputs[::3]} == {"timeout"}
    return [completions(outputs)[number] for number in range(len(PROMPTS)) if number % 3]


def embedded(llm, clients):
    outputs = llm.embed(PROMPTS, client=clients, use_tqdm=False)
    beside = generate(llm, PROMPTS, GREEDY, client=clients)
    return completions(beside), Near([output.embedding for output in outputs])


def scored(llm, clients):
    documents = ["one", "a longer second one", "three " * 20]
    outputs = llm.score("which?", documents, method="cosine", client=clients[1], use_tqdm=False)
    return Near([output.score for output in outputs])


def after_a_failed_step(llm, clients):
    with pytest.MonkeyPatch.context() as patch:
        fail_in_step(patch, llm, 6, RuntimeError("boom"))
        with pytest.raises(StepError):
            generate(llm, PROMPTS, GREEDY, client=clients)
    return generated()(llm, clients)


CELLS = {
    "plain": (generated(), {}),
    "cached prefixes": (cached, FEW_SLOTS),
    "no prefix cache": (generated(), {"enable_prefix_caching": False}),
    "chunks": (generated(), {"max_num_batched_tokens": 20, "max_num_seqs": 4}),
    "preemption": (generated(LONGER), {"num_kv_blocks": 12, "max_model_len": 160, "max_num_batched_tokens": 80}),
    "samples": (generated(SamplingParams(n=3, seed=5, max_tokens=8)), FEW_SLOTS),
    "structured output": (generated(SamplingParams(max_tokens=20, seed=1, structured_output=FORM)), FEW_SLOTS),
    "log-probabilities": (log_probabilities, FEW_SLOTS),
    "streams": (streamed, FEW_SLOTS),
    "abort": (aborted, FEW_SLOTS),
    "timeouts": (timed_out, FEW_SLOTS),
    "embeddings": (embedded, FEW_SLOTS),
    "scores": (scored, FEW_SLOTS),
    "a failed step": (after_a_failed_step, FEW_SLOTS),
    "priorities": (generated(LONG, priority=[0, 1, -1] * 3), FEW_SLOTS),
    "ageing priorities": (generated(LONG, priority=[0, 1, -1] * 3), FEW_SLOTS | {"priority_ageing_s": 0.01}),
}
CLIENTS = ["a", "a", "a", "a", "b", "c", "a", "b", "a"]


def open_cell(name, **options):
    return (structured.open_llm if name == "structured output" else open_llm)(**(CELLS[name][1] | options))


@functools.cache
def expected(name):
    with open_cell(name) as llm:
        return CELLS[name][0](llm, [""] * len(PROMPTS))


# A step in flight has to be undone or read later; without one, these are what the scheduler does itself.
ONE_BY_ONE = ("plain", "preemption", "a failed step")


@pytest.mark.costly
@pytest.mark.parametrize("name, overlap", [*((name, True) for name in CELLS), *((name, False) for name in ONE_BY_ONE)])
def test_answers_are_those_without_goals_and_shares(name, overlap):
    right = expected(name)
    with open_cell(name, **ON, overlap=overlap) as llm:
        assert CELLS[name][0](llm, CLIENTS) == right
        assert_idle_and_whole(llm)
        assert name != "preemption" or llm.stats().num_preemptions > 0


@pytest.mark.full
def test_replicas_with_a_goal_and_shares_answer_as_one_engine_without():
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 96}
    with LLM(tiny_folder(), **(REPLICAS | limits | {"data_parallel_size": 1, "routing": None})) as llm:
        expected = generated(LONG)(llm, [""] * len(PROMPTS))
    goals = {"itl_goal": 60.0, "ttft_goal": 90.0, "client_weights": {"b": 2.0}}
    with LLM(tiny_folder(), **(REPLICAS | limits | goals)) as llm:
        assert generated(LONG)(llm, CLIENTS) == expected
        assert llm.stats().budget.itl_goal == 60.0
