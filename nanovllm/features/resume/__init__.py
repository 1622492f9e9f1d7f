"""Resumption: a request continues in another engine, with the tokens that it had."""

NEEDS = ("features.refusals", "features.sampling_params")
