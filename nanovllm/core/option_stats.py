"""Statistics of optional features: latency goals, tiers of the prefix cache, drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


class Goals(Protocol):
    """Latency goals in seconds; None without one."""

    @property
    def itl_goal(self) -> Any: ...

    @property
    def ttft_goal(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class BudgetStats:
    """Token budget that keeps an `itl_goal`, and how well its steps are predicted.

    itl_goal, ttft_goal: Goals in force, seconds; "auto" follows the costs.
    num_tokens: budget of the last step.
    error: median over the last 100 steps of the predictions' errors, relative to the time measured; None before any.
    num_misses: steps since construction that took twice or half of their prediction.
    """

    itl_goal: float
    ttft_goal: float | None
    num_tokens: int
    error: float | None
    num_misses: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """Tiers of the prefix cache: host memory, and files read into it. Blocks count once for each cache group.

    num_stored_blocks, num_loaded_blocks: copied to host memory, and back to the KV cache; num_loaded_tokens: the hits.
    num_read_blocks, num_failed_reads: from files; failed ones were damaged or removed, and count as misses.
    num_loads, num_recomputes: prefixes loaded from a tier, and computed since that was predicted to be faster.
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

    num_drafts: entries of steps with drafts; each draws one token more than it accepts.
    num_draft_tokens, num_accepted_tokens: computed, and equal to the model's draws.
    accepted_by_depth: accepted tokens by their place among the drafts of an entry.
    by_source: tokens drafted and accepted of each source of drafts.
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
        """Tokens that an entry with drafts brings; None without any."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None
