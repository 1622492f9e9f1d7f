"""Simulator: the real scheduler in virtual time, with step costs measured by `nanovllm calibrate`."""
