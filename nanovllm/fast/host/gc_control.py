"""Python's garbage collector, kept from traversing the objects that a start makes."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector during imports of torch and transformers, and the loading of a model.

    These make a million objects, none of them garbage; repeated traversal takes one second of four.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_while_alive(engine: object) -> None:
    """Freeze all objects until the engine is freed: a full collection of them takes tenths of a second of a step."""
    gc.freeze()
    weakref.finalize(engine, _unfreeze, os.getpid()).atexit = False


def _unfreeze(process_id: int) -> None:
    """Not in a forked child, where engines end with their threads: a collection of all that is there may hang."""
    if os.getpid() == process_id:
        gc.unfreeze()
