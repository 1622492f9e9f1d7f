"""An engine as its thread left it last, for readers that must not wait for the step that runs."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.outputs import EngineStats


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last moment between two steps.

    stats: as of then.
    age: seconds since then for which there was work; 0.0 while there is none, since the stats are current then.
    """

    stats: EngineStats
    age: float
