"""The garbage collector: off during a start, and without what was there when an engine was built."""

import gc
import weakref

import pytest

from nanovllm.fast.host.gc_control import collector_paused
from tests.support.llms import generate, open_llm


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.mark.full
def test_no_collection_traverses_what_was_there_when_an_engine_was_built_until_it_is_closed():
    old = Cycle()
    was_there = weakref.ref(old)
    with open_llm() as llm:
        del old
        made_since = weakref.ref(Cycle())
        generate(llm, [[5, 6, 7]])
        gc.collect()
        assert was_there() is not None and made_since() is None
        assert gc.get_freeze_count() > 100_000  # objects of torch and transformers alone
    gc.collect()
    assert was_there() is None


def test_an_engine_that_is_forgotten_thaws_what_it_froze():
    llm = open_llm(num_kv_blocks=33)  # of which no thread takes memory
    assert gc.get_freeze_count() > 100_000
    del llm
    assert gc.get_freeze_count() < 100_000


@pytest.mark.parametrize("place", ["disable", "enable"])
def test_an_interrupt_within_a_pause_leaves_the_collector_on(place, monkeypatch):
    real = getattr(gc, place)

    def interrupted():
        real()
        raise KeyboardInterrupt  # as Python does once a call has returned

    monkeypatch.setattr(gc, place, interrupted)
    with pytest.raises(KeyboardInterrupt), collector_paused():
        pass
    assert gc.isenabled()


def test_a_pause_within_another_one_or_of_a_collector_that_is_off_leaves_it_off():
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
