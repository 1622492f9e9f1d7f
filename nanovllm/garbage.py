"""Python's garbage collector, kept from looking through a great many objects that stay."""

from __future__ import annotations

import gc
import threading
import time
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


class LongCall:
    """Around a call that makes many steps: once it has lasted, what was there before is not looked through any more.

    A collection of everything takes tenths of a second and falls among an engine's steps; of what the call itself made
    it takes little. Short calls are left alone, since freezing puts off the next collection of everything; long ones
    make up for it in the end. What somebody else has frozen stays as it is.
    """

    LASTS = 1.0  # seconds
    COLLECTS_EVERY = 60.0

    _lock = threading.Lock()
    _num_lasting = 0
    _is_frozen = False
    _last_collection = time.monotonic()

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._lasts = False

    def step(self) -> None:
        """To be called now and then."""
        if not self._lasts and time.monotonic() - self._start > self.LASTS:
            self._lasts = True
            with self._lock:
                LongCall._num_lasting += 1
                if self._num_lasting == 1 and gc.isenabled() and not gc.get_freeze_count():
                    gc.freeze()
                    LongCall._is_frozen = True

    def __enter__(self) -> LongCall:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._lasts:
            return
        with self._lock:
            LongCall._num_lasting -= 1
            if self._num_lasting or not self._is_frozen:
                return
            LongCall._is_frozen = False
            gc.unfreeze()
            is_due = time.monotonic() - self._last_collection > self.COLLECTS_EVERY
            if is_due:
                LongCall._last_collection = time.monotonic()
        if is_due:
            gc.collect()
