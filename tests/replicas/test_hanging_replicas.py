"""An engine process whose step hangs ends itself, and one that says nothing at all is ended by its front."""

import os
import queue
import signal
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
from nanovllm.serving.server.engine_process import EngineProcessLLM
from nanovllm.serving.streaming.engine_thread import EngineThread
from tests.support.replicas import OPTIONS, one_engine, tiny_folder
from tests.support.serving import serving
from tests.support.tiny_models import random_prompts


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


@pytest.mark.full
def test_a_stream_goes_on_when_its_engine_says_nothing_any_more(monkeypatch):
    """The process is stopped as a whole, so its own watchdog is too."""
    prompt = random_prompts(1, low=30, high=30, seed=43)[0]
    params = {"seed": 5, "temperature": 0.9, "max_tokens": 150}
    expected = one_engine().generate(prompt, SamplingParams(**params, ignore_eos=True), use_tqdm=False)
    with serving(model=tiny_folder(), front_door=EngineProcessLLM, **OPTIONS) as running:
        monkeypatch.setattr(running.engine._engine_thread._engine._fleet, "_stall_seconds", 2.0)
        (before,) = running.engine.replicas()
        body = params | {"model": "tiny", "extra_body": {"ignore_eos": True}}
        texts = []
        for chunk in running.client().completions.create(prompt=prompt, stream=True, **body):
            texts.append(chunk.choices[0].text)
            if len(texts) == 5:
                os.kill(before.process_id, signal.SIGSTOP)
        assert "".join(texts) == expected[0].outputs[0].text
        (after,) = running.engine.replicas()
        assert after.num_restarts == 1 and after.process_id != before.process_id
