"""Workloads: what requests hold and when they arrive."""
