"""Clients that leave or do not read, full queues, a nearly full pool, shutdown, a dead engine."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from nanovllm import SamplingParams
from nanovllm.cli.main import main
from nanovllm.errors import DeviceError
from nanovllm.features.groups.block_checks import check_scheduler
from nanovllm.features.intake.intake import checkpoint
from nanovllm.model_runner import ModelRunner
from tests.support.async_llms import in_engine_steps, offline
from tests.support.command_line import words
from tests.support.forked_processes import programs_are_forked
from tests.support.llms import comes_true
from tests.support.prometheus import figures
from tests.support.serving import MODEL, raw_stream, serving, streaming
from tests.support.tiny_models import save_tiny

ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 500, "temperature": 0}
SHORT = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0}


ANSWERS = "/v1/completions"


def watch_steps(running, monkeypatch, before):
    in_engine_steps(running.engine, monkeypatch, lambda _: before())


def take_longer(running, monkeypatch, seconds):
    watch_steps(running, monkeypatch, lambda: time.sleep(seconds))


def fails_with(error):
    def fail():
        raise error

    return fail


def answers_as_ever(running):
    answer = running.post(ANSWERS, SHORT | {"return_token_ids": True}).json()
    return answer["choices"][0]["token_ids"] == offline_tokens(SHORT)


def num_queued(running):
    stats = running.stats()
    return stats.num_running + stats.num_waiting


def parse_events(answer):
    return [line.removeprefix("data: ") for line in answer.iter_lines() if is_data(line)]


# ------------------------------------------------------------------------------------------------------------- clients


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_within_a_step_has_no_block_behind_it(monkeypatch, stream):
    may_go_on, is_held = threading.Event(), threading.Event()
    may_go_on.set()

    def wait():
        time.sleep(0.01)  # no answer ends by itself before its step is held
        if not may_go_on.is_set():
            is_held.set()
            may_go_on.wait(30.0)

    with serving() as running:
        watch_steps(running, monkeypatch, wait)
        connections = [raw_stream(running, ENDLESS | {"stream": stream, "logprobs": 1}) for _ in range(3)]
        comes_true(lambda: running.stats().num_running == 3)
        may_go_on.clear()
        assert is_held.wait(30.0)
        for connection in connections:
            connection.close()
        comes_true(lambda: running.app.state.server.admission.num_open == 0)
        may_go_on.set()
        assert running.is_idle()  # between the held step and the next
        assert running.stats().num_steps < 500  # the answers did not end by themselves


def test_a_client_that_leaves_while_it_waits_in_the_queue_is_forgotten(monkeypatch):
    with serving(max_num_seqs=1) as running:
        take_longer(running, monkeypatch, 0.02)
        with streaming(running, ENDLESS):
            second = raw_stream(running, ENDLESS)
            comes_true(lambda: running.stats().num_waiting == 1)
            second.close()
            comes_true(lambda: running.stats().num_waiting == 0)
            assert running.stats().num_running == 1


@pytest.mark.parametrize("stream", [True, False])
def test_the_prompt_of_a_client_that_leaves_is_prepared_no_further(monkeypatch, stream):
    begun = threading.Event()

    def endless(*_, **__):
        begun.set()
        while True:
            checkpoint()

    with serving() as running:
        monkeypatch.setattr(running.engine._input_processor, "process_each", endless)
        lane = running.engine._intake.short
        connections = [raw_stream(running, {"prompt": "the sea", "stream": stream}) for _ in range(3)]
        assert begun.wait(30.0)
        comes_true(lambda: len(lane.tasks()) == 3)
        for connection in connections:
            connection.close()
        comes_true(lambda: not lane.tasks())


@pytest.mark.full
def test_a_client_that_stops_reading_delays_no_other_and_loses_nothing(monkeypatch):
    logprobs = {"logprobs": 5, "max_tokens": 450, "ignore_eos": True}
    with serving(send_buffer=4096) as running:
        slow = raw_stream_with_small_buffer(running, ENDLESS | logprobs)
        for _ in range(5):
            assert answers_as_ever(running)
        comes_true(running.is_idle)  # nor did the engine wait for it
        received = read_to_end(slow)
    assert received.count(b"data: ") < 400  # chunks held several tokens
    lines = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    tokens = [t for line in lines for t in json.loads(line[6:])["choices"][0]["token_ids"]]
    assert tokens == offline_tokens(ENDLESS | {"max_tokens": 450})


WORDY = ENDLESS | {"ignore_eos": True, "logprobs": 20}


def test_a_client_that_never_reads_is_cut_off_and_its_request_ends_as_if_it_had_left(monkeypatch):
    with serving({"send_timeout": 0.2}, send_buffer=4096, max_model_len=2048) as running:
        take_longer(running, monkeypatch, 0.002)
        connection = raw_stream_with_small_buffer(running, WORDY | {"max_tokens": 2000})
        comes_true(lambda: running.stats().num_running == 1)
        comes_true(lambda: running.is_idle() and not running.server.server_state.connections)
        assert running.stats().num_steps < 2000  # it was cut off before its end
        assert running.app.state.server.admission.num_open == 0
        assert outcomes(running) == {"abort": 1}
        with contextlib.suppress(ConnectionResetError):
            assert b"[DONE]" not in read_to_end(connection)


@pytest.mark.full
def test_a_client_that_reads_slowly_but_reads_is_not_cut_off(monkeypatch):
    with serving({"send_timeout": 1.0}, send_buffer=4096) as running:
        connection = raw_stream_with_small_buffer(running, WORDY)
        received = b""
        while b"[DONE]" not in received:
            time.sleep(0.01)
            received += connection.recv(4096)
        connection.close()
        assert outcomes(running) == {"length": 1}


def outcomes(running):
    """Return the finished requests by reason, from /metrics."""
    begin = "request_success_total{finished_reason="
    return {name.removeprefix(begin)[:-1]: n for name, n in figures(running).items() if name.startswith(begin)}


KEPT_ALIVE = {"keep_alive_interval": 0.03}


def test_a_stream_that_waits_is_kept_alive_by_comments_that_the_official_client_skips(monkeypatch):
    body = SHORT | {"max_tokens": 4}
    with serving(KEPT_ALIVE) as running, running.client() as client:
        take_longer(running, monkeypatch, 0.15)
        first, *events = running.post(ANSWERS, body | {"stream": True}).text.split("\n\n")
        first_data = next(number for number, event in enumerate(events) if is_data(event))
        assert first == ": keep-alive" and ": keep-alive" in events[first_data:]
        assert {event[:12] for event in events} == {": keep-alive", 'data: {"id":', "data: [DONE]", ""}
        chunks = client.completions.create(model=MODEL, stream=True, extra_body={"return_token_ids": True}, **body)
        assert [t for chunk in chunks for t in chunk.choices[0].token_ids] == offline_tokens(body)


def is_data(event):
    return event.startswith("data: ")


def test_what_fails_after_a_comment_is_the_last_event(monkeypatch):
    may_fail = threading.Event()

    def fail():
        may_fail.wait(30.0)
        raise RuntimeError("in /secret/place.py")

    with serving(KEPT_ALIVE) as running, running.client() as client:
        watch_steps(running, monkeypatch, fail)
        stream = client.completions.create(model=MODEL, prompt=[5], stream=True)  # returns at the first comment
        may_fail.set()
        with pytest.raises(openai.APIError) as failed:
            list(stream)
    assert failed.value.code == "request_failed"


def test_a_refusal_keeps_its_status_however_long_it_took(monkeypatch):
    may_prepare = threading.Event()
    with serving(KEPT_ALIVE, max_num_seqs=4, max_queue=0) as running:
        take_longer(running, monkeypatch, 0.005)
        others = raw_stream(running, ENDLESS | {"n": 4, "temperature": 1, "ignore_eos": True})
        comes_true(lambda: running.stats().num_running == 4)
        monkeypatch.setattr(running.engine, "_look_at_queue", lambda _: None)  # there was room when they arrived
        running.engine._intake.submit(lambda: may_prepare.wait(30.0), 0)
        with ThreadPoolExecutor(2) as threads:
            bodies = [ENDLESS | {"prompt": prompt, "stream": True} for prompt in ([5], [10**6])]
            refused = [threads.submit(running.post, "/v1/completions", json=body) for body in bodies]
            comes_true(lambda: running.app.state.server.admission.num_open == 3)
            time.sleep(0.1)  # comments would be due
            may_prepare.set()
            assert [future.result().status_code for future in refused] == [429, 400]
        others.close()


def raw_stream_with_small_buffer(running, body):
    """`raw_stream` with a small receive buffer, so that the server soon blocks."""
    data = json.dumps(body | {"stream": True, "return_token_ids": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(running.address)
    connection.sendall(head.encode() + data)
    return connection


def offline_tokens(body):
    params = SamplingParams(**{name: value for name, value in body.items() if name in ("max_tokens", "temperature")})
    return offline().generate([body["prompt"]], params, use_tqdm=False)[0].outputs[0].token_ids


# -------------------------------------------------------------------------------------------------------------- limits


def test_a_full_queue_is_429_with_the_time_to_wait_and_changes_nothing(monkeypatch):
    with serving(max_num_seqs=1, max_queue=1) as running:
        take_longer(running, monkeypatch, 0.02)
        with streaming(running, ENDLESS, 2, running_at_once=1), running.client() as client:
            comes_true(lambda: num_queued(running) == 2)
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError) as refused:
                    client.completions.create(model=MODEL, prompt="x", stream=stream)
                assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
                assert (refused.value.code, refused.value.type) == ("queue_full", "rate_limit_error")
        assert answers_as_ever(running)


def test_prompts_of_one_request_of_which_the_queue_takes_only_some_leave_nothing_behind(monkeypatch):
    with serving(max_num_seqs=2, max_queue=2) as running:
        take_longer(running, monkeypatch, 0.02)
        with streaming(running, ENDLESS | {"ignore_eos": True}):
            for stream in (False, True):
                assert running.error(ANSWERS, ENDLESS, {"prompt": [[5], [6], [7], [8]], "stream": stream}, status=429)
                assert num_queued(running) == 1


def tokenize_slowly(running, monkeypatch, seconds, before=None):
    """Let each prompt take so long, or those that are not `before`."""
    tokenize = running.engine._input_processor.tokenize

    def slowly(prompt, **options):
        if prompt != before:
            time.sleep(seconds)
        return tokenize(prompt, **options)

    monkeypatch.setattr(running.engine._input_processor, "tokenize", slowly)


def test_prompts_of_requests_that_race_for_the_queue_are_admitted_together_or_refused_together(monkeypatch):
    with serving(max_num_seqs=7, max_queue=0) as running, ThreadPoolExecutor(4) as threads:
        take_longer(running, monkeypatch, 0.002)
        tokenize_slowly(running, monkeypatch, 0.03)  # steps run between two prompts
        body = ENDLESS | {"prompt": [[5], [6], [7]], "stream": True, "ignore_eos": True, "timeout": 0.8}
        answers = list(threads.map(lambda _: running.post(ANSWERS, body), range(4)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]
        for answer in answers:
            if answer.status_code == 200:
                assert ("error" in answer.text, answer.text.endswith("data: [DONE]\n\n")) == (False, True)
            else:
                assert answer.json()["error"]["code"] == "queue_full"
        assert running.is_idle()


def test_what_no_queue_will_ever_take_is_bad_input():
    with serving(max_num_seqs=2, max_queue=2) as running:
        for body in ('{"n": 6}', '{"n": 3, "prompt": [[5], [6]]}'):
            running.refuses(ANSWERS, "n", "at most 4", SHORT, body)
        assert running.answer(ANSWERS, SHORT, '{"n": 4, "temperature": 1}')


def test_what_waits_to_be_tokenised_is_bounded_as_the_queue_is():
    may_go_on = threading.Event()
    with serving(max_num_seqs=1, max_queue=0) as running:
        admission = running.app.state.server.admission
        try:
            running.engine._intake.submit(may_go_on.wait, 30.0)
            connections = [raw_stream(running, {"prompt": "x"}) for _ in range(2)]
            comes_true(lambda: admission.num_open == 2)
            for path in (ANSWERS, "/tokenize"):
                assert running.error(path, {"prompt": "x"}, status=429)["code"] == "queue_full"
        finally:
            may_go_on.set()
        for connection in connections:
            connection.close()
        comes_true(lambda: admission.num_open == 0)


def test_a_bad_prompt_among_several_is_refused_before_any_stream_begins(monkeypatch):
    with serving() as running:
        tokenize_slowly(running, monkeypatch, 0.5, before="x")  # the first prompt's answer could begin
        error = running.error(ANSWERS, {"prompt": ["x", "no " * 2000], "stream": True})
        assert error["code"] == "context_length_exceeded" and error["message"].startswith("prompt 1: ")
        assert running.stats().num_steps == 0


def test_a_timeout_ends_an_answer_with_what_there_is_of_it(monkeypatch):
    with serving({"request_timeout": 0.5}) as running:
        take_longer(running, monkeypatch, 0.02)
        (whole,) = running.answer(ANSWERS, ENDLESS)["choices"]
        *_, last, done = parse_events(running.post(ANSWERS, ENDLESS | {"stream": True, "timeout": 0.2}))
        for choice in (whole, *json.loads(last)["choices"]):
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")
        assert done == "[DONE]" and running.is_idle()


@pytest.mark.full
async def test_a_storm_on_a_nearly_full_pool_loses_no_answer_and_leaks_no_block():
    """Forty-five clients on a pool with room for about three; a third of them disconnect."""
    prompts = [[5 + number, 6, 7] * 20 for number in range(45)]
    params = [SamplingParams(seed=number, max_tokens=40) for number in range(45)]
    wanted = await asyncio.to_thread(offline().generate, prompts, params, use_tqdm=False)
    with serving(num_kv_blocks=34, max_num_seqs=16) as running:
        async with running.async_client() as client:

            async def tokens(number):
                stream = await client.completions.create(
                    model=MODEL, prompt=prompts[number], seed=number, max_tokens=40, stream=True,
                    extra_body={"return_token_ids": True},
                )  # fmt: skip
                got = []
                async for chunk in stream:
                    got += chunk.choices[0].token_ids
                    if number % 3 == 0 and len(got) > number % 20:
                        await stream.close()
                        return None
                return got

            answers = await asyncio.gather(*map(tokens, range(45)))
        for number, (answer, output) in enumerate(zip(answers, wanted, strict=True)):
            assert answer == (None if number % 3 == 0 else output.outputs[0].token_ids)
        await asyncio.to_thread(comes_true, running.is_idle)
        stats = await running.engine.stats()
        assert stats.num_preemptions > 0
        await running.engine._run(lambda engine: check_scheduler(engine.scheduler))


# ---------------------------------------------------------------------------------------------------------- the engine


@pytest.mark.parametrize("reason", ["in /secret/place.py", "no token is left to draw, says a driver"])
def test_a_request_that_fails_in_the_engine_is_an_error_without_its_reason_and_the_server_goes_on(monkeypatch, reason):
    """Its words do not make it the client's error, whose status depends on the output's kind."""
    with serving() as running:
        with monkeypatch.context() as patch:
            watch_steps(running, patch, fails_with(RuntimeError(reason)))
            for stream in (False, True):
                error = running.error(ANSWERS, SHORT, {"stream": stream}, status=500)
                assert error["code"] == "request_failed" and reason not in error["message"]
        assert answers_as_ever(running)


def test_a_request_that_fails_in_mid_stream_ends_with_an_error_event(monkeypatch):
    with serving() as running:
        steps = iter(range(6))

        def fail_later():
            if next(steps, None) is None:
                raise RuntimeError("in /secret/place.py")

        watch_steps(running, monkeypatch, fail_later)
        answer = running.post(ANSWERS, ENDLESS | {"stream": True})
        *chunks, last = parse_events(answer)
        assert (answer.status_code, json.loads(last)["error"]["code"]) == (200, "request_failed")
        assert chunks and all("choices" in json.loads(chunk) for chunk in chunks)
        assert "secret" not in last


def test_when_the_engine_dies_every_client_gets_an_error_health_is_503_and_the_exit_code_is_1(monkeypatch):
    with serving() as running:
        take_longer(running, monkeypatch, 0.02)
        connections = [raw_stream(running, ENDLESS) for _ in range(3)]
        waiting = raw_stream(running, ENDLESS | {"stream": False})
        comes_true(lambda: running.stats().num_running == 4)
        comes_true(lambda: running.stats().num_steps > 8)

        watch_steps(running, monkeypatch, fails_with(DeviceError("device at /secret/place")))
        comes_true(lambda: running.engine.is_dead)
        assert running.get("/health").status_code == 503
        assert running.error(ANSWERS, SHORT, status=503)["code"] == "engine_dead"
        assert running.get("/metrics").status_code == 200
        for connection in connections:
            received = read_to_end(connection)
            assert b'"code":"engine_dead"' in received.split(b"data: ")[-1] and b"secret" not in received
        received = read_to_end(waiting)
        assert received.startswith(b"HTTP/1.1 503") and b"secret" not in received
        running.thread.join(30.0)
        assert running.server.exit_code == 1


def test_a_step_that_hangs_ends_its_answers_turns_health_to_503_and_the_server_exits_with_1(monkeypatch):
    holds, may_end = threading.Event(), threading.Event()

    def hang():
        holds.set()
        may_end.wait(60.0)

    with serving(step_timeout=0.3) as running:
        watch_steps(running, monkeypatch, hang)
        connection = raw_stream(running, ENDLESS)
        assert holds.wait(30.0)
        comes_true(lambda: running.engine.is_dead)
        health = running.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
        assert b"engine_dead" in read_to_end(connection)
        running.thread.join(30.0)  # though the step hangs
        assert (running.thread.is_alive(), running.server.exit_code, may_end.is_set()) == (False, 1, False)
        may_end.set()
        comes_true(lambda: not running.engine._engine_thread._thread.is_alive())


def read_to_end(connection):
    """Read until the server closes or sends no more."""
    connection.settimeout(30.0)
    received = b""
    while data := connection.recv(65536):
        received += data
    connection.close()
    return received


# ------------------------------------------------------------------------------------------------------------ stopping


def test_a_server_that_drains_ends_open_answers_and_takes_no_new_ones(monkeypatch):
    with serving({"drain_timeout": 30.0}) as running:
        take_longer(running, monkeypatch, 0.02)
        open_answer = raw_stream(running, ENDLESS | {"max_tokens": 40})
        comes_true(lambda: running.stats().num_running == 1)
        running.server.handle_exit(signal.SIGTERM, None)
        assert running.get("/health").status_code == 503
        refused = running.post(ANSWERS, SHORT)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert "retry-after" in refused.headers
        assert b"data: [DONE]" in read_to_end(open_answer)
        running.thread.join(30.0)
        assert (running.thread.is_alive(), running.server.exit_code) == (False, 0)


@pytest.mark.full
@programs_are_forked()
def test_a_process_that_gets_a_signal_cuts_off_answers_that_do_not_end_and_exits_with_0(tmp_path):
    line = f"-m nanovllm.cli serve --model {save_tiny(tmp_path / 'tiny')} --port 0 --drain-timeout 0.3 --enforce-eager"
    command = [sys.executable, *words(f"{line} --block-size 16 --num-kv-blocks 129 --max-model-len 2048")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        url = next(url_in(line) for line in process.stderr if "running on" in line)
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
        body = ENDLESS | {"max_tokens": 2000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60.0) as answer:
            lines = filter(None, answer.iter_lines())
            next(lines)
            process.send_signal(signal.SIGTERM)
            *_, last = lines
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert process.wait(30.0) == 0
    finally:
        process.kill()
        process.stderr.close()


def url_in(log):
    return log.split("running on ")[1].split(" ")[0]


def test_a_command_whose_engine_dies_ends_with_1(tmp_path, monkeypatch, caplog):
    steps, execute = iter(range(10)), ModelRunner.execute

    def dying(self, batch):
        if next(steps, None) is None:
            raise DeviceError("gone")
        return execute(self, batch)

    monkeypatch.setattr(ModelRunner, "execute", dying)
    line = f"serve --model {save_tiny(tmp_path / 'tiny')} --port 0 --enforce-eager --block-size 16"
    line += " --num-kv-blocks 129 --itl-goal none"
    statuses = []
    command = threading.Thread(target=lambda: statuses.append(main(words(line))))
    command.start()
    comes_true(lambda: "running on" in caplog.text)
    answer = httpx.post(f"{url_in(caplog.text)}/v1/completions", json=ENDLESS, timeout=60.0)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    command.join(60.0)
    assert statuses == [1]
