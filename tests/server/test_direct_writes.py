"""Events written as outputs come, without a task's turn for each: all of them, in order, with either HTTP parser."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

import pytest

from nanovllm.core.outputs import CompletionOutput, OutputKind, RequestMetrics, RequestOutput
from nanovllm.server import connections
from nanovllm.server.httptools_connection import DirectWriter
from nanovllm.streaming.streams import OutputStream, Stream
from tests.support.async_llms import bounded, slow_steps
from tests.support.serving import raw_stream, serving

BODY = {"prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def output(token_id: int, *, request_id: str = "a", finished: bool = False) -> RequestOutput:
    completion = CompletionOutput(0, str(token_id), [token_id], "length" if finished else None, None)
    return RequestOutput(request_id, None, [1], [completion], finished, 0, RequestMetrics(0.0))


class Handed:
    """A stream whose outputs are handed over, and what became of it."""

    def __init__(self, *request_ids: str) -> None:
        self.stream = Stream(OutputKind.DELTA)
        self.outputs = OutputStream(self.stream, request_ids or ("a",), lambda *_: None)
        self.is_ready, self.handled = True, list[int]()

    def handle(self, output: RequestOutput) -> None:
        self.handled += output.outputs[0].token_ids
        if self.handled[-1] < 0:
            raise ValueError("it cannot be handled")

    def put(self, *outputs: RequestOutput) -> None:
        for each in outputs:
            self.stream.put(each)
        self.stream.wake()

    def begin(self) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.outputs.hand_over(self.handle, lambda: self.is_ready))


@bounded
async def test_outputs_are_handed_over_within_the_wake_up_and_the_iteration_takes_the_rest():
    handed = Handed()
    handed.stream.put(output(1))  # before it begins
    task = handed.begin()
    await asyncio.sleep(0)
    assert handed.handled == [1]
    for token_id in (2, 3):
        handed.put(output(token_id))
        assert handed.handled[-1] == token_id  # no turn of the loop in between
    handed.is_ready = False
    handed.put(output(4))
    handed.put(output(5))
    await task
    assert handed.handled == [1, 2, 3] and handed.stream.on_wake is None
    assert (await anext(handed.outputs)).outputs[0].token_ids == [4, 5]


@bounded
async def test_it_ends_with_the_last_of_several_requests():
    handed = Handed("a", "b")
    task = handed.begin()
    await asyncio.sleep(0)
    handed.put(output(1), output(2, request_id="b", finished=True))
    await asyncio.sleep(0)
    assert not task.done()
    handed.put(output(3, finished=True))
    await task
    assert handed.handled == [1, 2, 3]
    with pytest.raises(StopAsyncIteration):
        await anext(handed.outputs)


@bounded
@pytest.mark.parametrize("cause", ["handle", "refusal"])
async def test_errors_reach_who_hands_over(cause):
    handed = Handed()
    task = handed.begin()
    await asyncio.sleep(0)
    if cause == "handle":
        handed.put(output(-1))
    else:
        handed.stream.end(lambda: ValueError("the engine died"))
        handed.stream.wake()
    with pytest.raises(ValueError, match="it cannot be handled" if cause == "handle" else "the engine died"):
        await task
    assert handed.stream.on_wake is None


@bounded
async def test_a_reader_that_is_cancelled_is_handed_nothing_more():
    handed = Handed()
    task = handed.begin()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    handed.put(output(1))
    assert handed.handled == [] and (await anext(handed.outputs)).outputs[0].token_ids == [1]


def events_of(running: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    with running.http() as http, http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [{**json.loads(line), "id": "", "created": 0} for line in lines[:-1]]


SEVERAL = {"n": 2, "logprobs": 2, "temperature": 0.8, "seed": 1}


@pytest.mark.parametrize("more", [{}, SEVERAL, {"prompt": [[5, 6], [7, 8]]}, {"stop": "e"}])
def test_events_are_the_same_with_each_parser_and_nearly_all_are_written_directly(monkeypatch, more):
    written: list[bytes] = []
    write = DirectWriter.write

    def noted(self: DirectWriter, data: bytes) -> None:
        written.append(data)
        write(self, data)

    monkeypatch.setattr(DirectWriter, "write", noted)
    found = []
    for parser in ("httptools", "h11"):
        chosen = functools.partial(connections.protocol_class, name=parser)
        monkeypatch.setattr("nanovllm.server.app.protocol_class", chosen)
        written.clear()
        with serving() as running, slow_steps(running.engine, 0.005):
            found.append(events_of(running, BODY | more))
        assert len(written) >= (len(found[0]) // 3 if parser == "httptools" else 0)
        assert parser == "httptools" or not written
    texts = [joined_texts(events) for events in found]  # an event may have several tokens
    assert texts[0] == texts[1] and all(texts[0].values())


def joined_texts(events: list[dict[str, Any]]) -> dict[int, str]:
    joined: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    return joined


def test_parts_written_directly_are_chunks_of_the_body():
    with serving() as running:
        connection = raw_stream(running, BODY)
        connection.settimeout(30.0)
        received = b""
        while b"0\r\n\r\n" not in received:
            received += connection.recv(65536)
        connection.close()
    body, pieces = received.partition(b"\r\n\r\n")[2], []
    while body:
        size, _, rest = body.partition(b"\r\n")
        pieces.append(rest[: int(size, 16)])
        assert rest[int(size, 16) :][:2] == b"\r\n"
        body = rest[int(size, 16) + 2 :]
    assert pieces[-1] == b"" and pieces[-2] == b"data: [DONE]\n\n"
    assert all(piece.endswith(b"\n\n") for piece in pieces[:-1])
