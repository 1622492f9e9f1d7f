"""An engine process whose step hangs ends itself, and one that says nothing at all is ended by its front."""

import queue
import threading

import pytest

from nanovllm import SamplingParams
from nanovllm.build import build_engine
from nanovllm.observability.step_records import OnStep
from nanovllm.sequence import NewRequest
from nanovllm.serving.replicas import engine_process, fleet
from nanovllm.serving.replicas.engine_process import Intake, Reporter
from nanovllm.serving.replicas.fleet import Fleet
from nanovllm.serving.replicas.messages import Add, Died, SentRequest
from nanovllm.serving.streaming.engine_thread import EngineThread
from tests.support.replicas import OPTIONS, tiny_folder


def test_a_replica_whose_step_hangs_reports_its_death_and_ends_its_process(monkeypatch):
    sent, exits, may_end = queue.Queue(), queue.Queue(), threading.Event()
    monkeypatch.setattr(engine_process.os, "_exit", exits.put)  # leaves this process alive
    engine = build_engine(tiny_folder(), None, None, OPTIONS | {"step_timeout": 0.3})
    engine.observers.append(OnStep(lambda _: may_end.wait(60.0)))
    reporter = Reporter(engine, sent.put, sends_records=False, sends_block_events=False)
    thread = EngineThread(engine, reporter)
    request = SentRequest.from_new(NewRequest("hanging", [5, 6], SamplingParams(max_tokens=9)), 0, None)
    try:
        Intake(thread, reporter, engine.input_processor).handle(Add([request]))
        assert exits.get(timeout=60.0) == 1
        died = next(message for message in iter(lambda: sent.get(timeout=60.0), None) if isinstance(message, Died))
        assert "step_timeout" in died.message and "hanging" in died.message
    finally:
        may_end.set()
        thread._thread.join(60.0)


@pytest.mark.parametrize(("count", "step_timeout", "seconds"), [(1, 900.0, 900.0), (2, 900.0, 120.0), (2, 7.0, 7.0)])
def test_a_silent_replica_is_dead_after_step_timeout_and_earlier_where_another_takes_its_requests(
    count, step_timeout, seconds
):
    assert fleet.STALL_SECONDS == 120.0
    assert Fleet([None] * count, tiny_folder(), step_timeout=step_timeout)._stall_seconds == seconds
