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

import numpy as np
import pytest

from nanovllm import OutputKind, SamplingParams
from nanovllm.features.scoring import scores
from tests.support.prometheus import figures
from tests.support.replicas import REPLICAS, is_alive, one_engine, tiny_folder
from tests.support.serving import comes_true, raw_stream, serving
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


def states(http):
    return [replica["state"] for replica in http.get("/health").json().get("replicas", [])]


def test_answers_are_those_of_one_engine(running):
    prompts = random_prompts(4, seed=31)
    answer = running.client().completions.create(prompt=prompts, **BODY)
    assert [choice.text for choice in answer.choices] == [expected(prompt).text for prompt in prompts]


def test_embeddings_and_scores_are_those_of_one_engine(running, monkeypatch):
    monkeypatch.setattr(scores, "ANSWERS", ("y", "n"))  # which the tiny tokenizer has tokens for
    texts = ["One two", "the lazy dog", "a quick fox"]
    with running.http() as http:
        embedded = http.post("/v1/embeddings", json={"input": texts}).json()["data"]
        ranked = http.post("/v1/rerank", json={"query": texts[0], "documents": texts[1:]}).json()["results"]
    own = one_engine().embed(texts, use_tqdm=False)
    for found, output in zip(embedded, own, strict=True):
        np.testing.assert_allclose(found["embedding"], output.embedding, atol=2e-3)
    own = one_engine().score(texts[0], texts[1:], use_tqdm=False)
    found = {result["index"]: result["relevance_score"] for result in ranked}
    assert [found[0], found[1]] == pytest.approx([output.score for output in own], abs=1e-4)


@pytest.mark.full
def test_a_stream_goes_on_though_its_replica_is_killed_and_health_and_metrics_tell(running):
    prompt = random_prompts(1, low=30, high=30, seed=32)[0]
    with running.http() as http:
        comes_true(lambda: states(http) == ["up", "up"])
        before, texts = figures(running), []
        for chunk in running.client().completions.create(prompt=prompt, stream=True, **BODY):
            texts.append(chunk.choices[0].text)
            if len(texts) == 20:
                dead = max(running.engine.replicas(), key=lambda replica: replica.num_running)
                os.kill(dead.process_id, signal.SIGKILL)
                comes_true(lambda: "restarting" in states(http))  # it may be up again before the stream ends
                assert http.get("/health").status_code == 200
        assert "".join(texts) == expected(prompt).text
        comes_true(lambda: states(http) == ["up", "up"])
        text = http.get("/metrics").text
    assert text.count("# TYPE nanovllm:replica_") == 4
    for index in (0, 1):
        count = 1 if index == dead.index else 0
        assert f'nanovllm:replica_up{{model_name="tiny",replica="{index}"}} 1.0' in text
        assert f'nanovllm:replica_restarts_total{{model_name="tiny",replica="{index}"}} {count}.0' in text
    after = figures(running)
    assert after["generation_tokens_total"] - before["generation_tokens_total"] >= 60
    assert after["time_to_first_token_seconds_count"] - before["time_to_first_token_seconds_count"] == 1


def test_a_client_that_leaves_frees_its_request(running):
    raw_stream(running, {"prompt": [3, 4], "max_tokens": 400, "ignore_eos": True}).close()
    comes_true(lambda: not running.engine._engine_thread._engine.requests)
    comes_true(running.is_idle)


def test_calls_between_requests_are_answered_at_once(running):
    """The thread that watches idle replicas wakes up for them."""
    comes_true(running.is_idle)

    async def stats():
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(0.8)  # idle work has begun
        begin = clock()
        for _ in range(20):
            await running.engine.stats()
        return clock() - begin

    assert asyncio.run(stats()) < 1.0


def test_async_streams_of_every_kind(running):
    prompt = random_prompts(1, seed=33)[0]
    whole = expected(prompt)

    async def read(kind):
        return [output async for output in running.engine.generate(prompt, PARAMS, output_kind=kind)]

    cumulative, deltas, final = (asyncio.run(read(kind)) for kind in OutputKind)
    assert (cumulative[-1].outputs[0].token_ids, cumulative[-1].outputs[0].text) == (whole.token_ids, whole.text)
    assert [t for delta in deltas for t in delta.outputs[0].token_ids] == whole.token_ids
    assert len(final) == 1 and final[0].outputs[0].text == whole.text
    assert final[0].prompt_token_ids == prompt


def test_an_abort_ends_a_stream_with_what_it_has(running):
    prompt = random_prompts(1, seed=34)[0]

    async def run():
        outputs = []
        async for output in running.engine.generate(prompt, PARAMS, request_id="mine"):
            outputs.append(output)
            if len(outputs) == 5:
                assert await running.engine.abort("mine")
        assert not await running.engine.abort("mine")
        return outputs[-1].outputs[0]

    last = asyncio.run(run())
    assert last.finish_reason == "abort" and expected(prompt).token_ids[: len(last.token_ids)] == last.token_ids
    comes_true(running.is_idle, 10.0)  # with what its last steps in flight have released


def test_the_live_view_shows_the_requests_of_all_replicas(running):
    streams = [raw_stream(running, {"prompt": [n, 4], "max_tokens": 480, "ignore_eos": True}) for n in range(4)]
    with running.http() as http, http.stream("GET", "/ui/events") as events:
        for line in events.iter_lines():
            data = json.loads(line[6:]) if line.startswith("data: ") else {}
            if data.get("running") == 4 and len(data["requests"]) == 4 and data["steps"]:
                break
        assert data["pool"]["total"][2] >= 0 and sum(data["pool"]["total"]) == 2 * 128
    for stream in streams:
        stream.close()


def test_health_tells_index_state_and_restarts_of_each_replica(running):
    with running.http() as http:
        shown = http.get("/health").json()["replicas"]
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
    with running.http() as http:
        comes_true(lambda: states(http) == ["up", "up"])
        for replica in engine.replicas():
            os.kill(replica.process_id, signal.SIGKILL)
        comes_true(lambda: http.get("/health").status_code == 503)
        assert http.get("/health").json()["error"]["code"] == "no_replica"

    def read():
        for chunk in running.client().completions.create(prompt=prompt, stream=True, **BODY):
            texts.append(chunk.choices[0].text)

    reader = threading.Thread(target=read)
    reader.start()
    comes_true(lambda: len(texts) > 3)  # they were started again, and the request waited
    ids = [replica.process_id for replica in engine.replicas()]
    assert running.stop() == 0
    reader.join()
    assert "".join(texts) == expected(prompt).text
    comes_true(lambda: not any(map(is_alive, ids)))
