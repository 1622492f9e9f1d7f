"""Models without a language model head: they embed, and are refused where tokens are wanted."""

from __future__ import annotations

from nanovllm.requests import RequestLimits


def without_head(limits: RequestLimits) -> str:
    """Use of a model without a head, for the log and errors."""
    return (
        f"{limits.model_name} has no language model head, so it generates nothing: it embeds (LLM.embed, "
        "/v1/embeddings, /api/embed), and scores by embeddings (method 'cosine', /v1/rerank, /v1/score)."
    )


def check_head(limits: RequestLimits) -> None:
    """Raise ValueError for a model that generates nothing."""
    if not limits.has_head:
        raise ValueError(without_head(limits))
