"""Relevance of documents to queries, and embeddings, as methods of `LLM` and `AsyncLLM`."""

NEEDS = ("features.chat", "features.intake", "features.sampling_params")
