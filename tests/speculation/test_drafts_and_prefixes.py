"""Drafts beside beams and embeddings: answers are those of an engine without drafts."""

import functools

from nanovllm import BeamSearchParams, SamplingParams
from tests.support.llms import assert_idle_and_whole, generate, open_llm, token_ids
from tests.support.mock_drafts import KnownAnswers
from tests.support.tiny_models import random_prompts

PROMPTS = random_prompts(6, low=60, high=120, seed=3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=12)


@functools.cache
def expected():
    with open_llm() as llm:
        return token_ids(generate(llm, PROMPTS, GREEDY))


def drafter():
    answers = zip(PROMPTS, expected(), strict=True)
    return KnownAnswers({tuple(prompt): [answer] for prompt, answer in answers})


def test_a_search_for_beams_is_without_drafts_and_streams_go_on_with_them():
    with open_llm() as llm:
        beams = llm.beam_search(PROMPTS[1:3], BEAMS)
    with open_llm(speculation=drafter()) as llm:
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        found = llm.beam_search(PROMPTS[1:3], BEAMS)
        before = llm.stats().speculation.num_drafts
        *_, output = stream
        assert llm.stats().speculation.num_drafts > before
        assert_idle_and_whole(llm)
    assert output.outputs[0].token_ids == expected()[0]
    assert [[each.tokens for each in one.sequences] for one in found] == [
        [each.tokens for each in one.sequences] for one in beams
    ]


def test_embeddings_and_scores_are_those_of_an_engine_without_drafts_and_draft_nothing():
    scored = "the capital", ["Paris is the capital.", "Two and two are four."]
    found = []
    for options in ({}, {"speculation": drafter()}):
        with open_llm(**options) as llm:
            embedded = [output.embedding.tolist() for output in llm.embed(PROMPTS, use_tqdm=False)]
            scores = [output.score for output in llm.score(*scored, method="cosine", use_tqdm=False)]
            found.append((embedded, scores))
            assert not options or llm.stats().speculation.num_drafts == 0
            assert_idle_and_whole(llm)
    assert found[0] == found[1]
