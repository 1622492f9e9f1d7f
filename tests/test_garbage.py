"""The garbage collector around long calls."""

from __future__ import annotations

import gc
import weakref

from nanovllm.garbage import LongCall


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_a_short_call_freezes_nothing():
    with LongCall() as call:
        call.step()
        assert gc.get_freeze_count() == 0


def test_a_long_call_freezes_what_was_there_and_lets_it_go_in_the_end(monkeypatch):
    monkeypatch.setattr(LongCall, "LASTS", 0.0)
    with LongCall() as outer, LongCall() as inner:
        outer.step()
        frozen = gc.get_freeze_count()
        assert frozen > 1000
        inner.step()
        outer.step()
        assert gc.get_freeze_count() == frozen  # not again: what the calls themselves make is collected
        garbage = weakref.ref(Cycle())
        gc.collect()
        assert garbage() is None
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen(monkeypatch):
    monkeypatch.setattr(LongCall, "LASTS", 0.0)
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with LongCall() as call:
            call.step()
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()


def test_garbage_of_many_long_calls_is_collected_in_the_end(monkeypatch):
    monkeypatch.setattr(LongCall, "LASTS", 0.0)
    monkeypatch.setattr(LongCall, "COLLECTS_EVERY", 0.0)
    garbage = []
    for _ in range(3):
        garbage.append(weakref.ref(Cycle()))
        with LongCall() as call:
            call.step()
    assert [reference() for reference in garbage] == [None] * 3
