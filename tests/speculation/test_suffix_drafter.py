"""Drafts from repeated text: matches, votes, salts, slices and the bound on memory."""

import random

import pytest

from nanovllm import SamplingParams
from nanovllm.features.speculation.drafter import DraftRequest
from nanovllm.features.speculation.suffix import BYTES_PER_TOKEN, MANY, SLICE, SuffixDrafter
from tests.support.llms import OVERLAP, generate, greedy, open_llm, token_ids
from tests.support.public_options import make_sequence
from tests.support.tiny_models import random_prompts

ROOM = 1 << 20


def request(prompt, output=(), *, salt="", max_tokens=7):
    sequence = make_sequence(prompt, cache_salt=salt, max_model_len=100_000)
    sequence.token_ids.extend(output)
    return DraftRequest(sequence, max_tokens)


def proposed(drafter, one):
    (drafts,) = drafter.propose([one])
    return drafts


def drafts_of(prompt, output=(), **options):
    """By a drafter that has seen nothing else."""
    return proposed(SuffixDrafter(ROOM), request(prompt, output, **options))


def finish(drafter, one):
    drafter.propose([one])
    drafter.end(one.sequence)


def test_what_followed_the_same_tokens_is_proposed():
    assert drafts_of([1, 2, 3, 4, 5, 6, 7, 8, 9], (1, 2, 3, 4)) == [5, 6, 7, 8]


def test_a_draft_is_no_longer_than_its_match_and_than_it_may_be():
    assert drafts_of([1, 2, 3, 4, 5, 6, 7, 8, 9], (1, 2, 3)) == [4, 5, 6]
    assert drafts_of([*range(20)], tuple(range(10)), max_tokens=2) == [10, 11]


def test_two_equal_tokens_are_no_match():
    assert drafts_of([1, 2, 3, 4, 5], (9, 2, 3)) == []
    assert drafts_of([1, 2]) == []


def test_the_longest_match_decides():
    prompt = [7, 1, 2, 3, 50, 8, 1, 2, 3, 60, 9, 1, 2, 3, 70]
    assert drafts_of(prompt, (8, 1, 2, 3))[0] == 60


def test_of_matches_of_one_length_most_decide_and_the_newest_among_equals():
    one, two = [1, 2, 3, 50, 0, 0], [1, 2, 3, 60, 0, 0]
    assert drafts_of([*one, *two], (1, 2, 3))[0] == 60
    assert drafts_of([*one, 9, *one, 8, *two], (7, 1, 2, 3))[0] == 50
    assert drafts_of([4, 1, 2, 3, 50, 5, 1, 2, 3, 60], (6, 1, 2, 3))[0] == 60


def test_the_newest_places_of_a_match_are_kept():
    prompt = [token for number in range(10, 16) for token in (number, 1, 2, 3, 50 + 10 * (number > 13))]
    assert drafts_of(prompt, (9, 1, 2, 3))[0] == 60


def test_a_text_that_repeats_itself_goes_on():
    assert drafts_of([5, 6, 7] * 5) == [5, 6, 7][:3]


def test_finished_outputs_serve_requests_that_begin_alike_with_the_same_salt():
    drafter, prompt = SuffixDrafter(ROOM), [*range(100, 120)]
    finish(drafter, request(prompt, (1, 2, 3, 4, 5, 6)))
    assert proposed(drafter, request(prompt, (1, 2, 3))) == [4, 5, 6]
    assert proposed(drafter, request([*prompt, 7, 8], (1, 2, 3))) == [4, 5, 6]
    assert proposed(drafter, request(prompt, (1, 2, 3), salt="other")) == []
    assert proposed(drafter, request([99, *prompt], (1, 2, 3))) == []


def test_long_prompts_are_indexed_a_slice_per_step():
    prompt = random.Random(1).choices(range(1000), k=4 * SLICE)
    drafter, one = SuffixDrafter(ROOM), request([*prompt, *prompt[100:110]])
    answers = [proposed(drafter, one) for _ in range(6)]
    assert answers[:4] == [[]] * 4 and answers[4] == prompt[110:117]


