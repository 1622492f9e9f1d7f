"""What a request returns: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class OutputKind(StrEnum):
    """What the outputs of a request hold, and when there is one.

    CUMULATIVE: one for each token, holding all text and tokens so far.
    DELTA: one for each token, holding the text and tokens that the one before did not.
    FINAL: one, when the request ends.
    """

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL = "final"


class ErrorKind(StrEnum):
    """Whose fault it is that a request ended with an error.

    REQUEST: what it asks for, its options or its own functions; the same request fails again.
    INTERNAL: anything else, such as a failed step, logits that are not finite, or a tokenizer that cannot decode.
    """

    REQUEST = "request"
    INTERNAL = "internal"


class Logprob(NamedTuple):
    """How probable a token was to the model, before anything that the request asks for acts on the distribution.

    rank: 1 for the most probable token; tokens that are equally probable share the better rank.
    """

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]  # by token id: the token that came first, then the most probable ones by rank


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt; as a delta, what is new of it.

    index: which of the request's n samples.
    text: without special tokens and ended before a stop string, unless the request wants them.
    token_ids: all generated tokens, an end-of-sequence or stop token included.
    finish_reason: "stop" (end-of-sequence, stop token or stop string), "length" (max_tokens or max_model_len),
        "timeout", "abort", "error" (see `RequestOutput.error`), or None while it runs.
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
    """How a request fared. Times are seconds on the clock of `time.monotonic`; None for what has not happened.

    A token's time is that of the step that brought it to the host.

    scheduled_time: begin of the first step that computed some of it.
    num_preemptions: how often it gave its blocks back to others.
    mean_itl, max_itl: time between two tokens of a sample (inter-token latency), in seconds; None with fewer than two.
    itls: all of them, one by one, once it has ended, with the engine option `record_itl`.

    Of several samples, generated tokens and preemptions are those of all, tokens of the prompt those of the first, and
    times the first or the last of any.
    """

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    mean_itl: float | None = None
    max_itl: float | None = None
    itls: list[float] | None = None

    @property
    def queue_time(self) -> float | None:
        """Seconds until it was first scheduled."""
        return None if self.scheduled_time is None else self.scheduled_time - self.arrival_time

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


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
    error_kind: whose fault `error` is; None without one.
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
    error_kind: ErrorKind | None = None

    def extend(self, later: RequestOutput) -> None:
        """Append a later delta to this one, which becomes the delta of both."""
        mine = {completion.index: completion for completion in self.outputs}
        for theirs in later.outputs:
            completion = mine.get(theirs.index)
            if completion is None:
                self.outputs.append(theirs)
                continue
            completion.text += theirs.text
            completion.token_ids += theirs.token_ids
            if completion.logprobs is not None and theirs.logprobs is not None:
                completion.logprobs += theirs.logprobs
            completion.finish_reason, completion.stop_reason = theirs.finish_reason, theirs.stop_reason
        self.finished, self.error, self.error_kind = later.finished, later.error, later.error_kind
        self.num_cached_tokens, self.metrics = later.num_cached_tokens, later.metrics
        self.prompt_logprobs = later.prompt_logprobs


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of queues and pool, and counters since construction.

    Blocks do not count the null block. Prefix-cache figures are tokens, counted once per admitted request: queries are
    prompt tokens looked up, hits those found; evictions are findable blocks that were taken for other content.

    recent_*: over the last 1,000 steps. recent_hit_rate is hits over queries, recent_budget_use the share of
        max_num_batched_tokens that steps spent; None where there was none of what they divide by.
    hook_error: why `on_step` is not called any more, or the trace not written.
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
    recent_hit_rate: float | None
    recent_budget_use: float | None
    hook_error: str | None
