"""Builds the budget that keeps latency goals, after timing a few steps without requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter

from nanovllm.batch import ScheduledBatch
from nanovllm.features.costs.cost_model import StepWork
from nanovllm.features.costs.dummy_batches import Spans, dummy_batch
from nanovllm.features.costs.learned_costs import LearnedCosts, RecursiveFit, relative_decode_cost, resolve_goal
from nanovllm.features.costs.start_costs import LONG_STEP, fastest, read_costs
from nanovllm.features.engine_config import AUTO_GOAL, EngineConfig
from nanovllm.features.goals.auto_goal import follow_costs
from nanovllm.features.goals.step_budget import StepBudget
from nanovllm.features.groups.cache_pools import CachePools
from nanovllm.model import ModelBinding
from nanovllm.model_runner import ModelRunner
from nanovllm.observability.step_records import StepObservers

# A step of one block that exceeds the goal is measured again for so long: the machine may be busy.
PATIENCE_S = 1.0


def open_budget(
    model_runner: ModelRunner, observers: StepObservers, clock: Callable[[], float]
) -> tuple[StepBudget | None, float]:
    """(budget that keeps the `itl_goal`, which is resolved here; cost of a generated token in prompt tokens).

    The budget's costs learn from every step; the other stays, since shares are bounded for fixed costs.
    """
    config = model_runner.config
    if config.itl_goal is None:
        cost = read_costs(str(config.step_costs)).step_cost(overlap=config.overlap)
        return None, relative_decode_cost(cost, config)

    def execute(batch: ScheduledBatch) -> object:
        return model_runner.execute(batch).result()

    parts = learned_budget(config, model_runner.binding, model_runner.pools, execute, clock)
    budget, costs, model_runner.config = parts
    observers.append(costs)
    observers.predict = costs.predicted
    return budget, relative_decode_cost(costs.fit.cost, model_runner.config)


def learned_budget(
    config: EngineConfig,
    binding: ModelBinding,
    pools: CachePools,
    execute: Callable[[ScheduledBatch], object],
    clock: Callable[[], float],
) -> tuple[StepBudget, LearnedCosts, EngineConfig]:
    """The budget that keeps an engine's `itl_goal`, its costs as an observer, and the config with the goal settled.

    Args:
        config: Configuration with limits resolved and an `itl_goal`.
        execute: Function that runs a batch to its end.
        clock: Clock of the engine, in seconds.

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
    asked = config
    config = resolve_goal(config, samples[0][1])
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
