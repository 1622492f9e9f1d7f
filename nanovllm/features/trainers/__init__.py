"""Trainers: the slot of `transformers` through which trainers generate, `generate_batch`, served by an engine."""

NEEDS = ("features.logprobs", "features.sampling_params", "serving")
