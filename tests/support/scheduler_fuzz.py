"""Any order of calls of a scheduler, by hypothesis, on a loop that checks every invariant."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanovllm.features.policies.loop import MAX_IN_FLIGHT, Loop
from nanovllm.features.policies.walk import CLIENTS, STEMS, drop_computed, end, make_prompt, reset_prefix_cache


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
