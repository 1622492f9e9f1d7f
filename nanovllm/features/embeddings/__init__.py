"""Embeddings: hidden states of a prompt's last row in place of drawn tokens."""

NEEDS = ()
