"""Embeddings of prompts, and scores of documents: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.outputs import ErrorKind, FinishReason, RequestMetrics

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of a prompt.

    prompt: text of the prompt, if it was given as text.
    prompt_token_ids: prompt tokens after truncate_prompt_tokens.
    embedding: [hidden_size] float32; None for a request that ended before it was computed.
    finish_reason: "stop" with an embedding; else "timeout", "abort" or "error" (see `error`).
    num_cached_tokens: prompt tokens found in the prefix cache.
    error, error_kind: fields of `RequestOutput`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: NDArray[np.float32] | None
    finish_reason: FinishReason | None
    num_cached_tokens: int
    metrics: RequestMetrics
    error: str | None = None
    error_kind: ErrorKind | None = None


@dataclass(slots=True)
class ScoreOutput:
    """The score of a document; the other fields are those of the request that read it.

    score: higher is more relevant; None for a request that ended before it was computed.
    finish_reason: "stop" with a score; else "timeout", "abort" or "error" (see `error`).
    """

    request_id: str
    score: float | None
    prompt_token_ids: list[int]
    finish_reason: FinishReason | None
    num_cached_tokens: int
    metrics: RequestMetrics
    error: str | None = None
    error_kind: ErrorKind | None = None
