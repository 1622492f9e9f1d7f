"""Attention over the KV cache, one file a backend."""
