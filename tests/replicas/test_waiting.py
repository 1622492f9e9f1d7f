"""Requests without a replica: which may have killed theirs, and how suspects are tried one after the other."""

import pytest

from nanovllm import SamplingParams
from nanovllm.sequence import NewRequest
from nanovllm.serving.replicas.messages import SentCompletion, SentOutput, metric_values
from nanovllm.serving.replicas.pool_request import MAX_DEATHS, PoolRequest
from nanovllm.serving.replicas.waiting import WaitingRequests, may_have_run


def pool_request(name, *, num_deaths=0, placement=0, priority=0, client="", **params):
    new = NewRequest(name, [1, 2], SamplingParams(**params), priority=priority, client=client)
    request = PoolRequest(new)
    request.num_deaths, request.placement = num_deaths, placement
    return request


def report(request, token_ids):
    completions = [SentCompletion(0, "", token_ids, None, None, None)] if token_ids else []
    request.record(SentOutput(0, request.new.request_id, completions, False, 0, metric_values(request.metrics)))


def suspects(count):
    return [pool_request(str(number), num_deaths=MAX_DEATHS - 1) for number in range(count)]


def test_those_that_a_scheduler_runs_first_may_have_run():
    late, first, urgent = pool_request("a", placement=7), pool_request("b", placement=3), pool_request("c", priority=-1)
    several = pool_request("d", placement=4, n=3)
    assert may_have_run([late, several, first, urgent], 2, ages=False) == [urgent, first]
    assert may_have_run([late, several, first, urgent], 3, ages=False) == [urgent, first, several]
    assert may_have_run([late, first], 1, ages=True) == [first, late]


def test_with_several_clients_any_request_may_have_run():
    first, second, other = (pool_request(c, placement=n, client=c) for n, c in enumerate("aab"))
    assert may_have_run([first, second, other], 1, ages=False) == [first, second, other]
    assert may_have_run([first, second], 1, ages=False) == [first]


@pytest.mark.parametrize("end", ["token", "no new token", "ended"])
def test_suspects_are_admitted_one_after_the_other_and_others_at_once(end):
    waiting, (one, two, three), plain = WaitingRequests(), suspects(3), pool_request("plain")
    assert waiting.admit([one, two, plain, three], has_replica=True) == [one, plain]
    assert not waiting.may_admit and waiting.admit([], has_replica=True) == []
    if end == "ended":
        one.is_ended = True
    else:
        report(one, [5] if end == "token" else [])
    assert waiting.may_admit and waiting.admit([], has_replica=True) == [two]
    waiting.discard(three)
    two.is_ended = True
    assert not waiting.may_admit and waiting.admit([], has_replica=True) == []


def test_all_wait_while_no_replica_is_up_and_a_suspect_whose_replica_died_is_tried_again():
    waiting, (one, two), plain = WaitingRequests(), suspects(2), pool_request("plain")
    assert waiting.admit([one], has_replica=True) == [one]
    assert waiting.admit([one, two, plain], has_replica=False) == [] and waiting.may_admit
    late = pool_request("late")
    assert waiting.admit([late], has_replica=True) == [one, plain, late]
    waiting.clear()
    assert waiting.admit([two], has_replica=True) == [two]


def test_only_a_token_that_was_not_there_before_clears_a_request():
    """One that begins anew in each replica says that it has a token, and no more until its end."""
    request = pool_request("a", prompt_logprobs=0)
    assert [request.note_death() for _ in range(MAX_DEATHS - 1)] == [None] * (MAX_DEATHS - 1)
    report(request, [])
    assert request.is_suspect and request.has_begun
    report(request, [5])
    assert not request.is_suspect and request.num_deaths == 0


def test_a_request_ends_with_its_last_death():
    request = pool_request("0")
    assert [request.note_death() is None for _ in range(MAX_DEATHS)] == [True] * (MAX_DEATHS - 1) + [False]


def test_progress_moves_with_the_ends_of_samples_and_counts_a_preemption():
    request = pool_request("0", n=2)
    completions = [SentCompletion(0, "", [5], "stop", 5, None), SentCompletion(1, "", [6], None, None, None)]
    request.record(SentOutput(0, "0", completions, False, 0, metric_values(request.metrics)))
    moved = request.resumed(num_preemptions=1)
    assert [(sample.token_ids, sample.finish_reason) for sample in moved.samples] == [([5], "stop"), ([6], None)]
    assert moved.metrics.num_preemptions == 1
