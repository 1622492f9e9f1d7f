"""Statistics of engines and replicas: plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


class Goals(Protocol):
    """Latency goals in seconds; None without one."""

    @property
    def itl_goal(self) -> Any: ...

    @property
    def ttft_goal(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class BudgetStats:
    """Token budget that keeps an `itl_goal`, and the accuracy of its predictions.

    itl_goal, ttft_goal: Goals in force, seconds; "auto" follows the costs.
    num_tokens: budget of the last step.
    error: median relative error of the predictions of the last 100 steps; None before any.
    num_misses: number of steps since construction that took twice their predicted time or more, or half or less.
    """

    itl_goal: float
    ttft_goal: float | None
    num_tokens: int
    error: float | None
    num_misses: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """Tiers of the prefix cache: host memory, and files read into it. Blocks count once for each cache group.

    num_stored_blocks, num_loaded_blocks, num_loaded_tokens: blocks copied to host memory; blocks, tokens copied back.
    num_read_blocks, num_failed_reads: blocks read from files; reads of damaged or removed ones, which count as misses.
    num_loads, num_recomputes: prefixes loaded from a tier; prefixes computed, because that was predicted to be faster.
    load_seconds, compute_seconds: estimates of the last such decision; None before anything was measured.
    """

    host_bytes: int = 0
    num_host_blocks: int = 0
    num_host_evictions: int = 0
    num_stored_blocks: int = 0
    num_loaded_blocks: int = 0
    num_loaded_tokens: int = 0
    dir_bytes: int = 0
    num_written_blocks: int = 0
    num_read_blocks: int = 0
    num_failed_reads: int = 0
    num_loads: int = 0
    num_recomputes: int = 0
    load_seconds: float | None = None
    compute_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counters of drafts since construction.

    num_drafts: entries with drafts; each draws one token more than it accepts.
    num_draft_tokens, num_accepted_tokens: tokens verified; tokens among them that equal the model's draws.
    accepted_by_depth: number of accepted tokens at each place among the drafts of an entry.
    by_source: (tokens drafted, tokens accepted) of each source of drafts.
    num_failures: calls of a drafter that raised or returned no token ids.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_failures: int = 0

    @property
    def tokens_per_draft(self) -> float | None:
        """Mean number of tokens that an entry with drafts draws; None without any."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None


@dataclass(frozen=True, slots=True)
class CacheGroupStats:
    """Block pool of the layers that see the same positions, or of recurrent states; see `EngineStats`.

    window, chunk: limits of the layers' attention, in tokens; None for no such limit.
    record_bytes: bytes of a sequence's recurrent states, which take one block; None for K and V.
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


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Snapshot of queues and block pool, and counters since construction.

    Block counts exclude the null block; where layers form several cache groups they are those of the first, the one
    with full attention if there is one. Prefix cache queries and hits are prompt tokens looked up and found, counted
    once per admitted request; evictions are cached blocks that were reused for other content.

    recent_hit_rate: hits / queries over the last 1,000 steps; None without queries.
    recent_budget_use: tokens scheduled / max_num_batched_tokens over the last 1,000 steps; None without steps.
    hook_error: error of an observer (`on_step`, the trace) that was dropped because it raised.
    cache_groups: the pool of each cache group, where some layers have a window or chunked attention; else empty.
    kv_touched_bytes: memory that the KV cache takes: on a CPU its blocks that were used or touched while idle.
    kv_findable_bytes: bytes of blocks that hold a findable prefix, in use or free.
    num_clients: clients with running or waiting requests; with replicas, those of the replica with the most.
    client_gap: largest difference between the service of two clients that wait in one priority level, now, over their
        weights; in prompt tokens computed, with 3 for each generated token. Of several replicas, the largest.
    budget: figures of the `itl_goal`, None without one; with replicas, their means and the sum of misses.
    tiers: figures of host memory and files, None without such tiers; with replicas, the sums.
    speculation: figures of drafts, None without drafts.
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
            speculation=scheduler.proposer.stats(),
            **asdict(scheduler.stats),
        )


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """State of a replica.

    state: "starting", "up", "restarting" after its process died, or "failed" after it died again and again.
    process_id: process id of its engine; None before the first one.
    silence: seconds in which it had work and reported no step.
    """

    index: int
    state: str
    process_id: int | None
    num_running: int
    num_waiting: int
    num_restarts: int
    silence: float
