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


class OldObjectsFrozen:
    """Around a call that makes many steps: what was there before is not looked through meanwhile.

    A collection of everything takes tenths of a second and falls among an engine's steps; of what the call itself made
    it takes little. Calls that follow one another would put it off for ever, so one is made at the end of a call once
    they have lasted long enough in all. What somebody else has frozen stays as it is.
    """

    COLLECTS_EVERY = 60.0  # seconds of such calls

    _lock = threading.Lock()
    _num_calls = 0
    _is_ours = False  # what is frozen
    _begin = 0.0
    _lasted = 0.0  # since the last collection

    def __enter__(self) -> None:
        cls = OldObjectsFrozen
        with cls._lock:
            cls._num_calls += 1
            if cls._num_calls == 1 and gc.isenabled() and not gc.get_freeze_count():
                gc.freeze()
                cls._is_ours, cls._begin = True, time.monotonic()

    def __exit__(self, *_: object) -> None:
        cls = OldObjectsFrozen
        with cls._lock:
            cls._num_calls -= 1
            if cls._num_calls or not cls._is_ours:
                return
            cls._is_ours = False
            gc.unfreeze()
            cls._lasted += time.monotonic() - cls._begin
            is_due = cls._lasted > cls.COLLECTS_EVERY
            if is_due:
                cls._lasted = 0.0
        if is_due:
            gc.collect()
