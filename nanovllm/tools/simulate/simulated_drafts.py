"""Drafts in virtual time: right as often as in a recorded run, chosen and accepted by the engine's own code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random

from nanovllm.batch import ScheduledBatch
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.speculation.drafter import DraftRequest
from nanovllm.features.speculation.lengths import DraftLengths
from nanovllm.features.speculation.speculation import Speculation
from nanovllm.observability.step_records import StepObservers
from nanovllm.scheduler import Scheduler

ANY_TOKEN = 2**31


class SimulatedDrafts:
    """Drafter of a replica; it proposes every draft that a request may have.

    Args:
        acceptance: probability that a draft is right if all earlier ones are.
        draw_token: iterator of unique token ids.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        config: EngineConfig,
        observers: StepObservers,
        acceptance: float,
        draw_token: Iterator[int],
    ) -> None:
        self._acceptance, self._draw_token, self._choice = acceptance, draw_token, Random(0)
        lengths = DraftLengths(config.num_speculative_tokens, overlap=config.overlap)
        observers.append(lengths)
        scheduler.proposer = Speculation(
            config,
            scheduler.block_manager,
            self,
            lengths,
            vocab_size=ANY_TOKEN,
            source=str(config.speculation),
        )

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [[*islice(self._draw_token, request.max_tokens)] for request in requests]

    def draws(self, batch: ScheduledBatch) -> Iterator[int]:
        """The tokens of a step, in order: at right drafts these, else unique ones."""
        for entry in batch.entries:
            for row in range(entry.num_samples):
                is_right = row < len(entry.draft) and self._choice.random() < self._acceptance
                yield entry.draft[row] if is_right else next(self._draw_token)
