"""Latency goals: a budget of tokens for each step, by its predicted time."""

NEEDS = ("features.costs", "features.engine_config", "features.engine_stats", "features.groups", "observability")
