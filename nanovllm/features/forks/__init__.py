"""Forks: a request goes on from any token of another, whose KV it shares."""

NEEDS = ("features.refusals", "features.sampling_params")
