"""The process and its machine: device, threads, NUMA nodes, garbage collection, signals, import cache."""
