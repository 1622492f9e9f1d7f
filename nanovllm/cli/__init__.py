"""The command `nanovllm`, one file a subcommand."""
