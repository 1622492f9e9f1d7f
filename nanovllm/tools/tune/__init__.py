"""`nanovllm tune`: measures engine settings on a workload and recommends the best."""
