"""`nanovllm bench`: plays workloads against this engine and others, each in a process of its own."""
