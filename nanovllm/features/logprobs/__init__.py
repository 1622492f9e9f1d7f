"""Log-probabilities of drawn and of prompt tokens, with the most probable alternatives."""

NEEDS = ("fast.fast_draws", "fast.kernels", "features.embeddings")
