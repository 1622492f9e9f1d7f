"""The engine's thread and the streams of its callers."""
