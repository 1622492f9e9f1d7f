"""Token budget of a step by latency goals: as many tokens of prompts as the running streams can wait for. No torch.

A stream's next token is due one `itl_goal` after its last one; chunks take the time that the decodes leave::

    last token        schedule                                                        next token is due
    |-- host's time ---|-- decodes ----|-- chunks: the largest number predicted to fit --|
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from operator import attrgetter
from typing import Protocol

from nanovllm.batch import ScheduledSequence
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.engine_stats import BudgetStats
from nanovllm.scheduler import Queue
from nanovllm.sequence import Sequence

# A prompt's deadline begins to count at this share of ttft_goal, and at all of it steps may take this many itl_goals.
URGENT_FROM = 0.5
MAX_RELAXATION = 4.0
# Lateness beyond this share of the goal is lost: shorter steps would not regain it, and prompts would starve.
MAX_LATENESS = 0.5

LATELY_S = 60.0  # A client without requests for so long is expected no more
MASK_SHARE = 0.25  # share of the goal for the masks of a step
PLACED_IN_STEP = attrgetter("placed_in_step")  # field of a Sequence

Lookup = Callable[[Sequence], SequenceABC[int]]  # the blocks of a sequence in the prefix cache


class StepCosts(Protocol):
    """Predicts steps.

    last_time: the end of the last step that was read, on the engine's clock.
    error: median error of the last predictions, relative to the time measured; None before the first.
    num_misses: steps that took twice or half of the prediction.
    """

    last_time: float

    @property
    def error(self) -> float | None: ...

    @property
    def num_misses(self) -> int: ...

    def sizes(self, num_decodes: int, limit: int) -> SequenceABC[int]:
        """Numbers of chunk tokens to choose from, ascending, at most `limit`; on a GPU they fill captured shapes."""

    def forecast(self, decodes: SequenceABC[ScheduledSequence], start: int) -> Callable[[int], float]:
        """Tokens of a chunk from `start`, with these decodes -> seconds that most steps keep; never decreasing."""


class StepBudget:
    """Chooses the token budget of each step.

    A request that still lacks its first token relaxes the goal of ITL of its client's streams: from half of its
    `ttft_goal` on, linearly, up to 4 `itl_goal` once that has passed. A step without streams keeps the goal as well
    while other clients than its first prompt's had requests lately: their next one waits for its end.

    itl_goal, ttft_goal: Goals in force, seconds; with itl_goal="auto" they follow the costs.

    Args:
        config: Configuration with limits resolved and an `itl_goal` in seconds.
        clock: Clock of the engine, in seconds.
    """

    def __init__(self, config: EngineConfig, costs: StepCosts, clock: Callable[[], float]) -> None:
        self._config = config
        self._costs = costs
        self._clock = clock
        assert config.itl_goal is not None
        self.itl_goal: float = config.itl_goal
        self.ttft_goal = config.ttft_goal
        self._last = config.max_num_batched_tokens
        self._seen: dict[str, float] = {}  # The latest two clients with requests -> when one came or ended
        self._mask_seconds = math.inf  # Limit of each client in a step
        self._spent: dict[str, float] = {}  # Client -> seconds of its masks in the step

    def see(self, sequence: Sequence) -> None:
        """Note that a request of the sequence's client comes or ends now."""
        self._seen.pop(sequence.client, None)
        self._seen[sequence.client] = self._clock()
        if len(self._seen) > 2:
            del self._seen[next(iter(self._seen))]

    def of_step(
        self,
        decodes: SequenceABC[ScheduledSequence],
        prefills: SequenceABC[Sequence],
        waiting: Queue,
        lookup: Lookup,
        *,
        has_slot: bool,
    ) -> tuple[int, int]:
        """The step's budget, and most tokens of one prompt, which shrinks with the budget while others wait.

        The budget is at least the decodes and one block, at most `max_num_batched_tokens`; without decodes, and without
        other clients lately, it is whole. The chunk of the first prompt is predicted.
        """
        config = self._config
        threshold = self._config.long_prefill_token_threshold
        budget = self._num_tokens(decodes, prefills or (waiting.in_order() if has_slot else ()), lookup)
        if len(prefills) + len(waiting) > 1:
            threshold = threshold * budget // config.max_num_batched_tokens
        return budget, threshold

    def _num_tokens(self, decodes: SequenceABC[ScheduledSequence], prompts: Iterable[Sequence], lookup: Lookup) -> int:
        budget = self._config.max_num_batched_tokens
        first = next(iter(prompts), None)
        if first is not None and (decodes or self._has_others(first.client)):
            start = first.num_computed_tokens + len(lookup(first)) * self._config.block_size
            sizes = self._costs.sizes(len(decodes), budget - len(decodes))
            count = bisect_right(sizes, self._seconds(decodes, first), key=self._costs.forecast(decodes, start))
            chunks = max(self._config.block_size, sizes[count - 1] if count else 0)
            budget = min(budget, len(decodes) + chunks)
        self._last = budget
        return budget

    def in_step(self, running: Iterable[Sequence]) -> list[Sequence]:
        """The running sequences, except where masks are expected to exceed their client's time in the step.

        Clients with masks share `MASK_SHARE` of the goal. The least recently placed sequence of each always runs.
        """
        sequences = list(running)
        masked = [s for s in sequences if s.matcher is not None and s.num_known_tokens - s.num_computed_tokens == 1]
        clients = {sequence.client for sequence in masked}
        self._mask_seconds = MASK_SHARE * self.itl_goal / max(1, len(clients))
        self._spent = dict.fromkeys(clients, 0.0)
        left_out = {s for s in sorted(masked, key=PLACED_IN_STEP) if not self.has_time(s)}
        return [sequence for sequence in sequences if sequence not in left_out] if left_out else sequences

    def has_time(self, sequence: Sequence) -> bool:
        """Whether the step has time for the sequence's mask, which is then spent; always for a client's first mask."""
        if sequence.matcher is None:
            return True
        spent = self._spent.get(sequence.client, 0.0)
        fits = not spent or spent + sequence.matcher.mask_seconds <= self._mask_seconds
        if fits:
            self._spent[sequence.client] = spent + sequence.matcher.mask_seconds
        return fits

    def _seconds(self, decodes: SequenceABC[ScheduledSequence], first: Sequence) -> float:
        """Longest step, in seconds, that all running streams can wait for; without any, that a new request can."""
        if not decodes:
            return self.itl_goal
        now = self._clock()
        config = self._config
        relaxation = self._relaxation(first, now)
        goal = math.inf
        longest = math.inf
        for sequence, *_ in decodes:
            own = max(self.itl_goal, sequence.params.itl_goal or 0.0)  # The engine's may have become longer
            goal = min(goal, own)
            longest = min(longest, own * relaxation if sequence.client == first.client else own)
        # With overlap the step before still runs, and the next token is due one goal after its end.
        return longest - (0.0 if config.overlap else min(max(0.0, now - self._costs.last_time), MAX_LATENESS * goal))

    def _has_others(self, client: str) -> bool:
        """Whether another client had a request lately."""
        since = self._clock() - LATELY_S
        return any(other != client and seen > since for other, seen in self._seen.items())

    def _relaxation(self, first: Sequence, now: float) -> float:
        """Factor on the goal for streams of the prompt's own client, 1 to `MAX_RELAXATION`."""
        has_token = first.num_known_tokens > first.num_prompt_tokens  # one that was preempted
        if self.ttft_goal is None or has_token:
            return 1.0
        ttft_goal = max(self.ttft_goal, first.params.ttft_goal or 0.0)
        urgency = ((now - first.arrival_time) / ttft_goal - URGENT_FROM) / (1.0 - URGENT_FROM)
        return 1.0 + (MAX_RELAXATION - 1.0) * min(max(urgency, 0.0), 1.0)

    def stats(self) -> BudgetStats:
        return BudgetStats(self.itl_goal, self.ttft_goal, self._last, self._costs.error, self._costs.num_misses)
