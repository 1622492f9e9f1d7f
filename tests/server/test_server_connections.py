"""Limits of connections: sockets, headers, and slow senders, with either HTTP parser."""

import asyncio
import contextlib
import functools
import json
import logging
import re
import socket

import h11
import pytest

from nanovllm.serving.server import connections, places
from nanovllm.serving.server.settings import ServerSettings
from nanovllm.serving.server.sse import COMMENT, EventStream, data_error
from tests.support.async_llms import slow_steps
from tests.support.llms import comes_true
from tests.support.serving import serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SMALL = {"max_header_bytes": 4096, "max_headers": 20}
HASTY = {"header_timeout": 0.3, "body_timeout": 0.3}


@pytest.fixture(params=["httptools", "h11"])
def parser(request, monkeypatch):
    chosen = functools.partial(connections.protocol_class, name=request.param)
    monkeypatch.setattr("nanovllm.serving.server.app.protocol_class", chosen)
    return request.param


@contextlib.contextmanager
def connected(running):
    with socket.create_connection(running.address) as connection:
        connection.settimeout(30.0)
        yield connection


def answer(connection):
    """Read until the server closes."""
    received = b""
    while data := connection.recv(65536):
        received += data
    return received


def refusal(connection, status):
    """Return the error of a refusal that closed the connection."""
    head, _, body = answer(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), head
    assert b"connection: close" in head.lower()
    return json.loads(body)["error"]


def send_until_refused(connection, piece, num_bytes):
    """Send until the server answers; returns the number of bytes sent, at most `num_bytes`."""
    connection.setblocking(False)
    num_sent = 0
    while num_sent < num_bytes:
        with contextlib.suppress(BlockingIOError):
            if connection.recv(1, socket.MSG_PEEK):
                break
        with contextlib.suppress(BlockingIOError):
            num_sent += connection.send(piece)
    connection.settimeout(30.0)
    return num_sent


def post_of(body):
    """A request with this body, as bytes."""
    data = json.dumps(body).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data


ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 500, "stream": True, "ignore_eos": True}
PROBE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "begin, piece",
    [
        (HEAD, b"X-Filler: " + b"y" * 990 + b"\r\n"),
        (HEAD + b"X-Filler: ", b"y" * 1000),
        (HEAD, b"X: y\r\n"),
        (b"GET /", b"y" * 1000),
    ],
    ids=["bytes", "one value", "count", "request line"],
)
def test_headers_without_end_are_431_while_they_are_read(parser, begin, piece):
    with serving(SMALL | {"api_key": ("right",)}) as running:
        with connected(running) as connection:
            connection.sendall(begin)
            assert send_until_refused(connection, piece, 30_000_000) < 30_000_000
            error = refusal(connection, 431)
            assert "4096 bytes (max_header_bytes)" in error["message"] and "20 headers" in error["message"]
            assert error["code"] == "headers_too_large"
        with running.http(headers={"Authorization": "Bearer right"}) as http:
            assert http.get("/v1/models").status_code == 200


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


@pytest.mark.parametrize("begin", [HEAD + b"Content-Length: 0\r\n", CHUNKED], ids=["headers", "trailers"])
def test_trailers_that_are_too_large_are_431(parser, begin):
    """And headers, also those that are complete."""
    with serving(SMALL) as running:
        for filler in (b"X: " + b"y" * 5000 + b"\r\n", b"X: y\r\n" * 30):
            with connected(running) as connection:
                connection.sendall(begin + filler + b"\r\n")
                refusal(connection, 431)
        with connected(running) as connection:  # within the limits
            connection.sendall(PROBE[:-2] + b"Connection: close\r\nX: " + b"y" * 3900 + b"\r\n\r\n")
            assert answer(connection).startswith(b"HTTP/1.1 200")


TRAILERS = (
    b"Authorization: Bearer right\r\n",
    b"x-api-key: right\r\n",
    b"X-Client: forged\r\n",
    b"x-request-id: forged\r\n",
    b"Host: evil.example\r\n",
    b"Content-Type: text/plain\r\n",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
    b"Expect: 100-continue\r\n",
    b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n",
)


