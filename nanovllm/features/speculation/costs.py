"""Costs of steps with and without drafts: of a calibration, or of a few steps at start-up, corrected while it runs."""

from __future__ import annotations

from collections.abc import Callable

from nanovllm.batch import ScheduledBatch
from nanovllm.features.costs.cost_model import StepWork
from nanovllm.features.costs.dummy_batches import dummy_batch
from nanovllm.features.costs.learned_costs import RecursiveFit
from nanovllm.features.costs.start_costs import LONG_STEP, fastest, read_costs
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_pools import CachePools
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.features.speculation.lengths import DraftCosts
from nanovllm.model import ModelBinding


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
    costs = DraftCosts(config, () if pools.is_one_full else pools.groups)
    if config.step_costs is not None:
        model = read_costs(config.step_costs)
        costs.begin(*(RecursiveFit(model.step_cost(overlap=overlap)) for overlap in (False, config.overlap)))
        return costs

    def timed(count: int, num_rows: int) -> tuple[StepWork, float]:
        start = min(config.block_size, config.max_model_len - 1 - num_rows)
        made = dummy_batch(binding, config, [(start, num_rows)] * count)
        for entry in made.entries:
            entry.sequence.params = SamplingParams()
        entries = tuple(entry._replace(num_samples=num_rows) for entry in made.entries)
        batch = ScheduledBatch(0, entries, count if num_rows == 1 else 0)
        return costs.work(batch), fastest(batch, execute, clock)

    samples: list[tuple[StepWork, float]] = []
    most = min(config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len - 1)
    for count in (1, 4, 16):
        if not samples or samples[0][1] < LONG_STEP:
            samples += [timed(count, num_rows) for num_rows in (1, 2, 4, 8) if count * num_rows <= most]
    costs.begin(RecursiveFit.begin(samples), RecursiveFit.begin(samples))
    return costs
