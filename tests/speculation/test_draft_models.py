"""Drafts by a small model with the target's noise: the same outputs, and hardly a draft of its own copy rejected."""

import functools
from dataclasses import replace

import pytest

from nanovllm import LLM, SamplingParams
from tests.support.forked_processes import programs_are_forked
from tests.support.llms import OPTIONS, assert_idle_and_whole, generate, greedy, token_ids
from tests.support.other_models import small
from tests.support.tiny_models import random_prompts, tiny_model, tiny_tokenizer

PROMPTS = random_prompts(6, low=5, high=70, seed=1)
PARAMS = {
    "greedy": greedy(30),
    "sampled": SamplingParams(seed=5, max_tokens=30),
    "top-p": SamplingParams(temperature=0.7, top_p=0.9, seed=5, max_tokens=30),
    "penalties": SamplingParams(seed=5, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=30),
    "n": SamplingParams(seed=5, n=2, max_tokens=30),
}


def saved(path, module, tokenizer=None):
    module.save_pretrained(path)
    (tokenizer or tiny_tokenizer()).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def same(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("same"), tiny_model())


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("other"), tiny_model("qwen3", num_layers=1, seed=3))


def open_llm(draft, **options):
    drafts = {} if draft is None else {"speculation": "draft", "draft_model": draft}
    return LLM(tiny_model(), tokenizer=tiny_tokenizer(), **(OPTIONS | drafts | options))


def answers_without_drafts(prompts, params):
    with open_llm(None) as llm:
        return token_ids(generate(llm, prompts, params))


@pytest.mark.costly
@pytest.mark.parametrize("name", PARAMS)
def test_a_copy_of_the_model_draws_what_the_model_draws(name, same):
    """With the same noise at the same positions; with noise of its own hardly a sampled token would agree."""
    with open_llm(None) as llm:
        wanted = generate(llm, PROMPTS, PARAMS[name])
    with open_llm(same) as llm:
        outputs = generate(llm, PROMPTS, PARAMS[name])
        stats = llm.stats().speculation
        assert_idle_and_whole(llm)
    for one, two in zip(outputs, wanted, strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in two.outputs]
    assert stats.num_accepted_tokens > 0.98 * stats.num_draft_tokens > 100
    assert stats.by_source == {"draft": (stats.num_draft_tokens, stats.num_accepted_tokens)}


@functools.cache
def short(name):
    """Hardly a draft of a stranger is accepted: each token takes steps of both models."""
    params = replace(PARAMS[name], max_tokens=15)
    return params, answers_without_drafts(PROMPTS, params)


TIGHT = {"num_kv_blocks": 17, "max_model_len": 230}


@pytest.mark.full
@pytest.mark.parametrize(
    "name, options",
    [("greedy", {}), ("top-p", {}), ("top-p", TIGHT), ("top-p", {"max_num_batched_tokens": 80})],
)
def test_a_stranger_changes_no_token(name, options, other):
    params, wanted = short(name)
    with open_llm(other, **options) as llm:
        for _ in "cold", "warm":
            assert token_ids(generate(llm, PROMPTS, params)) == wanted
        drafter = llm._engine.scheduler.proposer.drafter
        assert llm.stats().speculation.num_draft_tokens > 50
        assert not drafter._shadows and drafter._manager.num_free_blocks == drafter._manager.num_blocks - 1


@pytest.mark.full
def test_shadows_without_blocks_are_computed_again(same):
    prompts = random_prompts(10, low=60, high=90, seed=2)
    wanted = answers_without_drafts(prompts, PARAMS["sampled"])
    with open_llm(same) as llm:
        manager = llm._engine.scheduler.proposer.drafter._manager
        manager.pop_free(manager.num_free_blocks - 24)
        assert token_ids(generate(llm, prompts, PARAMS["sampled"])) == wanted
        assert llm.stats().speculation.num_accepted_tokens > 20


@pytest.mark.full
def test_a_step_of_the_small_model_that_fails_costs_its_drafts(same, monkeypatch):
    wanted = answers_without_drafts(PROMPTS, PARAMS["sampled"])
    with open_llm(same) as llm:
        runner, calls = llm._engine.scheduler.proposer.drafter._runner, iter(range(10_000))
        execute = runner.execute

        def failing(batch):
            if next(calls) % 5 == 3:
                raise RuntimeError("busy")
            return execute(batch)

        monkeypatch.setattr(runner, "execute", failing)
        assert token_ids(generate(llm, PROMPTS, PARAMS["sampled"])) == wanted
        stats = llm.stats().speculation
        assert stats.num_failures > 2 and stats.num_accepted_tokens == stats.num_draft_tokens > 20


def test_models_that_cannot_draft_are_refused_by_name(tmp_path, same):
    few = saved(tmp_path / "few", tiny_model(vocab_size=256))
    windows = saved(tmp_path / "windows", small("Mistral", sliding_window=24))
    for folder, reason in ((few, "its vocabulary"), (windows, "layers that forget earlier tokens")):
        options = {"skip_tokenizer_init": True, "tokenizer": None}
        with pytest.raises(ValueError, match=reason):
            LLM(tiny_model(), speculation="draft", draft_model=folder, **(OPTIONS | options))
    for options in ({"speculation": "draft"}, {"draft_model": same}, {"speculation": "suffix", "draft_model": same}):
        with pytest.raises(ValueError, match="each needs the other"):
            LLM("folder", **options)


@programs_are_forked()
def test_each_replica_has_a_small_model_of_its_own(same):
    options = {"speculation": "draft", "draft_model": same, "data_parallel_size": 2, "routing": "round-robin"}
    wanted = answers_without_drafts(PROMPTS, PARAMS["sampled"])
    with LLM(same, **(OPTIONS | {"skip_tokenizer_init": True} | options)) as llm:
        assert token_ids(generate(llm, PROMPTS, PARAMS["sampled"])) == wanted
        stats = llm.stats().speculation
        assert stats.num_failures == 0 and stats.num_drafts >= 0
