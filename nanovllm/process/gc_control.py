"""Python's garbage collector, kept from going through a great many objects that stay."""

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
    """Around imports of torch and transformers, and the loading of a model.

    They make a million objects, none of them garbage; going through them again and again takes a second of four. They
    are old at the end: the first collection of young objects would go through them all, a third of a second. Young
    garbage of before is collected at the start, since it would be old too.
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
    """Around a call of many steps: the collector does not go through what was there before.

    A collection of everything takes tenths of a second and falls among an engine's steps; of what the call itself made
    it takes little. But freezing makes young objects old, so that calls in a row would put off finding garbage for
    ever: everything is collected at the end of a call once the calls have lasted long enough in all, or sooner if they
    were many. Objects that other code has frozen stay frozen.

    Args:
        keeps_results: the call returns very many objects, such as log-probabilities. What outlives two young
            collections is then frozen too, so that full ones do not go through the growing results; cycles of that age
            wait for the end of the call.
    """

    keeps_results: bool = False

    OF_PYTHON = 1000  # objects that an interpreter may have frozen by itself; 3.12 does so with some hundred
    COLLECTS_EVERY = 60.0  # seconds of such calls, or a tenth of that
    AFTER_CALLS = 1000  # if they were as many

    _lock = threading.RLock()  # a collection may run finalizers of any kind
    # Weak: a call that an interrupt cut short at its begin or end leaves by itself, and the next call thaws for it.
    _calls: ClassVar[weakref.WeakSet[OldObjectsFrozen]] = weakref.WeakSet()
    _has_frozen = False
    _is_for_good = False
    _begin = 0.0
    _seconds, _count = 0.0, 0  # of calls since the last collection

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
        """In a process that has loaded what it serves: no later collection, between calls neither, goes through that.

        Takes a full collection, tenths of a second; garbage cycles of what is alive now are never found.
        """
        with cls._lock:
            gc.collect()
            gc.freeze()
            gc.collect()  # of nothing: the next full one is due by the number of objects that the last one saw
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
        """Called by the collector; freezing empties the oldest generation and begins its count anew."""
        if phase == "stop" and info["generation"] == 1 and OldObjectsFrozen._has_frozen:
            gc.freeze()

    @classmethod
    def age_objects(cls) -> None:
        """Make all objects old, without a collection; not while objects are frozen, which would be thawed."""
        with cls._lock:
            if not (cls._has_frozen or cls._is_for_good) and gc.get_freeze_count() < cls.OF_PYTHON:
                try:
                    gc.freeze()
                finally:
                    gc.unfreeze()  # into the oldest generation

    @classmethod
    def forget_calls(cls) -> None:
        """In a forked child: the threads that made the calls are not there, and one of them may have held the lock."""
        cls._lock = threading.RLock()
        cls._calls.clear()
        cls._follow_calls()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=OldObjectsFrozen.forget_calls)
