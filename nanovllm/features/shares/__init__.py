"""Shares of clients: a queue that serves them in turn by what their work costs."""

NEEDS = ("features.engine_config",)
