"""Statistics of several engines, combined as if of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import zip_longest

from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.engine_stats import BudgetStats, CacheGroupStats, EngineStats, Goals, SpeculationStats, TierStats
from nanovllm.serving.replicas.replica_queue import ReplicaQueue

# Statistics that only grow; sums include dead processes.
COUNTERS = (
    "prefix_cache_queries", "prefix_cache_hits", "prefix_cache_evictions", "num_preemptions", "num_steps",
    "num_failed_steps", "num_scheduled_tokens", "num_output_tokens",
)  # fmt: skip
_TIER_COUNTS = tuple(
    field.name for field in fields(TierStats) if field.name.startswith("num_") or field.name == "host_bytes"
)
BLOCKS = (
    "num_blocks", "num_used_blocks", "num_free_blocks", "num_findable_blocks", "kv_touched_bytes", "kv_findable_bytes",
)  # fmt: skip


class PoolStats:
    """Adds up the statistics of replicas."""

    def __init__(self) -> None:
        self._past = dict.fromkeys(COUNTERS, 0)

    def keep(self, stats: EngineStats | None) -> None:
        """Keep the counters of a dead process."""
        if stats is not None:
            for name in COUNTERS:
                self._past[name] += getattr(stats, name)

    def total(
        self, each: Sequence[EngineStats], *, num_running: int, num_waiting: int, hook_error: str | None
    ) -> EngineStats:
        sums = {name: sum(getattr(stats, name) for stats in each) for name in (*COUNTERS, *BLOCKS)}
        for name, count in self._past.items():
            sums[name] += count
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            recent_hit_rate=_mean([stats.recent_hit_rate for stats in each]),
            recent_budget_use=_mean([stats.recent_budget_use for stats in each]),
            hook_error=hook_error,
            num_clients=max((stats.num_clients for stats in each), default=0),
            client_gap=max((stats.client_gap for stats in each), default=0.0),
            cache_groups=tuple(
                map(_sum, zip(*(stats.cache_groups for stats in each if stats.cache_groups), strict=True))
            ),
            budget=_budget([stats.budget for stats in each if stats.budget is not None]),
            tiers=_tiers([stats.tiers for stats in each if stats.tiers is not None]),
            speculation=_speculation([stats.speculation for stats in each if stats.speculation is not None]),
            **sums,
        )


def _sum(groups: Sequence[CacheGroupStats]) -> CacheGroupStats:
    """Sum a cache group over replicas."""
    counts = ("num_blocks", "num_used_blocks", "num_findable_blocks", "num_evictions")
    return replace(groups[0], **{name: sum(getattr(group, name) for group in groups) for name in counts})


def goals_in_force(replicas: Iterable[ReplicaQueue], config: EngineConfig) -> Goals:
    """Goals in a replica's last report; the config's until there is a report."""
    reports = (replica.stats.budget for replica in replicas if replica.stats is not None)
    return next((budget for budget in reports if budget is not None), config)


def _budget(budgets: Sequence[BudgetStats]) -> BudgetStats | None:
    """One budget of all replicas."""
    if not budgets:
        return None
    return replace(
        budgets[0],
        num_tokens=round(sum(budget.num_tokens for budget in budgets) / len(budgets)),
        error=_mean([budget.error for budget in budgets]),
        num_misses=sum(budget.num_misses for budget in budgets),
    )


def _tiers(tiers: Sequence[TierStats]) -> TierStats | None:
    """Sums over replicas; their files are shared."""
    if not tiers:
        return None
    counts = {name: sum(getattr(each, name) for each in tiers) for name in _TIER_COUNTS}
    last = next((each for each in tiers if each.load_seconds is not None), tiers[0])
    return replace(last, **counts, dir_bytes=max(each.dir_bytes for each in tiers))


def _speculation(each: Sequence[SpeculationStats]) -> SpeculationStats | None:
    """Counters of all running replicas."""
    if not each:
        return None
    depths = zip_longest(*(stats.accepted_by_depth for stats in each), fillvalue=0)
    sources = dict.fromkeys(name for stats in each for name in stats.by_source)
    pairs = {name: [stats.by_source.get(name, (0, 0)) for stats in each] for name in sources}
    counters = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_failures")
    return SpeculationStats(
        accepted_by_depth=tuple(map(sum, depths)),
        by_source={name: (sum(d for d, _ in own), sum(a for _, a in own)) for name, own in pairs.items()},
        **{name: sum(getattr(stats, name) for stats in each) for name in counters},
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
