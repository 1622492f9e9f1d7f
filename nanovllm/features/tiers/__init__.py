"""Tiers of the prefix cache: host memory and files below the blocks of the device."""

NEEDS = (
    "features.costs",
    "features.engine_config",
    "features.engine_stats",
    "features.groups",
    "features.ranks",
    "features.states",
    "observability",
)
