"""`itl_goal="auto"` while the engine runs: the time of a few blocks by the learned costs, within bounds. No torch."""

from __future__ import annotations

import logging
import math

from nanovllm.features.costs.learned_costs import BUSY, DEFAULT_TTFT_GOALS, LearnedCosts, automatic_goal
from nanovllm.features.engine_config import AUTO_GOAL, EngineConfig
from nanovllm.features.goals.step_budget import StepBudget

# The log tells a goal that is so many times the one told last, or so small a part of it, once in so many seconds.
MATERIAL = 1.5
LOG_EVERY_S = 60.0

logger = logging.getLogger("nanovllm")


class AutoGoal:
    """Observer that adapts the goals to the costs after each step with chunks.

    Bounds: the device's default below, and `BUSY` times the least goal so far above. So a start on a busy machine is
    forgotten as soon as steps are faster, and a machine that becomes busy costs streams at most twice their gaps.

    Args:
        config: Configuration with limits resolved and the goals that the user gave.
        budget: StepBudget that meets the goal found at start.
    """

    def __init__(self, config: EngineConfig, budget: StepBudget, costs: LearnedCosts) -> None:
        self._config = config
        self._budget = budget
        self._costs = costs
        self._least = self._told = budget.itl_goal
        self._told_at = -math.inf  # the first change is logged at once
        self._ttft_follows = config.ttft_goal is None and budget.ttft_goal is not None
        logger.info(
            "itl_goal is %.0f ms, for steps with a block of %d tokens that take %.0f ms; it follows their costs",
            1e3 * budget.itl_goal, config.block_size, 1e3 * costs.block_seconds,
        )  # fmt: skip

    def follow(self, now: float) -> None:
        """Set the goals by the present costs; `now` is in seconds on the engine's clock."""
        goal = min(automatic_goal(self._config, self._costs.block_seconds), BUSY * self._least)
        self._least = min(self._least, goal)
        self._budget.itl_goal = goal
        if self._ttft_follows:
            self._budget.ttft_goal = DEFAULT_TTFT_GOALS * goal
        if not 1.0 / MATERIAL < goal / self._told < MATERIAL and now - self._told_at >= LOG_EVERY_S:
            logger.info(
                "itl_goal is %.0f ms instead of %.0f: steps with a block of %d tokens take %.0f ms now",
                1e3 * goal, 1e3 * self._told, self._config.block_size, 1e3 * self._costs.block_seconds,
            )  # fmt: skip
            self._told = goal
            self._told_at = now


def follow_costs(config: EngineConfig, budget: StepBudget, costs: LearnedCosts) -> None:
    """Let the goals follow the costs if `config`, before they were resolved, leaves them to the engine."""
    if config.itl_goal == AUTO_GOAL:
        costs.when_learned = AutoGoal(config, budget, costs).follow
