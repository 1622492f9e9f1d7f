"""Engine statistics between two steps, for readers that must not wait for the running step."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.features.engine_stats import EngineStats


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Statistics as of the end of the last step.

    stats: engine statistics at that time.
    age: seconds since then while there is work; 0.0 while the engine is idle.
    """

    stats: EngineStats
    age: float
