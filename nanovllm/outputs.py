"""Outputs, metrics and counters: plain data that requests and schedulers return."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


FinishReason = Literal["stop", "length", "timeout", "abort", "error"]


class OutputKind(StrEnum):
    """Contents and frequency of a request's outputs.

    CUMULATIVE: one output per token, with all text and tokens so far.
    DELTA: one output per token, with the text and tokens since the previous output.
    FINAL: one output, when the request ends.
    """

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL = "final"


class ErrorKind(StrEnum):
    """Origin of an error that ended a request.

    REQUEST: the request's options or its own functions; the same request would fail again.
    INTERNAL: all other causes, such as a failed step, non-finite logits, or a tokenizer that cannot decode.
    """

    REQUEST = "request"
    INTERNAL = "internal"


class Logprob(NamedTuple):
    """Log-probability of a token under the model, before any sampling option applies.

    rank: 1 for the most probable token; equally probable tokens share the better rank.
    """

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]  # keys are token ids: the sampled token first, then by rank


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt, or its new part in a delta.

    index: index of the sample, 0 to n - 1.
    text: text of the output, without special tokens and stop strings unless the request asks for them.
    token_ids: tokens of the output, an end-of-sequence or stop token included.
    finish_reason: "stop" (end-of-sequence, stop token or stop string), "length" (max_tokens or max_model_len),
        "timeout", "abort", "error" (see `RequestOutput.error`), or None while it runs.
    stop_reason: stop string or token id that ended the sample; None otherwise.
    logprobs: one entry per token of token_ids, if requested.
    weight_versions: (index of a first token in the sample's whole output, label of the weights) of each run of tokens
        that one `update_weights` drew; in a delta those of its tokens. None before the engine's first update.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None = None
    weight_versions: list[tuple[int, str | None]] | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Latencies and token counts of a request. Times are seconds of `time.monotonic`; None for events yet to happen.

    A token's time is the time at which its step's result reached the host.

    scheduled_time: start of the first step that computed part of the request.
    num_preemptions: number of times that a sample lost its blocks and had to recompute them.
    mean_itl, max_itl: inter-token latency (ITL) of a sample in seconds; None with fewer than two tokens.
    itls: every ITL in order, once the request has ended; only with the engine option `record_itl`.

    With several samples, output tokens and preemptions are sums, prompt tokens are those of the first sample, and times
    are the first or the last of any sample.
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
        """Seconds from arrival to the first scheduled step."""
        return None if self.scheduled_time is None else self.scheduled_time - self.arrival_time

    @property
    def ttft(self) -> float | None:
        """Time to first token (TTFT), in seconds."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """Output of a request, final or so far.

    prompt: the prompt as text, if it was given as text.
    prompt_token_ids: prompt tokens after truncate_prompt_tokens.
    outputs: completions in order of their index; while the request runs, those with tokens.
    finished: True once all completions have ended.
    num_cached_tokens: prompt tokens found in the prefix cache.
    error: message of the first completion with finish_reason "error".
    prompt_logprobs: None for the first prompt token and those before prompt_logprobs_start, then one entry per prompt
        token, if requested; partial while the prompt is computed.
    error_kind: origin of `error`; None without one.
    embedding: [hidden_size] float32, the last hidden state of a request with `EmbeddingParams`, once it is computed.
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
    embedding: NDArray[np.float32] | None = None

    def extend(self, later: RequestOutput) -> None:
        """Merge a later delta into this one."""
        mine = {completion.index: completion for completion in self.outputs}
        for theirs in later.outputs:
            completion = mine.get(theirs.index)
            if completion is None:
                self.outputs.append(theirs)
                continue
            if theirs.weight_versions is not None:
                runs = completion.weight_versions or [(0, None)] * bool(completion.token_ids)
                completion.weight_versions = runs + [run for run in theirs.weight_versions if run not in runs]
            completion.text += theirs.text
            completion.token_ids += theirs.token_ids
            if completion.logprobs is not None and theirs.logprobs is not None:
                completion.logprobs += theirs.logprobs
            completion.finish_reason = theirs.finish_reason
            completion.stop_reason = theirs.stop_reason
        self.finished = later.finished
        self.error = later.error
        self.error_kind = later.error_kind
        self.num_cached_tokens = later.num_cached_tokens
        self.metrics = later.metrics
        self.prompt_logprobs = later.prompt_logprobs


@dataclass(slots=True)
class SchedulerStats:
    """A scheduler's counters since construction. Prefix-cache figures are tokens, counted once per admitted request."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_failed_steps: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
