"""Tiers of the prefix cache: host memory and files below the blocks of the device."""

NEEDS = (
    "features.costs", "features.engine_config", "features.groups", "features.ranks", "features.states",
    "observability",
)  # fmt: skip
