"""Speculative decoding: drafts of coming tokens, verified by the model in one step; outputs stay the same."""

NEEDS = (
    "features.engine_config",
    "features.engine_stats",
    "features.groups",
    "features.headless",
    "features.sampling_params",
    "features.speculation_options",
    "features.token_masks",
    "observability",
)
