"""Python's garbage collector, kept from looking through a great many objects that stay."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


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
    it takes little. But freezing makes the young old, so calls that follow one another would put off for ever that
    garbage is found: everything is collected at the end of a call once they have lasted long enough in all, or sooner
    if they were many, since each may have left some. What somebody else has frozen stays as it is.

    Args:
        keeps_results: the call makes very many objects that it returns, such as log-probabilities. What outlives two
            young collections is then frozen too, so that full ones do not go through the growing results; cycles of
            that age wait for the end of the call.
    """

    OF_PYTHON = 1000  # objects that an interpreter may have frozen by itself; 3.12 does so with some hundred
    COLLECTS_EVERY = 60.0  # seconds of such calls, or a tenth of that
    AFTER_CALLS = 1000  # if they were as many

    _lock = threading.RLock()  # a collection may run anybody's finalizers
    # One that an interrupt cut short while it began or ended goes by itself; what it froze, the next call lets go.
    _calls: ClassVar[weakref.WeakSet[OldObjectsFrozen]] = weakref.WeakSet()
    _has_frozen = False
    _begin = 0.0
    _seconds, _count = 0.0, 0  # of calls since the last collection

    def __init__(self, *, keeps_results: bool = False) -> None:
        self._keeps_results = keeps_results

    def __enter__(self) -> None:
        cls = OldObjectsFrozen
        with cls._lock:
            cls._calls.add(self)
            if not cls._has_frozen and gc.isenabled() and gc.get_freeze_count() < cls.OF_PYTHON:
                gc.collect(0)
                cls._has_frozen, cls._begin = True, time.monotonic()
                gc.freeze()
            if self._keeps_results and cls._has_frozen and cls._freeze_survivors not in gc.callbacks:
                gc.callbacks.append(cls._freeze_survivors)

    @staticmethod
    def _freeze_survivors(phase: str, info: dict[str, int]) -> None:
        """Called by the collector; freezing empties the oldest generation and begins its count anew."""
        if phase == "stop" and info["generation"] == 1 and OldObjectsFrozen._has_frozen:
            gc.freeze()

    @classmethod
    def _thaw(cls) -> None:
        cls._has_frozen = False
        cls._leave_survivors()
        gc.unfreeze()

    @classmethod
    def _leave_survivors(cls) -> None:
        if cls._freeze_survivors in gc.callbacks:
            gc.callbacks.remove(cls._freeze_survivors)

    def __exit__(self, *_: object) -> None:
        cls = OldObjectsFrozen
        with cls._lock:
            cls._calls.discard(self)
            if self._keeps_results and not any(call._keeps_results for call in cls._calls):
                cls._leave_survivors()
            if cls._calls or not cls._has_frozen:
                return
            cls._thaw()
            cls._seconds += time.monotonic() - cls._begin
            cls._count += 1
            is_due = cls._seconds > cls.COLLECTS_EVERY / (10 if cls._count >= cls.AFTER_CALLS else 1)
            if is_due:
                cls._seconds, cls._count = 0.0, 0
        if is_due:
            gc.collect()

    @classmethod
    def forget_calls(cls) -> None:
        """In a forked child: the threads that made the calls are not there, and one of them may have held the lock."""
        cls._lock = threading.RLock()
        cls._calls.clear()
        if cls._has_frozen:
            cls._thaw()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=OldObjectsFrozen.forget_calls)
