"""Benchmarks, tuning, simulation and workloads."""
