"""Keeps Python's garbage collector from traversing many long-lived objects."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector during imports of torch and transformers, and the loading of a model.

    These make a million objects, none of them garbage; repeated traversal takes one second of four. At the end they are
    made old: else the first young collection would traverse them all (0.3 s). Earlier young garbage is collected at the
    start, since it would become old too.
    """
    was_enabled = gc.isenabled()
    try:
        if was_enabled:
            gc.collect(1)
            gc.disable()
        yield
    finally:
        try:
            if was_enabled:
                OldObjectsFrozen.age_objects()
        finally:
            if was_enabled:
                gc.enable()


@dataclass(kw_only=True, eq=False)
class OldObjectsFrozen:
    """Freezes existing objects during a call of many steps, so that the collector skips them.

    A full collection takes tenths of a second between an engine's steps; one of the call's own objects takes little.
    But freezing makes young objects old, so consecutive calls would never find garbage: a full collection runs at the
    end of a call once calls have lasted long enough in total, or sooner if there were many. Objects frozen by other
    code stay frozen.

    Args:
        keeps_results: the call returns very many objects, such as logprobs. Objects that survive two young collections
            are then frozen too, so that full collections skip the growing results; their cycles are collected after the
            call.
    """

    keeps_results: bool = False

    OF_PYTHON = 1000  # most objects frozen by the interpreter; 3.12 freezes some hundred
    COLLECTS_EVERY = 60.0  # seconds of such calls, or a tenth of that
    AFTER_CALLS = 1000  # number of calls from which on a tenth of COLLECTS_EVERY is enough

    _lock = threading.RLock()  # a collection may run finalizers of any kind
    # Weak: a call interrupted at its start or end is removed when it is freed, and the next call thaws for it.
    _calls: ClassVar[weakref.WeakSet[OldObjectsFrozen]] = weakref.WeakSet()
    _has_frozen = False
    _is_for_good = False
    _begin = 0.0
    _seconds, _count = 0.0, 0  # sums over calls since the last collection

    def __enter__(self) -> None:
        cls = OldObjectsFrozen
        with cls._lock:
            cls._calls.add(self)
            if not (cls._has_frozen or cls._is_for_good) and gc.isenabled() and gc.get_freeze_count() < cls.OF_PYTHON:
                gc.collect(0)
                cls._has_frozen, cls._begin = True, time.monotonic()
                gc.freeze()
            if self.keeps_results:
                cls._follow_calls()

    def __exit__(self, *_: object) -> None:
        cls = OldObjectsFrozen
        with cls._lock:
            cls._calls.discard(self)
            was_frozen = cls._has_frozen
            cls._follow_calls()
            if cls._has_frozen or not was_frozen:
                return
            cls._seconds += time.monotonic() - cls._begin
            cls._count += 1
            is_due = cls._seconds > cls.COLLECTS_EVERY / (10 if cls._count >= cls.AFTER_CALLS else 1)
            if is_due:
                cls._seconds, cls._count = 0.0, 0
        if is_due:
            gc.collect()

    @classmethod
    def freeze_for_good(cls) -> None:
        """Freeze all objects of a process that has loaded its model: later collections skip them, also between calls.

        Takes a full collection, tenths of a second; cycles among objects alive now are never collected.
        """
        with cls._lock:
            gc.collect()
            gc.freeze()
            gc.collect()  # collects nothing; its count decides when the next full collection is due
            cls._has_frozen, cls._is_for_good = False, True  # no call thaws
            cls._follow_calls()

    @classmethod
    def _follow_calls(cls) -> None:
        """Freeze survivors while one of the calls keeps results; thaw after the last call."""
        was_frozen, cls._has_frozen = cls._has_frozen, cls._has_frozen and bool(cls._calls)
        keeps_results = cls._has_frozen and any(call.keeps_results for call in cls._calls)
        if keeps_results != (cls._freeze_survivors in gc.callbacks):
            (gc.callbacks.append if keeps_results else gc.callbacks.remove)(cls._freeze_survivors)
        if was_frozen and not cls._has_frozen:
            gc.unfreeze()

    @staticmethod
    def _freeze_survivors(phase: str, info: dict[str, int]) -> None:
        """Callback of the collector; freezing empties the oldest generation and resets its count."""
        if phase == "stop" and info["generation"] == 1 and OldObjectsFrozen._has_frozen:
            gc.freeze()

    @classmethod
    def age_objects(cls) -> None:
        """Make all objects old, without a collection; skipped while objects are frozen, since it would thaw them."""
        with cls._lock:
            if not (cls._has_frozen or cls._is_for_good) and gc.get_freeze_count() < cls.OF_PYTHON:
                try:
                    gc.freeze()
                finally:
                    gc.unfreeze()  # all objects are now in the oldest generation

    @classmethod
    def forget_calls(cls) -> None:
        """Reset in a forked child: it lacks the threads of the calls, and one of them may have held the lock."""
        cls._lock = threading.RLock()
        cls._calls.clear()
        cls._follow_calls()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=OldObjectsFrozen.forget_calls)
