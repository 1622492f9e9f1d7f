"""`nanovllm bench`: replays workloads on this engine and others, each in a separate process."""
