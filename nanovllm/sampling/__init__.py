"""Logits to tokens: penalties, filters, noise, log-probabilities."""
