"""Benchmark, tuning, simulation and workloads, behind the commands of the same names."""
