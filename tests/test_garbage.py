"""The garbage collector around calls that make many steps."""

from __future__ import annotations

import gc
import time
import weakref

import pytest

from nanovllm.garbage import OldObjectsFrozen


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_is_due(monkeypatch):
    monkeypatch.setattr(OldObjectsFrozen, "_lasted", 0.0)


def test_what_was_there_is_frozen_until_the_last_call_ends():
    with OldObjectsFrozen():
        frozen = gc.get_freeze_count()
        assert frozen > 1000
        with OldObjectsFrozen():
            garbage = weakref.ref(Cycle())
            assert gc.get_freeze_count() == frozen  # not again: what the calls themselves make is collected
            gc.collect()
            assert garbage() is None
        assert gc.get_freeze_count() == frozen
    assert gc.get_freeze_count() == 0


def test_what_was_there_is_not_looked_through_until_the_call_has_ended():
    garbage = weakref.ref(Cycle())
    with OldObjectsFrozen():
        gc.collect()
        assert garbage() is not None
    gc.collect()
    assert garbage() is None


def test_what_somebody_else_froze_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with OldObjectsFrozen():
            pass
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()


def test_a_collector_that_was_switched_off_is_left_alone():
    gc.disable()
    try:
        with OldObjectsFrozen():
            assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_garbage_of_many_calls_is_collected_once_they_have_lasted_long_enough(monkeypatch):
    monkeypatch.setattr(OldObjectsFrozen, "COLLECTS_EVERY", 3.5)
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    gc.collect()
    collected = []
    garbage = weakref.ref(Cycle())
    for _ in range(8):
        with OldObjectsFrozen():
            now += 1.0
        collected.append(garbage() is None)
        if garbage() is None:
            garbage = weakref.ref(Cycle())
    assert collected == [False, False, False, True] * 2
