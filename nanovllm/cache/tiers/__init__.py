"""Tiers of the prefix cache: host memory and files that keep evicted prefixes. No torch."""
