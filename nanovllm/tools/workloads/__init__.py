"""Workloads: requests with their lengths and arrival times, drawn or read from trace files."""
