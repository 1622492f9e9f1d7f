"""Load or recompute: bytes over the measured rate against the predicted time to compute. No torch."""

from __future__ import annotations

from collections.abc import Callable

from nanovllm.observability.decisions import Decision

# Weight of the newest measurement in a rate.
NEWEST = 0.2
MIN_BYTES = 2**20  # fewest bytes of a measurement: less says little of the rate


class LoadCosts:
    """Decides per request; without an estimate of either side a prefix is loaded, which measures it.

    Args:
        compute: (position of the first token, number of tokens) -> predicted seconds; None if it cannot say.
    """

    def __init__(self, compute: Callable[[int, int], float | None] = lambda start, count: None) -> None:
        self.compute = compute
        self.rates: dict[str, float] = {}  # bytes a second, by medium
        self.on_decision: Callable[[Decision], None] | None = None
        self.last: Decision | None = None
        self.num_loads = self.num_recomputes = 0

    def measured(self, medium: str, num_bytes: int, seconds: float) -> None:
        """Count a finished load."""
        if num_bytes >= MIN_BYTES and seconds > 0.0:
            rate = num_bytes / seconds
            known = self.rates.get(medium)
            self.rates[medium] = rate if known is None else known + NEWEST * (rate - known)

    def decide(self, medium: str, num_bytes: int, start: int, num_tokens: int) -> Decision:
        """Whether to load `num_tokens` tokens from position `start` on."""
        rate = self.rates.get(medium)
        load = None if rate is None else num_bytes / rate
        compute = self.compute(start, num_tokens)
        loads = load is None or compute is None or load < compute
        return Decision(medium, num_tokens, num_bytes, loads, load, compute)

    def count(self, decision: Decision) -> None:
        """Count a decision that was followed."""
        self.last = decision
        self.num_loads += decision.loads
        self.num_recomputes += not decision.loads
        if self.on_decision is not None:
            self.on_decision(decision)
