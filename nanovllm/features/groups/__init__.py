"""Cache groups: pools and block tables for layers that see a whole sequence, its end, or a state of it."""

NEEDS = ("features.engine_config", "features.engine_stats", "features.unsupported")
