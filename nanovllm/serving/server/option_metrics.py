"""Metrics of the token budget and of the prefix cache's tiers, as (help, value) by name."""

from __future__ import annotations

import math

from nanovllm.features.engine_stats import BudgetStats, EngineStats, TierStats


def option_gauges(stats: EngineStats) -> dict[str, tuple[str, float]]:
    return _tier_gauges(stats.tiers) | _budget_gauges(stats.budget)


def _tier_gauges(tiers: TierStats | None) -> dict[str, tuple[str, float]]:
    if tiers is None:
        return {}
    return {
        "prefix_tier_host_bytes": ("Host memory of stored prefixes.", tiers.host_bytes),
        "prefix_tier_dir_bytes": ("Files of stored prefixes.", tiers.dir_bytes),
    }


def _budget_gauges(budget: BudgetStats | None) -> dict[str, tuple[str, float]]:
    if budget is None:
        return {}
    return {
        "step_budget_tokens": ("Token budget of the last step, by itl_goal.", budget.num_tokens),
        "itl_goal_seconds": ("ITL that the budget keeps to.", budget.itl_goal),
        "step_cost_error": (
            "Median relative error of predicted step times.",
            math.nan if budget.error is None else budget.error,
        ),
    }


def tier_counters(tiers: TierStats | None) -> dict[str, tuple[str, int]]:
    if tiers is None:
        return {}
    return {
        "prefix_tier_hits": ("Prompt tokens loaded from a tier.", tiers.num_loaded_tokens),
        "prefix_tier_stored_blocks": ("Blocks stored in host memory.", tiers.num_stored_blocks),
        "prefix_tier_read_blocks": ("Blocks read from files.", tiers.num_read_blocks),
        "prefix_tier_failed_reads": ("Blocks of files that were damaged or gone.", tiers.num_failed_reads),
        "prefix_tier_loads": ("Prefixes loaded, since that is faster.", tiers.num_loads),
        "prefix_tier_recomputes": ("Stored prefixes computed, since that is faster.", tiers.num_recomputes),
    }
