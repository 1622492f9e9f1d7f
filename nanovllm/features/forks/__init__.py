"""Forks: a request continues from any token of another and shares its KV."""

NEEDS = ("features.refusals", "features.sampling_params")
