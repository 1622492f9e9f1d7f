"""How far a request was in an engine that has ended, for the engine that goes on with it."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.core.outputs import ErrorKind, RequestMetrics, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ResumedSample:
    """What a sample has generated in another engine; it has finished there if it has a finish_reason."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """How far a request was when the engine that ran it ended, and its metrics then.

    samples: one each, in order of their index.
    prompt_logprobs: complete if any sample has a token.
    error: of a sample with finish_reason "error".
    """

    samples: list[ResumedSample]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    error_kind: ErrorKind | None = None
