"""The engine thread and the output streams of its callers."""