def test_sequences_that_wait_for_drafts_index_a_slice_per_step_together():
    drafter, choice = SuffixDrafter(10**9), random.Random(3)
    outputs = [choice.choices(range(1000), k=SLICE) for _ in range(6)]
    for output in outputs:
        drafter.end(request([1, 2, 3], tuple(output)).sequence)
    running = [request([1, 2, 3], tuple(outputs[-1][10:14])).sequence for _ in range(5)]
    expected = []
    for _ in range(len(outputs)):
        drafter.begin_step()
        expected.append([drafter.expects(sequence) for sequence in running])
    assert expected == [[False] * 5] * 5 + [[True] * 5]


@pytest.mark.parametrize("count, steps", [(MANY - 1, [True] * 6), (MANY, [False, False, False, True, False, False])])
def test_new_tokens_of_many_requests_are_looked_up_a_few_at_a_time(count, steps):
    drafter, running = SuffixDrafter(10**9), [request([*range(30)]).sequence for _ in range(count)]
    drafter.begin_step()
    assert [drafter.expects(sequence) for sequence in running] == [False] * count
    for sequence in running:
        sequence.token_ids.extend(range(4))  # which stood there before
    found = []
    for token_id in range(4, 10):
        drafter.begin_step()
        expected = [drafter.expects(sequence) for sequence in running]
        found.append(expected == [True] * count)
        for sequence in running:
            sequence.token_ids.append(token_id)
    assert found == [True, *steps[:5]]


def test_memory_is_bounded_and_the_oldest_outputs_go_first():
    drafter, prompt, choice = SuffixDrafter(1000 * BYTES_PER_TOKEN), [*range(100, 120)], random.Random(2)
    outputs = [tuple(choice.choices(range(1000), k=100)) for _ in range(30)]
    for output in outputs:
        one = request(prompt, output)
        for _ in range(2):
            drafter.propose([one])
        drafter.end(one.sequence)
        assert drafter.num_bytes <= 1000 * BYTES_PER_TOKEN
    drafter.propose([request([1])])
    assert proposed(drafter, request(prompt, outputs[-1][:10])) == list(outputs[-1][10:17])
    assert proposed(drafter, request(prompt, outputs[0][:10])) == []


def test_a_request_that_memory_does_not_hold_has_no_drafts():
    drafter = SuffixDrafter(50 * BYTES_PER_TOKEN)
    one = request([1, 2, 3, 4] * 50)
    assert [proposed(drafter, one) for _ in range(4)] == [[]] * 4
    drafter.end(one.sequence)
    assert drafter.num_bytes == 0


def test_nothing_is_left_of_requests_that_ended():
    prompts = random_prompts(6, low=20, high=60, seed=3)
    with open_llm(speculation="suffix") as llm:
        params = [greedy(number) for number in range(5, 11)]
        generate(llm, prompts, params)
        drafter = llm._engine.scheduler.proposer.drafter
        assert not drafter._own


@OVERLAP
def test_outputs_are_those_without_drafts_and_a_second_request_is_drafted_from_the_first(overlap):
    prompts = random_prompts(5, low=20, high=60, seed=4)
    params = SamplingParams(seed=2, max_tokens=40)
    with open_llm() as llm:
        wanted = token_ids(generate(llm, prompts, params))
    with open_llm(speculation="suffix", overlap=overlap) as llm:
        assert token_ids(generate(llm, prompts, params)) == wanted
        before = llm.stats()
        assert token_ids(generate(llm, prompts, params)) == wanted
        after = llm.stats()
    assert after.num_steps - before.num_steps < (25 if overlap else 20)
    drafted, accepted = after.speculation.by_source["suffix"]
    assert accepted == after.speculation.num_accepted_tokens > 100 and drafted >= accepted
    assert after.speculation.tokens_per_draft > 2.0


@pytest.mark.costly
@OVERLAP
def test_steps_are_those_without_drafts_where_nothing_repeats(overlap):
    """With overlap a request would miss a step for each draft that it waited for."""
    prompts = random_prompts(8, low=5, high=90, seed=6)
    params = [SamplingParams(seed=9, max_tokens=20 + 3 * number) for number in range(8)]
    found = []
    for speculation in (None, "suffix"):
        with open_llm(speculation=speculation, overlap=overlap, max_num_batched_tokens=80) as llm:
            found.append((token_ids(generate(llm, prompts, params)), llm.stats().num_steps))
    assert found[0] == found[1]
