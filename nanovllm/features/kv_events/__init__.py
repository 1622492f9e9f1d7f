"""KV events: which blocks the prefix cache gains and loses, for routers of requests."""

NEEDS = ("features.engine_config", "features.groups", "features.tiers", "observability")
