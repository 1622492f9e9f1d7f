"""Log-probabilities of drawn and of prompt tokens, with the most probable ones beside them."""

NEEDS = ("fast.fast_draws", "fast.kernels", "features.embeddings")
