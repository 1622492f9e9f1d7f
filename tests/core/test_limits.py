"""Timeouts and the limit on waiting requests, by a clock that only the test moves."""

import functools
import math

import pytest

from nanovllm import EngineConfig, OutputKind, QueueFullError
from nanovllm.build import build_engine
from nanovllm.features.groups.block_checks import check_scheduler
from tests.support.llms import OPTIONS, generate, greedy, open_llm, shared_llm, submit
from tests.support.tiny_models import random_prompts, tiny_model, tiny_tokenizer

LONG = greedy(60)
PROMPT, OTHER = random_prompts(2, low=40, high=40, seed=1)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def open_with(clock, **options):
    return build_engine(tiny_model(), tiny_tokenizer(), None, OPTIONS | options, clock=clock)


def ask(engine, name, prompt=PROMPT, params=LONG, **options):
    submit(engine, name, prompt, params, **options)


def outputs_of(engine, num_steps=None):
    """What comes of so many steps, or of all."""
    while engine.has_unfinished and num_steps != 0:
        engine.step()
        num_steps = None if num_steps is None else num_steps - 1
    outputs = list(engine.outputs)
    engine.outputs.clear()
    return outputs


@functools.cache
def answer(number):
    engine = open_with(Clock())
    ask(engine, "alone", (PROMPT, OTHER)[number])
    (output,) = outputs_of(engine)
    return output.outputs[0].token_ids


def assert_idle_and_whole(engine):
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert not engine._deadlines
    check_scheduler(engine.scheduler)


# ------------------------------------------------------------------------------------------------------------ timeouts


def test_a_waiting_request_ends_at_its_deadline_without_tokens(clock):
    engine = open_with(clock, max_num_seqs=1)
    ask(engine, "first", OTHER)
    ask(engine, "late", timeout=2.0)
    outputs_of(engine, 3)
    clock.now += 2.0
    (output,) = outputs_of(engine, 1)
    assert (output.request_id, output.outputs[0].finish_reason) == ("late", "timeout")
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ([], "")
    assert (output.metrics.queue_time, output.metrics.ttft) == (None, None)
    (first,) = outputs_of(engine)
    assert first.outputs[0].token_ids == answer(1)
    assert_idle_and_whole(engine)


def test_nobody_ends_before_the_deadline(clock):
    engine = open_with(clock)
    ask(engine, "in time", timeout=5.0)
    outputs_of(engine, 10)
    clock.now += 4.999
    (output,) = outputs_of(engine)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == (answer(0), "length")
    assert_idle_and_whole(engine)


def test_deadlines_are_kept_in_order_of_time_and_not_of_arrival(clock):
    engine = open_with(clock)
    for name, timeout in (("c", 9.0), ("a", 3.0), ("b", 6.0)):
        ask(engine, name, timeout=timeout)
    ended = []
    for _ in range(3):
        clock.now += 3.0
        ended += [output.request_id for output in outputs_of(engine, 1)]
    assert ended == ["a", "b", "c"]
    assert_idle_and_whole(engine)


def test_an_aborted_request_leaves_no_deadline_behind_for_the_next_of_its_name(clock):
    engine = open_with(clock)
    ask(engine, "name", timeout=1.0)
    engine.abort("name")
    ask(engine, "name")
    clock.now += 10.0
    (output,) = outputs_of(engine)
    assert output.outputs[0].finish_reason == "length"
    assert_idle_and_whole(engine)


def test_deadlines_outlive_an_interrupt(clock):
    engine = open_with(clock)
    ask(engine, "late", timeout=5.0)
    outputs_of(engine, 3)
    engine._is_torn = True  # as an interrupt in the midst of the bookkeeping leaves it
    outputs_of(engine, 2)
    clock.now += 5.0
    (output,) = outputs_of(engine, 1)
    assert output.outputs[0].finish_reason == "timeout"
    assert_idle_and_whole(engine)


@pytest.mark.parametrize("kind", [OutputKind.CUMULATIVE, OutputKind.DELTA])
def test_the_last_output_of_a_stream_says_timeout(clock, kind):
    engine = open_with(clock)
    ask(engine, "late", timeout=5.0, output_kind=kind)
    outputs = outputs_of(engine, 4)
    clock.now += 5.0
    outputs += outputs_of(engine, 1)
    assert [output.outputs[0].finish_reason for output in outputs] == [None] * 4 + ["timeout"]
    assert len(outputs[-1].outputs[0].token_ids) == (4 if kind is OutputKind.CUMULATIVE else 0)


def test_a_front_door_passes_timeouts_on():
    outputs = generate(shared_llm(), [PROMPT, OTHER], LONG, timeout=[1e-9, 1000.0])
    assert [output.outputs[0].finish_reason for output in outputs] == ["timeout", "length"]
    *_, last = shared_llm().stream(PROMPT, LONG, timeout=1e-9)
    assert last.outputs[0].finish_reason == "timeout"


@pytest.mark.parametrize("timeout", [-1.0, math.inf, "5", True, [1.0, 2.0, 3.0]], ids=repr)
def test_a_bad_timeout_is_refused(timeout):
    with pytest.raises((TypeError, ValueError), match="timeout"):
        generate(shared_llm(), [PROMPT, OTHER], LONG, timeout=timeout)
    assert shared_llm().stats().num_waiting == 0


# --------------------------------------------------------------------------------------------------------- the queue


def test_one_more_request_than_may_run_and_wait_is_refused_and_leaves_no_trace(clock):
    engine = open_with(clock, max_num_seqs=2, max_queue=3)
    for number in range(5):
        ask(engine, str(number))
    for _ in range(2):
        with pytest.raises(QueueFullError, match=r"5 requests.*max_num_seqs \(2\).*max_queue \(3\).*Try again later"):
            ask(engine, "one more")
        engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 3)
    engine.abort("4")
    ask(engine, "one more")
    assert {output.request_id for output in outputs_of(engine)} == {"0", "1", "2", "3", "one more"}


def test_a_call_with_more_prompts_than_there_is_room_for_queues_none():
    with open_llm(max_num_seqs=2, max_queue=1) as llm:
        with pytest.raises(QueueFullError):
            generate(llm, [PROMPT] * 4, LONG)
        assert (llm.stats().num_waiting, llm.stats().num_steps) == (0, 0)
        assert len(generate(llm, [PROMPT] * 3, LONG)) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"max_queue": -1}, {"max_queue": 1.5}, {"max_queue": True},
        {"priority_ageing_s": -1}, {"priority_ageing_s": 1e-9}, {"priority_ageing_s": math.nan},
        {"priority_ageing_s": math.inf}, {"priority_ageing_s": "1"}, {"priority_ageing_s": True},
        {"priority_ageing_s": False}, {"record_itl": 1},
    ],
    ids=str,
)  # fmt: skip
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        EngineConfig(**options)
