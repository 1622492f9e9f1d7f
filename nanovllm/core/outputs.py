"""Outputs, metrics and statistics: plain data that requests and engines return."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from nanovllm.core.option_stats import BudgetStats, SpeculationStats, TierStats

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
    INTERNAL: anything else, such as a failed step, non-finite logits, or a tokenizer that cannot decode.
    """

    REQUEST = "request"
    INTERNAL = "internal"


class Logprob(NamedTuple):
    """Log-probability of a token under the model, before any sampling option applies.

    rank: 1 for the most probable token; equally probable tokens share the better rank.
    """

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]  # by token id: the sampled token first, then the most probable ones by rank


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt, or its new part in a delta.

    index: index of the sample, 0 to n - 1.
    text: detokenized output, without special tokens and stop strings unless the request asks for them.
    token_ids: generated tokens, an end-of-sequence or stop token included.
    finish_reason: "stop" (end-of-sequence, stop token or stop string), "length" (max_tokens or max_model_len),
        "timeout", "abort", "error" (see `RequestOutput.error`), or None while it runs.
    stop_reason: stop string or token id that ended the sample; None otherwise.
    logprobs: one entry per token of token_ids, if requested.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None = None


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
    finished: whether all completions have ended.
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
            completion.text += theirs.text
            completion.token_ids += theirs.token_ids
            if completion.logprobs is not None and theirs.logprobs is not None:
                completion.logprobs += theirs.logprobs
            completion.finish_reason, completion.stop_reason = theirs.finish_reason, theirs.stop_reason
        self.finished, self.error, self.error_kind = later.finished, later.error, later.error_kind
        self.num_cached_tokens, self.metrics = later.num_cached_tokens, later.metrics
        self.prompt_logprobs = later.prompt_logprobs


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of a prompt.

    prompt: as text, if it was given as text.
    prompt_token_ids: prompt tokens after truncate_prompt_tokens.
    embedding: [hidden_size] float32; None for a request that ended before it was computed.
    finish_reason: "stop" with an embedding; else "timeout", "abort" or "error" (see `error`).
    num_cached_tokens: prompt tokens found in the prefix cache.
    error, error_kind: as of `RequestOutput`.
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


@dataclass(frozen=True, slots=True)
class CacheGroupStats:
    """Block pool of the layers that see the same positions, or of recurrent states; see `EngineStats`.

    window, chunk: of their attention in tokens; None for no such limit.
    record_bytes: of a sequence's recurrent states, one block each; None for K and V.
    """

    window: int | None
    chunk: int | None
    num_blocks: int
    num_used_blocks: int
    num_findable_blocks: int
    num_evictions: int
    record_bytes: int | None = None

    @property
    def name(self) -> str:
        """Window and chunk of its layers, in words."""
        if self.record_bytes is not None:
            return "recurrent states"
        parts = {"window": self.window, "chunks of": self.chunk}
        return " in ".join(f"{words} {size}" for words, size in parts.items() if size is not None) or "full attention"

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.num_used_blocks / max(1, self.num_blocks)


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


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Snapshot of queues and block pool, and counters since construction.

    Block counts exclude the null block; where layers form several cache groups they are those of the first, the one
    with full attention if there is one. Prefix cache queries and hits are prompt tokens looked up and found, counted
    once per admitted request; evictions are cached blocks that were reused for other content.

    recent_hit_rate: hits / queries over the last 1,000 steps; None without queries.
    recent_budget_use: scheduled tokens / max_num_batched_tokens over the last 1,000 steps; None without steps.
    hook_error: error of an observer (`on_step`, the trace) that was dropped because it raised.
    cache_groups: the pool of each cache group, where some layers have a window or chunked attention; else empty.
    kv_touched_bytes: memory that the KV cache takes: on a CPU its blocks that were used or touched while idle.
    kv_findable_bytes: of blocks that hold a findable prefix, in use or free.
    num_clients: with running or waiting requests; of several replicas, in that with the most.
    client_gap: largest difference between the service of two clients that wait in one priority level, now, over their
        weights; in prompt tokens computed, with 3 for each generated token. Of several replicas, the largest.
    budget: with an `itl_goal`; of replicas the means and the sum of misses.
    tiers: with `prefix_cache_host_bytes` or `prefix_cache_dir`; of replicas the sums.
    speculation: with drafts.
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
    cache_groups: tuple[CacheGroupStats, ...] = ()
    kv_touched_bytes: int = 0
    kv_findable_bytes: int = 0
    num_clients: int = 0
    client_gap: float = 0.0
    budget: BudgetStats | None = None
    tiers: TierStats | None = None
    speculation: SpeculationStats | None = None

    @classmethod
    def of_scheduler(cls, scheduler: Any) -> EngineStats:
        """Queues, the first pool of blocks, and counters of a `Scheduler`; None where observers know more."""
        manager = scheduler.block_manager
        num_blocks = manager.num_blocks - 1
        return cls(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=num_blocks,
            num_used_blocks=num_blocks - len(manager.free_blocks),
            num_free_blocks=len(manager.free_blocks),
            num_findable_blocks=manager.num_findable_blocks,
            prefix_cache_evictions=manager.num_evictions,
            recent_hit_rate=None,
            recent_budget_use=None,
            hook_error=None,
            num_clients=scheduler.waiting.num_clients,
            client_gap=scheduler.waiting.gap,
            budget=scheduler.budget.stats(),
            speculation=None if scheduler.drafting is None else scheduler.drafting.stats(),
            **asdict(scheduler.stats),
        )


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """State of a replica.

    state: "starting", "up", "restarting" after its process died, or "failed" after it died again and again.
    process_id: of its engine; None before the first.
    silence: seconds in which it had work and reported no step.
    """

    index: int
    state: str
    process_id: int | None
    num_running: int
    num_waiting: int
    num_restarts: int
    silence: float
