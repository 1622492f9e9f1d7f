"""What a request returns: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Logprob(NamedTuple):
    """How probable a token was to the model, before anything that the request asks for acts on the distribution.

    rank: 1 for the most probable token; tokens that are equally probable share the better rank.
    """

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]  # by token id: the token that came first, then the most probable ones by rank


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    index: which of the request's n samples.
    text: without special tokens and ended before a stop string, unless the request wants them.
    token_ids: all generated tokens, an end-of-sequence or stop token included.
    finish_reason: "stop" (end-of-sequence, stop token or stop string), "length" (max_tokens or max_model_len),
        "abort", "error" (see `RequestOutput.error`), or None while it runs.
    stop_reason: the stop string or the token id that ended it, if one did.
    logprobs: one entry for each of token_ids, if the request asks for them.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the clock of `time.monotonic`; None for what has not happened."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request and what came of it so far.

    prompt: the prompt as text, if it was given as text.
    prompt_token_ids: its tokens, those that truncate_prompt_tokens left.
    outputs: the request's n completions in order of their index, as far as they have come.
    finished: whether all of them have ended.
    num_cached_tokens: prompt tokens whose KV was found in the prefix cache.
    error: why a completion ended with finish_reason "error", the first of them if several did.
    prompt_logprobs: None for the first prompt token, then one entry for each, if the request asks for them; as far as
        they are there while it runs.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of queues and pool, and counters since construction.

    Blocks do not count the null block. Prefix-cache figures are tokens, counted once per admitted request: queries are
    prompt tokens looked up, hits those found; evictions are findable blocks that were taken for other content.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_free_blocks: int
    num_findable_blocks: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    prefix_cache_evictions: int
    num_preemptions: int
    num_steps: int
    num_failed_steps: int
    num_scheduled_tokens: int
    num_output_tokens: int
