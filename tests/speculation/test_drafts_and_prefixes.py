"""Drafts with tiers of the prefix cache, beams, forks and embeddings: answers are those of an engine without drafts."""

import functools

import pytest

from nanovllm import BeamSearchParams, SamplingParams
from tests.support.llms import OVERLAP, assert_idle_and_whole, generate, greedy, open_llm, token_ids
from tests.support.mock_drafts import known_answers
from tests.support.tiny_models import random_prompts

PROMPTS = random_prompts(6, low=60, high=120, seed=3)
PARAMS = {"greedy": greedy(24), "sampled": SamplingParams(seed=5, max_tokens=24)}
BEAMS = BeamSearchParams(beam_width=3, max_tokens=12)


@functools.cache
def expected(name):
    with open_llm() as llm:
        return token_ids(generate(llm, PROMPTS, PARAMS[name]))


def drafter(name):
    return known_answers(PROMPTS, expected(name))


@pytest.mark.costly
@OVERLAP
@pytest.mark.parametrize("name", PARAMS)
def test_prefixes_come_back_from_a_tier(name, overlap):
    options = {"num_kv_blocks": 33, "prefix_cache_host_bytes": 8 << 20, "overlap": overlap}
    with open_llm(speculation=drafter(name), **options) as llm:
        for _ in range(3):  # the pool holds two of these prompts: later rounds find the others in host memory
            for prompt, answer in zip(PROMPTS, expected(name), strict=True):
                assert token_ids(generate(llm, [prompt], PARAMS[name])) == [answer]
        assert token_ids(generate(llm, PROMPTS, PARAMS[name])) == expected(name)
        stats = llm.stats()
        assert stats.tiers.num_loaded_blocks > 0 and stats.speculation.num_accepted_tokens > 0
        assert_idle_and_whole(llm)


def test_a_search_for_beams_is_without_drafts_and_streams_go_on_with_them():
    with open_llm() as llm:
        beams = llm.beam_search(PROMPTS[1:3], BEAMS)
    with open_llm(speculation=drafter("greedy")) as llm:
        stream = llm.stream(PROMPTS[0], PARAMS["greedy"])
        next(stream)
        found = llm.beam_search(PROMPTS[1:3], BEAMS)
        before = llm.stats().speculation.num_drafts
        *_, output = stream
        assert llm.stats().speculation.num_drafts > before
        assert_idle_and_whole(llm)
    assert output.outputs[0].token_ids == expected("greedy")[0]
    assert [[each.tokens for each in one.sequences] for one in found] == [
        [each.tokens for each in one.sequences] for one in beams
    ]


def test_embeddings_and_scores_are_those_of_an_engine_without_drafts_and_draft_nothing():
    scored = "the capital", ["Paris is the capital.", "Two and two are four."]
    found = []
    for options in ({}, {"speculation": drafter("greedy")}):
        with open_llm(**options) as llm:
            embedded = [output.embedding.tolist() for output in llm.embed(PROMPTS, use_tqdm=False)]
            scores = [output.score for output in llm.score(*scored, method="cosine", use_tqdm=False)]
            found.append((embedded, scores))
            assert not options or llm.stats().speculation.num_drafts == 0
            assert_idle_and_whole(llm)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", PARAMS)
def test_a_fork_goes_on_with_drafts(name):
    with open_llm(speculation=drafter(name)) as llm:
        stream = llm.stream(PROMPTS[0], PARAMS[name])
        output = next(stream)
        while len(output.outputs[0].token_ids) < 8:
            output = next(stream)
        fork = llm.fork(output.request_id, len(PROMPTS[0]) + 3, greedy(10))
        *_, forked = fork
        *_, output = stream
        assert_idle_and_whole(llm)
    assert output.outputs[0].token_ids == expected(name)[0]
    with open_llm() as llm:
        prompt = [*PROMPTS[0], *expected(name)[0][:3]]
        answer = token_ids(generate(llm, [prompt], greedy(10)))
    assert [forked.outputs[0].token_ids] == answer
