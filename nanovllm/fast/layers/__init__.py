"""Layers packed, merged, fused, stacked or compiled; each compared with its modules before it is used."""

NEEDS = ("fast.attention", "fast.host", "fast.kernels", "models")
