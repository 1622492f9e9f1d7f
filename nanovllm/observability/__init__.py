"""Step records, traces and timelines of a running engine."""
