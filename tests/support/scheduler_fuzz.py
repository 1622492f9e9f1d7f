"""Any order of calls of a scheduler, by hypothesis or by a seeded walk, on a loop that checks every invariant."""

import random
from collections.abc import Callable, Mapping

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanovllm.core.sequence import Sequence
from tests.support.loop_checks import MAX_IN_FLIGHT
from tests.support.scheduling import Loop

CLIENTS = ("", "", "", "b", "c")
WEIGHTS = (None, None, {"b": 4.0}, {"b": 0.5, "c": 2.0})
AGEING = (None, None, 0.5, 4.0)  # powers of two, so that times over them are exact

# Prompts begin with one of these, cut anywhere, so that prefixes are shared, and end inside a block as often as not.
STEMS = ([0] * 24, [1, 2, 3, 4, 5, 6, 7, 0] * 3, [1, 2, 3, 4, 5, 6, 7, 1] * 3)


def make_prompt(stem: int, length: int, tail: list[int]) -> list[int]:
    return STEMS[stem][:length] + tail


def reset_prefix_cache(loop: Loop) -> None:
    loop.manager.reset_prefix_cache()
    loop.check()


def drop_computed(loop: Loop) -> None:
    """What the engine does when the weights changed."""
    while loop.in_flight:
        loop.read()
    loop.scheduler.preempt_all()
    loop.manager.reset_prefix_cache()
    loop.check()


def end(loop: Loop, depth: int) -> None:
    """Run to the end; Loop.drain bounds the number of steps, so that starvation is an error."""
    loop.drain(depth)
    loop.check_outputs()
    loop.manager.reset_prefix_cache()
    loop.check()
    assert loop.launch() is None
    assert not loop.unfinished


class SchedulerRules(RuleBasedStateMachine):
    """Loop checks every invariant after each call, and the mock model every read of every step.

    An `initialize` of a machine sets `loop` and `max_model_len`.
    """

    loop: Loop
    max_model_len: int

    @rule(
        stem=st.integers(0, len(STEMS) - 1),
        length=st.integers(0, 24),
        tail=st.lists(st.integers(0, 7), min_size=1, max_size=3),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        cache_salt=st.sampled_from(["", "", "", "salt"]),
        client=st.sampled_from(CLIENTS),
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        stop_token_ids=st.sampled_from([(), (), (0,), (3, 5)]),
        n=st.sampled_from([1, 1, 1, 2, 4]),
    )
    def add(self, stem: int, length: int, tail: list[int], n: int, **options: object) -> None:
        self.loop.add_samples(n, make_prompt(stem, length, tail)[: self.max_model_len - 1], **options)

    @rule(seconds=st.integers(1, 9))
    def let_time_pass(self, seconds: int) -> None:
        self.loop.now += seconds

    @precondition(lambda self: len(self.loop.in_flight) < MAX_IN_FLIGHT)
    @rule()
    def launch(self) -> None:
        self.loop.launch()

    @precondition(lambda self: self.loop.in_flight)
    @rule()
    def read(self) -> None:
        self.loop.read()

    @rule(num_steps=st.integers(1, 8), depth=st.integers(1, MAX_IN_FLIGHT))
    def run_for_a_while(self, num_steps: int, depth: int) -> None:
        while len(self.loop.in_flight) >= depth:
            self.loop.read()
        for _ in range(num_steps):
            self.loop.launch()
            if len(self.loop.in_flight) >= depth:
                self.loop.read()

    @precondition(lambda self: self.loop.in_flight)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.loop.fail(data.draw(st.integers(0, len(self.loop.in_flight) - 1)))

    @precondition(lambda self: self.loop.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.loop.abort(data.draw(st.sampled_from(self.loop.unfinished)))

    @precondition(lambda self: self.loop.unfinished and len(self.loop.in_flight) < MAX_IN_FLIGHT)
    @rule(data=st.data())
    def turn_non_finite(self, data: st.DataObject) -> None:
        victims = data.draw(st.sets(st.sampled_from(self.loop.unfinished), min_size=1, max_size=2))
        self.loop.launch(non_finite={sequence.request_id for sequence in victims})

    @rule()
    def reset_prefix_cache(self) -> None:
        reset_prefix_cache(self.loop)

    @rule()
    def drop_computed(self) -> None:
        drop_computed(self.loop)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "loop"):
            self.loop.check()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            end(self.loop, depth=2)


def walk_at_random(
    loop: Loop,
    rng: random.Random,
    num_calls: int,
    *,
    samples: tuple[int, ...] = (1, 1, 1, 2, 4),
    more: Mapping[Callable[[], object], int] | None = None,
    max_unfinished: int = 12,
) -> Loop:
    """`num_calls` calls in random order, then to the end; a request has one of these numbers of samples.

    Args:
        max_unfinished: no request is added while there are so many.
        more: calls besides those of any scheduler, each with its weight; `launch` has 100.
    """
    max_model_len = loop.scheduler.config.max_model_len
    depth = rng.randint(1, MAX_IN_FLIGHT)

    def add() -> None:
        if len(loop.unfinished) < max_unfinished:
            tail = [rng.randrange(8) for _ in range(rng.randint(1, 3))]
            loop.add_samples(
                rng.choice(samples) if len(samples) > 1 else samples[0],
                make_prompt(rng.randrange(len(STEMS)), rng.randint(0, 24), tail)[: max_model_len - 1],
                priority=rng.choice((0, 0, 0, 1, -1)),
                cache_salt=rng.choice(("", "", "", "salt")),
                client=rng.choice(CLIENTS),
                max_tokens=rng.choice((None, rng.randint(1, 12))),
                stop_token_ids=rng.choice(((), (), (0,), (3, 5))),
            )

    def launch(non_finite: tuple[str, ...] = ()) -> None:
        loop.now += rng.choice((0, 0, 1, 3))
        if len(loop.in_flight) >= depth:
            loop.read()
        loop.launch(non_finite)

    def read() -> None:
        if loop.in_flight:
            loop.read()

    def one_of_the_unfinished() -> list[Sequence]:
        return [rng.choice(loop.unfinished)] if loop.unfinished else []

    def fail() -> None:
        if loop.in_flight:
            loop.fail(rng.randrange(len(loop.in_flight)))

    def abort() -> None:
        for sequence in one_of_the_unfinished():
            loop.abort(sequence)

    def undo() -> None:
        """As an engine whose last request has left, or that computes all KV again."""
        if loop.in_flight:
            loop.fail(has_failed=False)
        if rng.random() < 0.3:
            loop.scheduler.preempt_all()
            loop.check()

    def fork() -> None:
        if loop.scheduler.running and len(loop.unfinished) < max_unfinished:
            source = rng.choice(loop.scheduler.running)
            num_known = len(source.token_ids)
            at = rng.choice((num_known, rng.randint(1, num_known)))
            if at < max_model_len:
                loop.fork(source, at, client=rng.choice(CLIENTS), max_tokens=rng.choice((None, rng.randint(1, 12))))

    def turn_non_finite() -> None:
        launch(tuple(sequence.request_id for sequence in one_of_the_unfinished()))

    calls: dict[Callable[[], object], int] = {add: 30, launch: 100, read: 10, fail: 5, abort: 4, turn_non_finite: 4}
    calls |= {undo: 2, fork: 8}
    calls |= {lambda: reset_prefix_cache(loop): 1, lambda: drop_computed(loop): 1} | dict(more or {})
    for call in rng.choices(list(calls), list(calls.values()), k=num_calls):
        call()
    end(loop, depth)
    return loop
