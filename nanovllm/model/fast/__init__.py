"""Faster forms of a model's layers: compiled, merged, packed, fused and stacked, each compared with its modules."""