def test_nothing_in_a_trailer_is_used(parser):
    body = b'{"prompt": [5, 6], "max_tokens": 1}'
    message = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
    seen = []
    with serving({"api_key": ("right",), "client_header": "x-client", "allowed_hosts": ("localhost",)}) as running:
        app = running.server.config.app

        async def watched(scope, receive, send):
            await app(scope, receive, send)
            seen.append([(name, value) for name, value in scope["headers"]])

        running.server.config.loaded_app = watched
        for key, status in ((b"Authorization: Bearer right\r\n", b"200"), (b"", b"401")):
            with connected(running) as connection:
                connection.sendall(HEAD + key + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
                with contextlib.suppress(ConnectionError):  # a 401 need not wait for the body
                    connection.sendall(message + b"".join(TRAILERS) + b"\r\n")
                received = answer(connection)
            assert received.startswith(b"HTTP/1.1 " + status), received
            assert b"forged" not in received and b"evil" not in received and b"100 Continue" not in received
        assert len(seen) == 2
    for headers in seen:
        assert {name for name, _ in headers} <= {
            b"host", b"content-type", b"authorization", b"connection", b"transfer-encoding",
        }  # fmt: skip
        assert (b"host", b"localhost") in headers


def test_trailers_without_end_are_cut_off_behind_an_answer_too(parser):
    with serving(SMALL | {"api_key": ("right",)}) as running, connected(running) as connection:
        connection.sendall(CHUNKED)
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")
        with pytest.raises(ConnectionError):
            for _ in range(30_000):
                connection.sendall(b"X: " + b"y" * 990 + b"\r\n")


MALFORMED = {
    "garbage": b"GARBAGE\r\n\r\n",
    "a header without a name": HEAD + b": x\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length that is no number": HEAD + b"Content-Length: 1x\r\n\r\n{}",
    "a negative length": HEAD + b"Content-Length: -2\r\n\r\n{}",
    "a chunk of no size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a space before the colon": HEAD + b"Content-Length : 2\r\n\r\n{}",
}


@pytest.mark.parametrize("request_bytes", MALFORMED.values(), ids=MALFORMED)
def test_what_is_not_http_is_400_as_json_and_the_connection_closes(parser, request_bytes):
    with serving() as running, connected(running) as connection:
        connection.sendall(request_bytes)
        error = refusal(connection, 400)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_http")
    assert error["message"].startswith("the request is not valid HTTP/1.1")


HIDDEN = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
CODED = HEAD + b"Transfer-Encoding: "
# Lengths with two readings: whoever believes the other one takes what is behind for a request.
SMUGGLED = {
    "a length, then chunks": HEAD + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks, then a length": CODED + b"chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 0\r\nContent-Length: 44\r\n\r\n",
    "two lengths in one": HEAD + b"Content-Length: 0, 44\r\n\r\n",
    "a length with a sign": HEAD + b"Content-Length: +5\r\n\r\naaaaa",
    "chunks in HTTP/1.0": (CODED + b"chunked\r\nConnection: keep-alive\r\n\r\n0\r\n\r\n").replace(b"/1.1", b"/1.0"),
    "an unknown coding": CODED + b"xchunked\r\n\r\n0\r\n\r\n",
    "chunks within another coding": CODED + b"chunked, identity\r\n\r\n0\r\n\r\n",
    "line feeds alone": (CODED + b"chunked\r\n\r\n0\r\n\r\n").replace(b"\r\n", b"\n"),
    "a hexadecimal prefix": CODED + b"chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
    "a negative chunk": CODED + b"chunked\r\n\r\n-1\r\n0\r\n\r\n",
    "a chunk beyond 64 bits": CODED + b"chunked\r\n\r\nfffffffffffffffff\r\n0\r\n\r\n",
}


def test_no_request_behind_a_length_of_two_readings_is_answered(parser):
    with serving(HASTY) as running:
        for name, request_bytes in SMUGGLED.items():
            with connected(running) as connection:
                connection.sendall(request_bytes + HIDDEN)
                received = answer(connection)
            assert received.startswith(b"HTTP/1.1 4") and b"HTTP/1.1 200" not in received, (name, received)


UPGRADE = (
    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def test_no_client_can_fill_the_log(parser, caplog):
    caplog.set_level(logging.DEBUG)
    with serving() as running:
        for message in [MALFORMED["garbage"], UPGRADE] * 5:
            with connected(running) as connection:
                connection.sendall(message)
                assert connection.recv(65536)
    found = [record.getMessage() for record in caplog.records if record.name.startswith(("uvicorn.error", "nanovllm"))]
    assert not re.search("pgrade|Invalid HTTP|WebSocket", "".join(found))
    assert "".join(found).count("connection refused with 400") == 1


def test_refusals_that_were_not_logged_are_counted_by_status(caplog):
    caplog.set_level(logging.INFO)
    now = 0.0
    refusals = connections.RefusalLog(lambda: now)
    for status in (400, 400, 400, 431):
        refusals.add(status, "no")
    now = connections.REFUSAL_LOG_SECONDS
    for status in (400, 431):
        refusals.add(status, "no")
    lines = ["400: no", "431: no", "400: no (2 more with 400 since the last such line)", "431: no"]
    assert caplog.messages == [f"connection refused with {line}" for line in lines]


def test_what_is_not_http_behind_a_request_does_not_get_into_its_answer(parser):
    with serving() as running, connected(running) as connection:
        connection.sendall(post_of(ENDLESS))
        received = connection.recv(65536)
        connection.sendall(b"GARBAGE\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            received += answer(connection)
        first, *_ = received.partition(b"\r\n0\r\n\r\n")
        assert first.count(b"HTTP/1.1 ") == 1 and b"nvalid HTTP" not in first
        comes_true(running.is_idle)


@pytest.mark.parametrize(
    "begin, said",
    [(HEAD, "headers took more than 0.3"), (HEAD + b"Content-Length: 10\r\n\r\n{", "body took more than 0.4")],
)
def test_a_request_that_is_never_finished_is_408(parser, begin, said):
    with serving(HASTY | {"body_timeout": 0.4}) as running:
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(connected(running)) for _ in range(20)]
            for connection in opened:
                connection.sendall(begin)
            for connection in opened:
                error = refusal(connection, 408)
                assert f"the request's {said} seconds" in error["message"]
        comes_true(lambda: not running.server.server_state.connections)


def test_a_connection_on_which_nothing_is_sent_is_closed(parser):
    with serving(HASTY) as running, connected(running) as connection:
        assert answer(connection) == b""


def test_line_ends_do_not_keep_a_used_connection_open(parser):
    with serving(HASTY) as running, connected(running) as connection:
        connection.sendall(PROBE)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\n")
        answer(connection)


@pytest.mark.full
def test_answers_may_last_longer_than_requests(parser):
    """Neither timer runs during an answer, nor while a pipelined request waits."""
    whole = post_of(ENDLESS | {"max_tokens": 400, "stream": False})
    with serving(HASTY) as running, connected(running) as connection:
        connection.sendall(whole + PROBE[:-2] + b"Connection: close\r\n\r\n")
        with slow_steps(running.engine, 0.002):
            received = answer(connection)
    assert received.count(b"HTTP/1.1 200") == 2 and b'"completion_tokens":400' in received


SLOW_BODY = HEAD + b"Content-Length: 10\r\n\r\n{"


@pytest.mark.parametrize(
    "begin",
    [b"", HEAD, SLOW_BODY, HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"],
    ids=["nothing sent", "headers", "body", "chunks"],
)
def test_the_connection_that_waited_longest_for_its_request_yields_to_a_new_one(parser, begin):
    with serving({"max_connections": 3}) as running, contextlib.ExitStack() as stack:
        waiting = []
        for number in range(3):
            waiting.append(stack.enter_context(connected(running)))
            waiting[-1].sendall(begin)
            comes_true(lambda number=number: len(running.server.server_state.connections) == number + 1)
        further = stack.enter_context(connected(running))
        further.sendall(PROBE)
        assert further.recv(65536).startswith(b"HTTP/1.1 200")
        error = refusal(waiting[0], 503)
        assert "3 connections (max_connections)" in error["message"] and "waited longest" in error["message"]
        assert running.post("/v1/completions", {"prompt": [5], "max_tokens": 1}).status_code == 200
        refusal(waiting[1], 503)
        waiting[2].settimeout(0.05)
        with pytest.raises(TimeoutError):
            waiting[2].recv(1)


def probed(connection):
    """The whole answer to a probe, whose head and body may come apart."""
    connection.sendall(PROBE)
    received = b""
    while not received.endswith(b"}") and (more := connection.recv(65536)):
        received += more
    return received


def test_an_idle_connection_yields_and_its_wait_begins_with_the_end_of_its_answer(parser):
    with serving({"max_connections": 2}) as running, contextlib.ExitStack() as stack:
        used, slow = (stack.enter_context(connected(running)) for _ in range(2))
        assert probed(used).startswith(b"HTTP/1.1 200")
        slow.sendall(SLOW_BODY)
        comes_true(lambda: running.server.server_state.tasks)
        with connected(running) as further:
            assert probed(further).startswith(b"HTTP/1.1 200")
        assert used.recv(65536) == b""  # no answer to a request that was not sent
        comes_true(lambda: len(running.server.server_state.connections) == 1)
        used = stack.enter_context(connected(running))
        for _ in range(3):
            assert probed(used).startswith(b"HTTP/1.1 200")
        with connected(running) as further:
            assert probed(further).startswith(b"HTTP/1.1 200")
        refusal(slow, 503)


def test_health_is_answered_while_every_connection_has_an_answer(parser):
    settings = {"max_connections": 2, "root_path": "/llm"}
    with serving(settings) as running, slow_steps(running.engine, 0.01), contextlib.ExitStack() as stack:
        for _ in range(2):
            streaming = stack.enter_context(connected(running))
            streaming.sendall(post_of(ENDLESS))
            assert streaming.recv(10)
        idle = [stack.enter_context(connected(running)) for _ in range(places.SPARE_PLACES + 5)]
        for target in (b"/health", b"/llm/health"):
            probe = stack.enter_context(connected(running))
            probe.sendall(PROBE.replace(b"/health", target))
            assert probe.recv(65536).startswith(b"HTTP/1.1 200")
        assert refusal(idle[0], 503)
        with connected(running) as further:
            further.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")
            assert "answers to send" in refusal(further, 503)["message"]


def test_a_place_beyond_the_limit_takes_any_request_once_another_is_free():
    class Connection:
        has_yielded = False

        def yield_place(self):
            self.has_yielded = True
            taken.leave(self)

    taken = places.Places(2)
    first, second, third, fourth = (Connection() for _ in range(4))
    for connection in (first, second):
        taken.enter(connection)
        taken.serve(connection)
    taken.enter(third)
    assert not taken.take(third)
    taken.leave(first)
    assert taken.take(third) and not second.has_yielded
    taken.enter(fourth)
    assert third.has_yielded and taken.take(fourth)
    assert not second.has_yielded


def test_httptools_does_not_let_pipelined_requests_pile_up_behind_an_answer():
    with serving() as running, connected(running) as connection:
        connection.sendall(post_of(ENDLESS) + PROBE * 300)
        received = b""
        with contextlib.suppress(ConnectionError):
            received = answer(connection)
        assert b"[DONE]" not in received
        comes_true(running.is_idle)


def test_h11_does_not_let_pipelined_requests_pile_up_behind_an_answer():
    parser = connections.BoundedH11Parser(ServerSettings())
    parser.receive_data(PROBE * 2)
    assert [type(parser.next_event()) for _ in range(2)] == [h11.Request, h11.EndOfMessage]
    assert parser.next_event() is h11.PAUSED
    parser.receive_data(PROBE * 50_000)
    with pytest.raises(h11.RemoteProtocolError):
        parser.next_event()


@pytest.mark.parametrize(
    "soft, hard, raised, is_logged", [(1024, 9999, 4352, False), (1024, 2048, 2048, True), (9999, 9999, None, False)]
)
def test_the_limit_of_open_files_is_raised_as_far_as_may_be(monkeypatch, caplog, soft, hard, raised, is_logged):
    given = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr("resource.setrlimit", lambda _, limits: given.append(limits))
    connections.allow_open_files(4096)
    assert given == ([] if raised is None else [(raised, hard)])
    assert ("max_connections is 4096" in caplog.text) == is_logged


@pytest.mark.costly
@pytest.mark.parametrize(
    "name",
    [
        "max_connections",
        "max_header_bytes",
        "max_headers",
        "header_timeout",
        "body_timeout",
        "max_body_items",
        "max_messages",
        "max_tools",
        "max_word_chars",
    ],
)
def test_limits_must_be_above_zero(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        ServerSettings(**{name: 0})


async def test_an_event_waits_for_the_comment_that_is_being_sent():
    begun = asyncio.Event()
    sent = []

    async def events():
        yield b""
        await begun.wait()
        yield b"event"

    async def send(message):
        if message.get("body") == COMMENT:
            begun.set()
            for _ in range(10):
                await asyncio.sleep(0)
        sent.append(message.get("body"))

    stream = EventStream(events(), data_error, send_timeout=9.0, keep_alive=0.01)
    await stream({}, asyncio.Event().wait, send)
    assert sent == [None, COMMENT, b"event", b""]
