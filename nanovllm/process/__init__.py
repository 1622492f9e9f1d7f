"""The process and its machine: device, threads, NUMA nodes, garbage collection, signals, import cache."""

import os

# OpenMP threads that wait for others sleep after some 50 µs. GNU's, which PyTorch brings, would spin for 16 ms or more,
# while the thread that they wait for has no core. It reads the variable when PyTorch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
