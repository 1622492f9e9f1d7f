"""Metrics of the prefix cache's tiers, as (help, value) by name."""

from __future__ import annotations

from nanovllm.core.option_stats import TierStats


def tier_gauges(tiers: TierStats | None) -> dict[str, tuple[str, float]]:
    if tiers is None:
        return {}
    return {
        "prefix_tier_host_bytes": ("Host memory of stored prefixes.", tiers.host_bytes),
        "prefix_tier_dir_bytes": ("Files of stored prefixes.", tiers.dir_bytes),
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
