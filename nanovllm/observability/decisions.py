"""`Decision`: the choice to load, to await or to recompute a prefix that a tier holds, with its reason. No torch."""

from __future__ import annotations

from typing import NamedTuple


class Decision(NamedTuple):
    """Whether a prefix is loaded, and the estimates in seconds; None before anything was measured."""

    medium: str
    num_tokens: int
    num_bytes: int
    loads: bool
    load_seconds: float | None
    compute_seconds: float | None
