"""The host: threads, memory in huge pages, NUMA nodes, garbage collection, start of the process."""

NEEDS = ("features.engine_config",)
