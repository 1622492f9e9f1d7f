"""Changes of logits before sampling: allowed tokens, bad words, biases, penalties, logits processors."""

NEEDS = ("fast.kernels", "features.packed_steps", "features.token_masks")
