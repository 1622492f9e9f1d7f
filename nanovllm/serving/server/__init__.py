"""HTTP server compatible with OpenAI's API, over an `AsyncLLM`; requires the extra `serve`."""
