"""Health and refusals: figures at once, a stall by its name, and Retry-After."""

import asyncio
import gc
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from nanovllm.observability.step_records import OnStep
from nanovllm.serving.server import app
from nanovllm.serving.server.retry_after import MAX_SECONDS, RetryAfter, estimated_wait
from nanovllm.serving.server.settings import ServerSettings
from tests.support.async_llms import OPTIONS, slow_steps
from tests.support.llms import comes_true
from tests.support.prometheus import figures
from tests.support.serving import raw_stream, serving, streaming
from tests.support.tiny_models import save_tiny

ENDLESS = {"prompt": [3, 4], "max_tokens": 400, "ignore_eos": True}


@contextmanager
def held_step(running):
    """Hold a step of a running request within the block."""
    holds, may_go_on = threading.Event(), threading.Event()

    def hold(_):
        holds.set()
        may_go_on.wait(60.0)

    running.engine.observers.append(OnStep(hold))
    connection = raw_stream(running, ENDLESS)
    try:
        assert holds.wait(60.0)
        yield
    finally:
        may_go_on.set()
        connection.close()


def test_no_collection_goes_through_what_a_server_has_loaded_and_its_threads_take_short_turns(monkeypatch, tmp_path):
    """Either holds up /health and all streams: one collection for 0.3 s, turns of 5 ms for each call of a step."""
    found = []

    class Unserved:
        exit_code = 0

        def __init__(self, _, engine, __):
            self._engine = engine

        def run(self, _):
            found.append((gc.get_freeze_count(), sys.getswitchinterval()))
            asyncio.run(self._engine.close())

    save_tiny(tmp_path)
    monkeypatch.setattr(app, "build_server", Unserved)
    before = sys.getswitchinterval()
    try:
        assert app.serve(str(tmp_path), None, ServerSettings(port=0), dict(OPTIONS), []) == 0
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before)
    ((num_frozen, seconds),) = found
    assert num_frozen > 100_000  # objects of torch and transformers alone
    assert seconds == pytest.approx(app.SWITCH_SECONDS) and seconds < before


def test_a_step_that_does_not_end_is_unhealthy_and_health_comes_back_with_the_next():
    with serving({"stall_timeout": 0.2}) as running:
        assert running.get("/health").status_code == 200
        with held_step(running):
            comes_true(lambda: running.get("/health").status_code == 503)
            error = running.get("/health").json()["error"]
            assert error["code"] == "engine_stalled"
            assert "no step has ended" in error["message"] and "--stall-timeout" in error["message"]
            found = figures(running)  # which do not wait for the step
            assert found["engine_stalled"] == 1 and "num_requests_running" in found
            comes_true(lambda: figures(running)["engine_step_age_seconds"] > found["engine_step_age_seconds"] > 0)
        comes_true(running.is_idle)
        comes_true(lambda: running.get("/health").status_code == 200)
        found = figures(running)
        assert (found["engine_stalled"], found["engine_step_age_seconds"]) == (0, 0)


def test_an_idle_engine_does_not_stall():
    with serving({"stall_timeout": 0.01}) as running:
        assert running.post("/v1/completions", ENDLESS | {"max_tokens": 1}).status_code == 200
        comes_true(lambda: running.engine.heartbeat().age == 0.0)
        time.sleep(0.05)
        assert running.get("/health").status_code == 200


def test_figures_are_there_after_the_engine_has_died(monkeypatch):
    with serving() as running:
        assert running.post("/v1/completions", ENDLESS | {"max_tokens": 2}).status_code == 200
        before = figures(running)
        monkeypatch.setattr(running.engine._engine_thread._engine, "step", lambda: 1 / 0)
        running.post("/v1/completions", ENDLESS)
        assert running.engine.is_dead
        assert figures(running)["steps_total"] == before["steps_total"]


# ------------------------------------------------------------------------------------------------------- retry-after


@pytest.mark.parametrize(
    "num_waiting, num_ended, seconds, expected",
    [
        (0, 0, 0.0, 1.0),
        (10, 30, 30.0, 10.0),
        (20, 30, 30.0, 20.0),
        (10, 300, 30.0, 1.0),
        (10, 3, 30.0, 60.0),
        (5, 0, 0.2, 5.0),
        (5, 0, 30.0, 60.0),
        (1000, 1, 1.0, 60.0),
    ],
)
def test_the_wait_is_that_of_the_queue_at_the_rate_at_which_requests_end(num_waiting, num_ended, seconds, expected):
    assert estimated_wait(num_waiting, num_ended, seconds) == expected


def test_clients_that_are_refused_together_do_not_come_again_together():
    now = 100.0
    retry = RetryAfter(clock=lambda: now)
    now = 110.0
    for _ in range(5):  # one per two seconds
        retry.record_ended(1)
    assert [retry.seconds(4) for _ in range(5)] == [8, 10, 12, 14, 16]
    assert max(retry.seconds(4) for _ in range(100)) == MAX_SECONDS
    now = 500.0  # earlier ends are outside the window
    retry.record_busy()
    assert retry.seconds(4) == 4


@pytest.mark.parametrize("max_queue", [3, 12])
def test_the_time_to_wait_grows_with_the_queue(max_queue):
    with serving(max_num_seqs=1, max_queue=max_queue, max_model_len=2048) as running, slow_steps(running.engine):
        running.app.state.server.admission.retry_after = RetryAfter(clock=lambda: 0.0)
        body = ENDLESS | {"max_tokens": 2000}
        with streaming(running, body, 1 + max_queue, running_at_once=1):
            comes_true(lambda: running.stats().num_waiting == max_queue)
            answer = running.post("/v1/completions", body)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, str(max_queue))
