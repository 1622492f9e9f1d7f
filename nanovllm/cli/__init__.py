"""The command `nanovllm`: one file per subcommand, and the flags that they share."""
