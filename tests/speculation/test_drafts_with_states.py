"""Drafts for models with recurrent states: a rejected draft leaves no trace in them, and answers are those without."""

import functools
import random

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.errors import StepError
from tests.support.class_cases import own_answers
from tests.support.llms import check_engine, fail_in_step, generate
from tests.support.mock_drafts import KnownAnswers
from tests.support.tiny_classes import VOCAB_SIZE, tiny_class_model
from tests.support.tiny_models import tiny_tokenizer

# Of each kind of state: the delta rule, a state space beside attention and by itself, convolutions.
FAMILIES = ("Qwen3NextForCausalLM", "FalconH1ForCausalLM", "MambaForCausalLM", "Lfm2ForCausalLM")
NUM_TOKENS = 40
LENGTHS = (5, 63, 64, 65, 100)
PARAMS = {
    "greedy": {"temperature": 0.0},
    "top-p": {"top_p": 0.9},
    "n": {"temperature": 0.7, "n": 3},
    "penalties, logprobs": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 2},
}
SETTINGS = {
    "roomy": {},
    "overlap": {"overlap": True},
    "preemption": {"num_kv_blocks": 5, "max_num_seqs": 10},
    "no prefix cache": {"enable_prefix_caching": False},
    "few slots": {"num_kv_blocks": 12, "max_num_seqs": 9},
}
OPTIONS = {
    "enforce_eager": True, "max_model_len": 160, "max_num_seqs": 12, "num_kv_blocks": 60, "max_num_batched_tokens": 90,
    "block_size": 64,
}  # fmt: skip
RNG = random.Random(0)


def mostly_right(_, drafts):
    return [token_id if RNG.random() < 0.85 else RNG.randrange(VOCAB_SIZE) for token_id in drafts]


def always_wrong(_, drafts):
    return [(token_id + 1) % VOCAB_SIZE for token_id in drafts]


@functools.cache
def model(family):
    return tiny_class_model(family)


@functools.cache
def prompts():
    choice = random.Random(4)
    beginning, *own = [[choice.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (66, *LENGTHS)]
    return [*own, beginning + own[0], beginning + own[0][:3]]


def params_of(name):
    return SamplingParams(**{"seed": 5, "max_tokens": NUM_TOKENS, "ignore_eos": True} | PARAMS[name])


def open_llm(family, **options):
    return LLM(model(family), tokenizer=tiny_tokenizer(), **(OPTIONS | options))


def answers(llm, name):
    outputs = generate(llm, prompts(), params_of(name))
    check_engine(llm)
    return [[(c.token_ids, c.logprobs and [*map(list, c.logprobs)]) for c in output.outputs] for output in outputs]


@functools.cache
def expected(family, name):
    with open_llm(family) as llm:
        return answers(llm, name)


def drafter(family, name, change):
    pairs = zip(prompts(), expected(family, name), strict=True)
    return KnownAnswers({tuple(prompt): [tokens for tokens, _ in samples] for prompt, samples in pairs}, change)


@pytest.mark.full
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_with_drafts_are_those_without(family, name):
    wanted = expected(family, name)
    if name == "greedy":
        own = own_answers(model(family), prompts(), NUM_TOKENS)
        assert [samples[0][0] for samples in wanted] == own, "those of transformers"
    for change in (mostly_right, always_wrong):
        with open_llm(family, speculation=drafter(family, name, change)) as llm:
            for _ in "cold", "warm":
                assert answers(llm, name) == wanted
            stats = llm.stats().speculation
            assert stats.num_draft_tokens > stats.num_accepted_tokens
            assert (stats.num_accepted_tokens > 100) == (change is mostly_right)


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_every_setting(family, setting):
    with open_llm(family, speculation=drafter(family, "top-p", mostly_right), **SETTINGS[setting]) as llm:
        for _ in "cold", "warm":
            assert answers(llm, "top-p") == expected(family, "top-p")
        stats = llm.stats()
        assert stats.speculation.num_accepted_tokens > 30
        assert stats.num_preemptions > 0 or setting != "preemption"


@pytest.mark.full
def test_right_drafts_take_few_steps_and_wrong_ones_no_more_than_none():
    family, steps = "FalconH1ForCausalLM", {}
    for change in (None, lambda _, drafts: drafts, always_wrong):
        options = {} if change is None else {"speculation": drafter(family, "greedy", change)}
        with open_llm(family, **options) as llm:
            answers(llm, "greedy")
            steps[change] = llm.stats().num_steps
    without, right, wrong = steps.values()
    assert right < 0.6 * without
    assert wrong <= without + 2  # a rejection costs rows, never a token


def test_aborted_and_failed_requests_leave_no_slot_taken(monkeypatch):
    family = "Lfm2ForCausalLM"
    with open_llm(family, speculation=drafter(family, "greedy", mostly_right), overlap=True) as llm:
        stream = llm.stream(prompts()[0], params_of("greedy"))
        for _ in range(3):
            next(stream)
        stream.close()
        fail_in_step(monkeypatch, llm, 6, RuntimeError("out of luck"))
        with pytest.raises(StepError):
            answers(llm, "greedy")
        assert answers(llm, "greedy") == expected(family, "greedy")
        assert not llm._engine.scheduler.block_manager.groups[-1].kept


def test_a_pool_has_a_third_slot_for_each_sequence_with_drafts():
    with open_llm("Lfm2ForCausalLM", num_kv_blocks=4, max_num_seqs=20) as llm:
        without = llm.stats().cache_groups[-1].num_blocks
    with open_llm("Lfm2ForCausalLM", num_kv_blocks=4, max_num_seqs=20, speculation="suffix") as llm:
        assert llm.stats().cache_groups[-1].num_blocks == without + 20
