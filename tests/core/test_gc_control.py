"""The garbage collector during calls of many steps."""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import contextmanager

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.fast.host.gc_control import OldObjectsFrozen, collector_paused
from tests.support.tiny_models import tiny_model


@contextmanager
def eager_collector():
    """Full collections come as often as they may."""
    gc.freeze()
    gc.collect()  # of nothing: one is due once the new objects are a quarter of those that the last one saw
    gc.unfreeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(200, 3, 3)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def full_collections():
    """A list that grows by one with each."""
    found = []

    def note(phase, info):
        if phase == "stop" and info["generation"] == 2:
            found.append(info)

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_is_due(monkeypatch):
    """And no collection comes by itself at the wrong moment."""
    monkeypatch.setattr(OldObjectsFrozen, "_seconds", 0.0)
    monkeypatch.setattr(OldObjectsFrozen, "_count", 0)
    gc.collect(1)  # a full one takes a quarter of a second


def test_what_was_there_is_frozen_until_the_last_call_ends():
    with OldObjectsFrozen():
        frozen = gc.get_freeze_count()
        assert frozen > 1000
        with OldObjectsFrozen():
            garbage = weakref.ref(Cycle())
            assert gc.get_freeze_count() <= frozen  # not again: what the calls themselves make is collected
            gc.collect()
            assert garbage() is None
        assert 0 <= frozen - gc.get_freeze_count() < 100  # some may die
    assert gc.get_freeze_count() < OldObjectsFrozen.OF_PYTHON


@pytest.mark.parametrize("of_python", [0, 375])  # frozen from the interpreter's start; the latter by 3.12
def test_what_was_there_is_not_looked_through_until_the_call_has_ended(of_python, monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: of_python)
    old = Cycle()
    garbage = weakref.ref(old)
    with OldObjectsFrozen():
        del old
        gc.collect()
        assert garbage() is not None
    gc.collect()
    assert garbage() is None


def test_garbage_that_was_young_is_collected_at_the_beginning():
    garbage = weakref.ref(Cycle())
    with OldObjectsFrozen():
        assert garbage() is None


def test_objects_frozen_by_an_interrupted_call_are_unfrozen_by_the_next():
    OldObjectsFrozen().__enter__()
    assert gc.get_freeze_count() > 1000
    with OldObjectsFrozen():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with OldObjectsFrozen():
            pass
        assert 0 <= frozen - gc.get_freeze_count() < 100  # some may die
    finally:
        gc.unfreeze()


def test_a_collector_that_was_switched_off_is_left_alone():
    gc.disable()
    try:
        with OldObjectsFrozen():
            assert gc.get_freeze_count() < OldObjectsFrozen.OF_PYTHON
    finally:
        gc.enable()


@pytest.mark.parametrize(("after_calls", "num_calls"), [(100, 36), (20, 20), (3, 4)])
def test_garbage_of_many_calls_is_collected_once_they_have_lasted_long_enough(monkeypatch, after_calls, num_calls):
    """36 calls of a tenth of a second, or as many as there may be, but no fewer than last a tenth of that time."""
    monkeypatch.setattr(OldObjectsFrozen, "COLLECTS_EVERY", 3.55)
    monkeypatch.setattr(OldObjectsFrozen, "AFTER_CALLS", after_calls)
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in range(2):
        old = Cycle()
        garbage = weakref.ref(old)
        with OldObjectsFrozen():
            del old
            now += 0.1
        counted = 1
        while garbage() is not None:
            with OldObjectsFrozen():
                now += 0.1
            counted += 1
        assert counted == num_calls


# ----------------------------------------------------------------------------------------------- processes that serve


@pytest.fixture
def thawed_at_the_end(monkeypatch):
    monkeypatch.setattr(OldObjectsFrozen, "_is_for_good", False)
    yield
    gc.unfreeze()


def test_what_is_frozen_for_good_is_looked_through_neither_in_calls_nor_between_them(thawed_at_the_end):
    old = Cycle()
    garbage = weakref.ref(old)
    OldObjectsFrozen.freeze_for_good()
    del old
    with OldObjectsFrozen():
        gc.collect()
    with OldObjectsFrozen(keeps_results=True):
        pass
    gc.collect()
    assert garbage() is not None


def test_a_call_that_ends_later_does_not_thaw_what_is_frozen_for_good(thawed_at_the_end):
    before = list(gc.callbacks)
    with OldObjectsFrozen(keeps_results=True):
        OldObjectsFrozen.freeze_for_good()
        assert gc.callbacks == before
    with collector_paused():
        pass
    assert gc.get_freeze_count() > 1000


def test_garbage_of_before_and_after_is_collected_where_objects_are_frozen_for_good(thawed_at_the_end):
    before = weakref.ref(Cycle())
    OldObjectsFrozen.freeze_for_good()
    assert before() is None
    with OldObjectsFrozen():
        after = weakref.ref(Cycle())
    gc.collect()
    assert after() is None


