"""`Decision`: what was chosen for a prefix that a tier holds, and why. No torch."""

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
