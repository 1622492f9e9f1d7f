"""The server: OpenAI's HTTP interface over an `AsyncLLM`. Needs the extra `serve`."""