def test_full_collections_come_by_the_number_of_new_objects_once_the_others_are_frozen_for_good(thawed_at_the_end):
    old = [[] for _ in range(300_000)]
    gc.collect()
    OldObjectsFrozen.freeze_for_good()
    with full_collections() as found:
        new = [[] for _ in range(100_000)]
    assert found
    del old, new


# ------------------------------------------------------------------------------------------------- growing results


@pytest.mark.parametrize("asked", [{"logprobs": 5}, {"prompt_logprobs": 5}])
def test_no_full_collection_goes_through_the_log_probabilities_of_a_call(asked):
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, **asked)
    with LLM(tiny_model(), max_model_len=128, enforce_eager=True) as llm:
        with eager_collector(), full_collections() as found:
            outputs = llm.generate([[5, 6, 7] * 20] * 24, params, use_tqdm=False)
        assert found == []
    reports = outputs[0].outputs[0].logprobs or outputs[0].prompt_logprobs[1:]
    assert len(reports) >= 30 and all(len(report) >= 5 for report in reports)
    assert gc.get_freeze_count() < OldObjectsFrozen.OF_PYTHON


def test_of_growing_results_what_outlives_two_collections_is_frozen_until_the_call_ends():
    def grow():
        return [Cycle() for _ in range(5000)]

    with eager_collector(), full_collections() as found, OldObjectsFrozen(keeps_results=True):
        kept = grow()
        assert found == []
        first = gc.get_freeze_count()
        kept += grow()
        assert gc.get_freeze_count() > first + 3000
        garbage = weakref.ref(kept[0])
        del kept[:]
    gc.collect()
    assert garbage() is None


def test_calls_without_growing_results_collect_as_before():
    with eager_collector(), full_collections() as found, OldObjectsFrozen():
        kept = [Cycle() for _ in range(20_000)]
        assert found
    del kept


def test_a_call_that_keeps_results_leaves_no_trace_in_the_collector_while_another_goes_on():
    before = len(gc.callbacks)
    with OldObjectsFrozen():
        with OldObjectsFrozen(keeps_results=True):
            assert len(gc.callbacks) == before + 1
        assert len(gc.callbacks) == before
    gc.disable()
    try:
        with OldObjectsFrozen(keeps_results=True):
            assert len(gc.callbacks) == before
    finally:
        gc.enable()


def test_what_was_made_with_the_collector_paused_is_old_and_no_collection_goes_through_it():
    gc.collect()
    with full_collections() as collections, collector_paused():
        made = [[] for _ in range(10_000)]
        assert any(one is made for one in gc.get_objects(generation=0))
    assert gc.isenabled()
    assert any(one is made for one in gc.get_objects(generation=2))
    assert len(gc.get_objects(generation=0)) < len(made)
    assert gc.get_freeze_count() < OldObjectsFrozen.OF_PYTHON
    assert not collections


def test_garbage_of_a_pause_is_found_by_the_next_full_collection():
    class Node:
        pass

    with collector_paused():
        node = Node()
        node.itself = node
        reference = weakref.ref(node)
        del node
    assert reference() is not None
    gc.collect()
    assert reference() is None


def test_young_garbage_of_before_a_pause_does_not_become_old():
    garbage = weakref.ref(Cycle())
    with collector_paused():
        assert garbage() is None


@pytest.mark.parametrize("place", ["collect", "disable", "freeze", "unfreeze"])
def test_an_interrupt_within_a_pause_leaves_the_collector_on_and_nothing_frozen(place, monkeypatch):
    real = getattr(gc, place)

    def interrupted(*args):
        real(*args)
        raise KeyboardInterrupt  # as Python does once a call has returned

    monkeypatch.setattr(gc, place, interrupted)
    with pytest.raises(KeyboardInterrupt), collector_paused():
        pass
    assert gc.isenabled()
    assert gc.get_freeze_count() < OldObjectsFrozen.OF_PYTHON


def test_a_pause_thaws_nothing_that_others_have_frozen():
    gc.collect()
    gc.freeze()
    try:
        num_frozen = gc.get_freeze_count()
        assert num_frozen > OldObjectsFrozen.OF_PYTHON
        with collector_paused():
            made = [[] for _ in range(100)]
        assert num_frozen - 100 < gc.get_freeze_count() <= num_frozen
        assert any(one is made for one in gc.get_objects(generation=0))
    finally:
        gc.unfreeze()


def test_a_pause_thaws_nothing_beside_a_call_of_many_steps():
    with OldObjectsFrozen():
        num_frozen = gc.get_freeze_count()
        with collector_paused():
            made = [[] for _ in range(100)]
        assert num_frozen - 100 < gc.get_freeze_count() <= num_frozen
        assert any(one is made for one in gc.get_objects(generation=0))


def test_within_a_pause_another_one_leaves_the_collector_off():
    with collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
