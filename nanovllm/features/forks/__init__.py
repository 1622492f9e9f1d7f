"""Forks: a request continues from any token of another and shares its KV."""

NEEDS = ("features.intake", "features.refusals", "features.sampling_params")
