"""A thread that looks after the replicas of a pool whose owner steps only while it is called."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

# Seconds between two looks at an idle pool: how late a replica that died is started again.
LOOK_SECONDS = 0.5


class Kept(Protocol):
    def tend(self) -> bool:
        """Bury and restart replicas if there are no requests; False once the pool has ended."""


def keep(pool: Kept) -> None:
    """Tend a pool until it ends or is forgotten."""
    reference = weakref.ref(pool)
    threading.Thread(target=_run, args=(reference,), name="nanovllm-keeper", daemon=True).start()


def _run(reference: weakref.ref[Kept]) -> None:
    pause = threading.Event()  # never set
    while (pool := reference()) is not None and pool.tend():
        del pool  # a forgotten pool is freed while this waits
        pause.wait(LOOK_SECONDS)
