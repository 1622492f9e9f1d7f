"""Shares of clients: a queue that serves clients in turn, by the cost of their work."""

NEEDS = ("features.engine_config",)
