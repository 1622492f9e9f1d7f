"""A server's record of its requests: what it holds, what survives a kill, and that the tools read it."""

import json
import re
import threading
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import Mock

import pytest

from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.outputs import CompletionOutput, OutputKind, RequestMetrics, RequestOutput
from nanovllm.sequence import NewRequest
from nanovllm.serving.server import recorder as module
from nanovllm.serving.server.recorder import Recorder, prefix_hashes
from nanovllm.serving.server.settings import ServerSettings
from nanovllm.serving.streaming.streams import OutputRouter, Stream
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.tools.workloads.files import read_trace
from tests.support.async_llms import slow_steps
from tests.support.llms import comes_true
from tests.support.serving import raw_stream, serving
from tests.support.sweeps import CALIBRATION, COST

ENDLESS = {"max_tokens": 2000, "ignore_eos": True}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def recording(path, **options):
    """A recorder, which has written all at the end of the block."""
    recorder = Recorder(path, **options)
    yield recorder
    recorder.close()


def ended(length, arrival=0.0, **options):
    """A request of `length` prompt tokens that got three tokens."""
    request = NewRequest("r", list(range(length)), SamplingParams(), arrival_time=arrival, **options)
    metrics = RequestMetrics(arrival, num_prompt_tokens=length, num_output_tokens=3)
    completion = CompletionOutput(0, "abc", [1, 2, 3], "length", None)
    return request, RequestOutput("r", None, request.prompt_token_ids, [completion], True, 0, metrics)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The record of two prompts with a common prefix, one of them streamed and with two samples; of clients that left
    before and after tokens; of a request that ran out of time."""
    path = tmp_path_factory.mktemp("record") / "yesterday.jsonl"
    shared = list(range(20, 148))
    with serving({"record": str(path)}, max_model_len=2048) as running:
        first = {"prompt": [*shared, 5, 6], "max_tokens": 4}
        second = {"prompt": [*shared, 7], "max_tokens": 3, "n": 2, "stream": True, "priority": 4}
        for body in (first, second):
            assert running.post("/v1/completions", ENDLESS | body).status_code == 200
        for stream in (True, False):
            before = running.stats().num_output_tokens
            left = ENDLESS | {"prompt": [3, 4], "stream": stream}
            with slow_steps(running.engine):
                connection = raw_stream(running, left)
                comes_true(lambda before=before: running.stats().num_output_tokens > before + 2)
                connection.close()
                comes_true(running.is_idle)
        running.answer("/v1/completions", ENDLESS, '{"prompt": [9], "timeout": 0.05}')
        running.error("/v1/completions", '{"prompt": [1], "n": 0}')  # never queued
        recorder = running.app.state.recorder
        comes_true(lambda: recorder.num_recorded == 5)
    recorder.close()
    return path


def test_a_line_has_arrival_lengths_and_hashes_and_no_token(recorded):
    first, second, *_ = lines(recorded)
    assert set(first) == {"arrival", "prompt_tokens", "output_tokens", "block_tokens", "hash_ids", "ended"}
    assert (first["prompt_tokens"], first["output_tokens"], first["ended"]) == (130, 4, "length")
    assert (second["prompt_tokens"], second["output_tokens"], second["n"], second["priority"]) == (129, 6, 2, 4)
    assert first["hash_ids"][:2] == second["hash_ids"][:2] and first["hash_ids"][2] != second["hash_ids"][2]
    assert 0.0 < second["arrival"] - first["arrival"] < 60.0


def test_requests_whose_clients_left_are_recorded_as_such_with_the_tokens_that_they_got(recorded):
    for line in lines(recorded)[2:4]:
        assert line["ended"] == "abort" and 2 < line["output_tokens"] < 2000
    assert lines(recorded)[4]["ended"] == "timeout"


def test_the_record_is_a_workload_with_the_prefixes_that_were_shared(recorded, caplog):
    workload = read_trace(recorded)
    assert "of 5 requests did not end by themselves: 2 abort, 1 timeout" in caplog.text
    assert [len(r.prompt_token_ids) for r in workload.requests] == [130, 129, 129, 2, 2, 1]  # a request a sample
    assert [r.num_output_tokens for r in workload.requests][:3] == [4, 3, 3]
    assert workload.is_timed and workload.requests[0].arrival == 0.0 and workload.requests[1].priority == 4
    short = [replace(request, num_output_tokens=2) for request in workload.requests]
    config = CALIBRATION.resolve(EngineConfig(block_size=16))
    figures = simulate(replace(workload, requests=short), config, COST).figures()
    assert figures["cached_tokens"] == 2 * 128


def test_prefixes_count_as_shared_within_one_salt_and_cannot_be_looked_up_without_the_key():
    tokens = list(range(200))
    hashes = prefix_hashes(tokens, "", b"key")
    assert len(hashes) == 4 and len(set(hashes)) == 4 and max(hashes) < 2**53
    assert prefix_hashes(tokens[:130], "", b"key")[:2] == hashes[:2]
    assert not set(hashes) & {*prefix_hashes(tokens, "a", b"key"), *prefix_hashes(tokens, "", b"other")}
    assert prefix_hashes([7, *tokens[1:]], "", b"key")[1] != hashes[1]  # equal blocks after different ones


def test_a_torn_last_line_is_left_out_by_readers_and_removed_by_the_next_server(tmp_path, caplog):
    path = tmp_path / "r.jsonl"
    with recording(path) as recorder:
        for arrival in (2.0, 1.0):  # in order of their ends
            recorder.record(*ended(5, arrival))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    workload = read_trace(path)
    assert [r.arrival for r in workload.requests] == [0.0, 1.0] and "the last line, 3, was torn" in caplog.text
    with recording(path) as recorder:
        recorder.record(*ended(6))
    assert path.read_bytes()[: len(whole)] == whole and len(lines(path)) == 3
    path.write_bytes(whole[:40] + b"\n" + whole)  # not at the end: no accident
    with pytest.raises(ValueError, match="line 1: not JSON"):
        read_trace(path)


@pytest.mark.parametrize("text", ["secret\n", '{"arrival": 0, "prompt": [1], "output_tokens": 1}\n', "no line"])
def test_a_file_of_something_else_is_refused_and_stays(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds something else"):
        Recorder(path)
    assert path.read_text() == text
    with pytest.raises(OSError, match="nowhere"):
        Recorder.check(tmp_path / "nowhere" / "r.jsonl")


def test_a_file_has_one_writer_at_a_time(tmp_path):
    path = tmp_path / "r.jsonl"
    one = Recorder(path, max_bytes=1)  # one line per file
    for _ in range(2):
        one.record(*ended(5))
    comes_true(lambda: one.num_recorded == 2)
    with pytest.raises(ValueError, match="another server writes"):
        Recorder(path)
    one.close()
    Recorder(path).close()


def test_a_full_file_is_renamed_and_begun_anew(tmp_path):
    path = tmp_path / "r.jsonl"
    with recording(path, max_bytes=300) as recorder:
        for _ in range(5):
            recorder.record(*ended(5))
    assert len(lines(path)) + len(lines(tmp_path / "r.jsonl.1")) in (3, 4) and path.stat().st_size <= 300
    assert len(read_trace(path).requests) == len(lines(path))
    with recording(tmp_path / "long.jsonl", max_bytes=10) as recorder:
        recorder.record(*ended(5))
    assert [file.name for file in tmp_path.glob("long*")] == ["long.jsonl"]  # an empty file is not renamed


def test_a_disk_that_is_slower_than_the_requests_costs_a_bounded_memory(tmp_path, caplog, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(module, "MAX_QUEUED_TOKENS", 3 * (5 + module.REQUEST_TOKENS))
    written = Recorder._write
    monkeypatch.setattr(Recorder, "_write", lambda self, line: (gate.wait(), written(self, line)))
    with recording(tmp_path / "r.jsonl") as recorder:
        for _ in range(20):
            recorder.record(*ended(5))
        gate.set()
    assert "the disk is too slow" in caplog.text
    left_out = int(re.search(r"(\d+) requests were left out", caplog.text)[1])
    assert left_out >= 16 and recorder.num_recorded + left_out == 20 and recorder._num_queued_tokens == 0


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("28")])
def test_a_disk_that_fails_ends_the_record_and_not_the_server(tmp_path, caplog, monkeypatch, error):
    with recording(tmp_path / "r.jsonl") as recorder:
        monkeypatch.setattr(module.os, "write", Mock(side_effect=error))
        recorder.record(*ended(5))
        recorder._thread.join(10.0)
        recorder.record(*ended(5))
    assert re.search("recording ends: .*28", caplog.text) and recorder.num_recorded == 0


def test_an_engine_that_dies_leaves_its_requests_as_errors(tmp_path):
    with recording(tmp_path / "r.jsonl") as recorder:
        recorder.record(ended(5)[0], None)
    (line,) = lines(tmp_path / "r.jsonl")
    assert (line["ended"], line["output_tokens"]) == ("error", 0)
    assert read_trace(tmp_path / "r.jsonl").requests[0].num_output_tokens == 1


def test_the_servers_option_is_checked():
    with pytest.raises(ValueError, match="record_max_bytes"):
        ServerSettings(record_max_bytes=0)
    with pytest.raises(TypeError, match="record"):
        ServerSettings(record="")


async def test_requests_that_are_open_when_the_engine_dies_end_once_and_a_listener_that_raises_is_dropped(caplog):
    told = []

    def fail(*_):
        raise RuntimeError("no room")

    router = OutputRouter()
    router.on_end += [fail, lambda request, output: told.append((request.request_id, output is None))]
    request, output = ended(3)
    for name in ("a", "b"):
        router.open(replace(request, request_id=name), Stream(OutputKind.FINAL))
    router.deliver([replace(output, request_id="a")])
    router.end(RuntimeError)
    router.record_end("b", None)
    assert told == [("a", False), ("b", True)] and caplog.text.count("it is not called again") == 1
