"""Kernels in C++, Triton and CUDA, without which answers are the same, slower."""

NEEDS = ("fast.host",)
