"""Launches per step on a GPU: CUDA graphs, one-launch stacks, buckets, and the runner of several ranks."""

NEEDS = (
    "fast.attention", "fast.fast_draws", "fast.host", "fast.layers", "features.composition", "features.costs",
    "features.embeddings", "features.engine_config", "features.forward_passes", "features.grammar", "features.groups",
    "features.interrupts", "features.live_modules", "features.logprobs", "features.penalties", "features.ranks",
    "features.refusals", "features.request_options", "features.states", "features.tiers", "features.token_masks",
    "models",
)  # fmt: skip
