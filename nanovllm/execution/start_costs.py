"""Costs of steps before the first request: a few steps of no request, timed, and the file of a calibration."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

from nanovllm.cache.cache_pools import CachePools
from nanovllm.core.batch import ScheduledBatch
from nanovllm.core.config import AUTO_GOAL, EngineConfig
from nanovllm.core.step_budget import StepBudget
from nanovllm.execution.auto_goal import follow_costs
from nanovllm.execution.cost_model import CostModel, StepWork
from nanovllm.execution.dummy_batches import Spans, dummy_batch
from nanovllm.execution.learned_costs import LearnedCosts, RecursiveFit, resolve_goal
from nanovllm.model.binding import ModelBinding

REPEATS = 3  # of each step; the fastest counts, and one of a second is not repeated
PATIENCE_S = 1.0  # for which a step of one block that exceeds the goal is measured again, since the machine may be busy
LONG_STEP = 0.25  # seconds; after a first step that takes longer, none of several sequences is tried


def learned_budget(
    config: EngineConfig,
    binding: ModelBinding,
    pools: CachePools,
    execute: Callable[[ScheduledBatch], object],
    clock: Callable[[], float],
) -> tuple[StepBudget, LearnedCosts, EngineConfig]:
    """The budget that keeps an engine's `itl_goal`, its costs as an observer, and the config with the goal settled.

    Args:
        config: resolved, with an `itl_goal`.
        execute: runs a batch to its end.
        clock: the engine's, in seconds.

    Raises ValueError for a goal that a step of one block exceeds by far, and for a file that is no calibration.
    """

    def timed(spans: Spans, num_decodes: int) -> tuple[StepWork, float]:
        batch = replace(dummy_batch(binding, config, spans), num_decodes=num_decodes)
        return costs.work(batch), fastest(batch, execute, clock)

    costs = LearnedCosts(config, () if pools.is_one_full else pools.groups)
    longest = min(config.max_model_len - 1, config.max_num_batched_tokens)
    block = min(config.block_size, longest)
    samples = [timed([(0, block)], 0), timed([(block - 1, 1)], 1)]
    give_up = clock() + PATIENCE_S
    while config.itl_goal != AUTO_GOAL and samples[0][1] > config.itl_goal and clock() < give_up:
        samples[0] = min(samples[0], timed([(0, block)], 0), key=itemgetter(1))
    asked, config = config, resolve_goal(config, samples[0][1])
    if samples[0][1] <= LONG_STEP:
        samples += [timed([(0, size)], 0) for size in (block // 4, min(4 * block, longest)) if size > 1]
        samples.append(timed([(block - 1, 1)] * min(8, config.max_num_seqs), min(8, config.max_num_seqs)))
    if config.step_costs is None:
        costs.fit = RecursiveFit.begin(samples)
    else:
        costs.fit = RecursiveFit(read_costs(config.step_costs).step_cost(overlap=config.overlap))
    budget = StepBudget(config, costs, clock)
    follow_costs(asked, budget, costs)
    return budget, costs, config


def fastest(batch: ScheduledBatch, execute: Callable[[ScheduledBatch], object], clock: Callable[[], float]) -> float:
    """Seconds of a step that is run to its end REPEATS times."""
    seconds = []
    for _ in range(REPEATS):
        begin = clock()
        execute(batch)
        seconds.append(clock() - begin)
        if seconds[-1] > 1.0:
            break
    return max(min(seconds), 1e-9)


def read_costs(path: str) -> CostModel:
    """The cost model of a calibration file; raises OSError if it cannot be read, ValueError for any other file."""
    try:
        return CostModel.from_dict(json.loads(Path(path).read_text(encoding="utf-8"))["cost_model"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"step_costs is {path!r}, which is no calibration ({type(error).__name__}: {error}); `nanovllm calibrate` "
            "writes one."
        ) from error
