"""Beam search and forks: sequences that go on from the KV of others."""
