"""Costs of steps: a model of a step's time from its work, fitted at start-up and while the engine runs."""

NEEDS = ("features.engine_config", "features.groups", "features.sampling_params", "observability")
