"""Python's garbage collector, kept from traversing the objects that a start makes."""

from __future__ import annotations

import gc
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
