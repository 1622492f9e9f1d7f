"""Python's garbage collector, kept from looking through a great many objects that stay."""

from __future__ import annotations

import gc
import threading
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


_lock = threading.Lock()
_num_frozen = 0


@contextmanager
def heap_frozen() -> Iterator[None]:
    """What is there now is not looked through before the end: a collection that falls among an engine's steps then
    takes microseconds, where it would take some tenths of a second."""
    global _num_frozen
    with _lock:
        _num_frozen += 1
        gc.freeze()
    try:
        yield
    finally:
        with _lock:
            _num_frozen -= 1
            if not _num_frozen:
                gc.unfreeze()
