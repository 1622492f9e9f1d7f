"""`nanovllm tune`: which settings of this engine carry a workload best, by measuring."""
