"""OpenAI's HTTP interface."""
