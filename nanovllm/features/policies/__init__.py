"""Policies of users: queues and budgets by class or name, and the fuzz that checks them."""

NEEDS = ("features.engine_config", "features.groups", "features.sampling_params")
