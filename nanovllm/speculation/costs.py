"""Costs of steps with and without drafts: of a calibration, or of a few steps at start-up, corrected while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanovllm.cache.cache_pools import CachePools
from nanovllm.core.batch import ScheduledBatch
from nanovllm.core.config import EngineConfig
from nanovllm.core.sampling_params import SamplingParams
from nanovllm.execution.cost_model import StepWork
from nanovllm.execution.dummy_batches import dummy_batch
from nanovllm.execution.learned_costs import LearnedCosts, RecursiveFit
from nanovllm.execution.start_costs import read_costs
from nanovllm.model.binding import ModelBinding
from nanovllm.observability.step_records import StepRecord

REPEATS = 3  # of each step; the fastest counts
LONG_STEP = 0.25  # seconds; after a decode that takes longer, fewer steps are tried
LEARN_EVERY = 8  # steps without drafts


class DraftCosts(LearnedCosts):
    """Predicts steps with drafts; learns from all of these, and from some of the others."""

    def seconds(self, work: StepWork) -> float:
        return self.fit.seconds(work)

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        if batch.drafts or record.step_id % LEARN_EVERY == 0:
            super().step_ended(record, batch)
        self.last_time = record.time


def draft_costs(
    config: EngineConfig,
    binding: ModelBinding,
    pools: CachePools,
    execute: Callable[[ScheduledBatch], object],
    clock: Callable[[], float],
) -> DraftCosts:
    """The costs of an engine's steps.

    Args:
        config: resolved.
        execute: runs a batch to its end.
        clock: the engine's, in seconds.

    Raises ValueError and OSError for `step_costs` that are no calibration.
    """
    # Not "auto": on a GPU the rows of a step are padded.
    costs = DraftCosts(replace(config, device=binding.device.type), () if pools.is_one_full else pools.groups)
    if config.step_costs is not None:
        costs.fit = RecursiveFit(read_costs(config.step_costs).step_cost(overlap=config.overlap))
        return costs

    def timed(count: int, num_rows: int) -> tuple[StepWork, float]:
        start = min(config.block_size, config.max_model_len - 1 - num_rows)
        made = dummy_batch(binding, config, [(start, num_rows)] * count)
        for entry in made.entries:
            entry.sequence.params = SamplingParams()
        entries = tuple(entry._replace(num_samples=num_rows) for entry in made.entries)
        batch = ScheduledBatch(0, entries, count if num_rows == 1 else 0)
        seconds = []
        for _ in range(REPEATS):
            begin = clock()
            execute(batch)
            seconds.append(clock() - begin)
        return costs.work(batch), max(min(seconds), 1e-9)

    samples: list[tuple[StepWork, float]] = []
    most = min(config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len - 1)
    for count in (1, 4, 16):
        if not samples or samples[0][1] < LONG_STEP:
            samples += [timed(count, num_rows) for num_rows in (1, 2, 4, 8) if count * num_rows <= most]
    costs.fit = RecursiveFit.begin(samples)
    return costs
