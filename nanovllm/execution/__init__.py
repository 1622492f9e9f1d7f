"""Launching a step: direct, as CUDA graphs, in buckets of sizes, within the device's memory."""
