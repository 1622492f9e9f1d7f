"""Composition for `build.py`: an input processor, a binding and a block manager with every capability."""

NEEDS = (
    "fast.host",
    "features.chat",
    "features.engine_config",
    "features.engine_stats",
    "features.forward_passes",
    "features.grammar",
    "features.groups",
    "features.headless",
    "features.intake",
    "features.live_modules",
    "features.ranks",
    "features.sampling_params",
    "features.speculation",
    "features.speculation_options",
    "features.states",
    "features.tiers",
    "features.unsupported",
    "models",
)
