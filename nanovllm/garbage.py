"""Python's garbage collector, paused while a great many objects come to stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Importing torch and transformers and loading a model make a million objects, none of them garbage; looking
    through them again and again takes a second of four."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
