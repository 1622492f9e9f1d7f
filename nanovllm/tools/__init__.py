"""Benchmark, tuning, simulation, workloads and evaluation, for the commands of these names."""
