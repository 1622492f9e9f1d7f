"""Step records, traces, timelines and percentiles of a running engine."""
