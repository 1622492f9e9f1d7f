"""Ollama's API, below /api, translated to chat requests, completions and embeddings."""
