"""Tensor parallelism: one process a rank, each with its shard of the weights."""

NEEDS = (
    "features.embeddings", "features.engine_config", "features.logprobs", "features.speculation_options",
    "features.states", "features.unsupported",
)  # fmt: skip
