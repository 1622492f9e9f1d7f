"""A latency goal and shares of three clients: structured outputs and replicas give the answers without them."""

import pytest

from nanovllm import LLM, SamplingParams, StructuredOutput
from tests.support import structured
from tests.support.llms import assert_idle_and_whole, greedy
from tests.support.replicas import REPLICAS, completions, tiny_folder
from tests.support.tiny_models import random_prompts

pytestmark = pytest.mark.usefixtures("programs_are_forked")

PROMPTS = random_prompts(9, low=3, high=110, seed=8)
LONG = greedy(16, ignore_eos=True)
FORM = SamplingParams(max_tokens=20, seed=1, structured_output=StructuredOutput(regex="[a-c]{10}"))
CLIENTS = ["a", "a", "a", "a", "b", "c", "a", "b", "a"]


def answers(llm, params, clients=""):
    return completions(llm.generate(PROMPTS, params, client=clients, use_tqdm=False))


@pytest.mark.parametrize("overlap", [True, False])
def test_structured_outputs_are_those_without_goals_and_shares(overlap, monkeypatch):
    """The goal is one that every step misses: prompts are cut into single blocks, and masks take turns."""
    monkeypatch.setattr("nanovllm.features.goals.building.resolve_goal", lambda config, seconds: config)
    slots = {"max_num_seqs": 4, "max_num_batched_tokens": 96}
    with structured.open_llm(**slots) as llm:
        right = answers(llm, FORM)
    goals = {"itl_goal": 1e-3, "ttft_goal": 30.0, "client_weights": {"b": 2.0, "c": 0.5}}
    with structured.open_llm(**(slots | goals), overlap=overlap) as llm:
        assert answers(llm, FORM, CLIENTS) == right
        assert_idle_and_whole(llm)


@pytest.mark.full
def test_replicas_with_a_goal_and_shares_answer_as_one_engine_without():
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 96}
    with LLM(tiny_folder(), **(REPLICAS | limits | {"data_parallel_size": 1, "routing": None})) as llm:
        expected = answers(llm, LONG)
    goals = {"itl_goal": 60.0, "ttft_goal": 90.0, "client_weights": {"b": 2.0}}
    with LLM(tiny_folder(), **(REPLICAS | limits | goals)) as llm:
        assert answers(llm, LONG, CLIENTS) == expected
        assert llm.stats().budget.itl_goal == 60.0
