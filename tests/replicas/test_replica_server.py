"""The server over two replicas: streams, health, metrics, the live view, and the end."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from nanovllm import SamplingParams
from tests.support.llms import comes_true
from tests.support.prometheus import figures
from tests.support.replicas import REPLICAS, is_alive, one_engine, tiny_folder
from tests.support.serving import serving, streaming
from tests.support.tiny_models import random_prompts

pytestmark = pytest.mark.usefixtures("programs_are_forked")

PARAMS = SamplingParams(seed=5, temperature=0.9, max_tokens=60, ignore_eos=True)
BODY = {"model": "tiny", "seed": 5, "temperature": 0.9, "max_tokens": 60, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def servers():
    with contextlib.ExitStack() as stack:
        yield SimpleNamespace(stack=stack, last=None)


@pytest.fixture
def running(servers):
    """The server of this file: a new one if a test has ended the last."""
    if servers.last is None or not servers.last.thread.is_alive():
        server = serving({"drain_timeout": 60.0}, model=tiny_folder(), **REPLICAS)
        servers.last = servers.stack.enter_context(server)
    return servers.last


def expected(prompt, params=PARAMS):
    return one_engine().generate(prompt, params, use_tqdm=False)[0].outputs[0]


def states(running):
    return [replica["state"] for replica in running.get("/health").json().get("replicas", [])]


def texts_of(running, prompt):
    """The texts of a stream, as they come."""
    for chunk in running.client().completions.create(prompt=prompt, stream=True, **BODY):
        yield chunk.choices[0].text


@pytest.mark.full
def test_a_stream_goes_on_though_its_replica_is_killed_and_health_and_metrics_tell(running):
    prompt = random_prompts(1, low=30, high=30, seed=32)[0]
    comes_true(lambda: states(running) == ["up", "up"])
    before, texts = figures(running), []
    for text in texts_of(running, prompt):
        texts.append(text)
        if len(texts) == 20:
            dead = max(running.engine.replicas(), key=lambda replica: replica.num_running)
            os.kill(dead.process_id, signal.SIGKILL)
            comes_true(lambda: "restarting" in states(running))  # it may be up again before the stream ends
            assert running.get("/health").status_code == 200
    assert "".join(texts) == expected(prompt).text
    comes_true(lambda: states(running) == ["up", "up"])
    after = figures(running)
    assert running.get("/metrics").text.count("# TYPE nanovllm:replica_") == 4
    for index in (0, 1):
        assert after[f"replica_up{{replica={index}}}"] == 1
        assert after[f"replica_restarts_total{{replica={index}}}"] == (index == dead.index)
    assert after["generation_tokens_total"] - before["generation_tokens_total"] >= 60
    assert after["time_to_first_token_seconds_count"] - before["time_to_first_token_seconds_count"] == 1


async def test_calls_between_requests_are_answered_at_once(running):
    """The thread that watches idle replicas wakes up for them."""
    comes_true(running.is_idle)

    clock = asyncio.get_running_loop().time
    await asyncio.sleep(0.8)  # idle work has begun
    begin = clock()
    for _ in range(20):
        await running.engine.stats()
    assert clock() - begin < 1.0


async def test_an_abort_ends_a_stream_with_what_it_has(running):
    prompt = random_prompts(1, seed=34)[0]
    outputs = []
    async for output in running.engine.generate(prompt, PARAMS, request_id="mine"):
        outputs.append(output)
        if len(outputs) == 5:
            assert await running.engine.abort("mine")
    assert not await running.engine.abort("mine")
    last = outputs[-1].outputs[0]
    assert last.finish_reason == "abort" and expected(prompt).token_ids[: len(last.token_ids)] == last.token_ids
    comes_true(running.is_idle, 10.0)  # with what its last steps in flight have released


def test_the_live_view_shows_the_requests_of_all_replicas(running):
    body = {"prompt": [3, 4], "max_tokens": 480, "ignore_eos": True}
    with streaming(running, body, 4), running.http() as http, http.stream("GET", "/ui/events") as events:
        for line in events.iter_lines():
            data = json.loads(line[6:]) if line.startswith("data: ") else {}
            if data.get("running") == 4 and len(data["requests"]) == 4 and data["steps"]:
                break
        assert data["pool"]["total"][2] >= 0 and sum(data["pool"]["total"]) == 2 * 128


def test_health_tells_index_state_and_restarts_of_each_replica(running):
    shown = running.get("/health").json()["replicas"]
    assert [list(replica) for replica in shown] == [["index", "state", "restarts"]] * 2


@pytest.mark.full
def test_every_line_of_a_server_with_replicas_and_json_logs_is_an_object_of_one_form():
    code = "import sys; from nanovllm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["--log-format", "json", "--port", "0", "--data-parallel-size", "2", "--max-model-len", "128"]
    arguments += ["--enforce-eager", "--attention-backend", "sdpa", "--model", tiny_folder()]
    command = [sys.executable, "-c", code, "serve", *arguments]
    lines = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            lines.append(line)
            if "running on" in line:
                process.send_signal(signal.SIGINT)
    found = [json.loads(line) for line in lines]
    assert process.returncode == 0 and {line.get("replica") for line in found} == {None, 0, 1}
    assert all(list(line)[:4] == ["time", "level", "logger", "message"] for line in found)


@pytest.mark.full
def test_health_is_503_while_no_replica_is_up_and_a_stop_drains(running):
    prompt, texts, engine = random_prompts(1, seed=35)[0], [], running.engine
    comes_true(lambda: states(running) == ["up", "up"])
    for replica in engine.replicas():
        os.kill(replica.process_id, signal.SIGKILL)
    comes_true(lambda: running.get("/health").status_code == 503)
    assert running.get("/health").json()["error"]["code"] == "no_replica"
    reader = threading.Thread(target=lambda: texts.extend(texts_of(running, prompt)))
    reader.start()
    comes_true(lambda: len(texts) > 3)  # they were started again, and the request waited
    ids = [replica.process_id for replica in engine.replicas()]
    assert running.stop() == 0
    reader.join()
    assert "".join(texts) == expected(prompt).text
    comes_true(lambda: not any(map(is_alive, ids)))
