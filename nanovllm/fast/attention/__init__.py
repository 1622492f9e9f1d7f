"""Attention backends: C++ on a CPU, FlexAttention and kernels on a GPU, and which is taken."""

NEEDS = ("fast.kernels", "features.engine_config", "features.groups", "features.packed_steps")
