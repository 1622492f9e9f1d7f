"""A server on a free loopback port, in a thread of this process, and clients for it."""

import asyncio
import contextlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

import anthropic
import httpx
import openai
import pytest

from nanovllm import AsyncLLM
from nanovllm.serving.server.app import build_server, create_app
from nanovllm.serving.server.lifecycle import DrainingServer
from nanovllm.serving.server.settings import ServerSettings
from tests.support.async_llms import OPTIONS
from tests.support.llms import comes_true
from tests.support.scripted import THINKING_TEMPLATE, ending_model, thinking_tokenizer
from tests.support.tiny_models import tiny_model, tiny_tokenizer

MODEL = "tiny"


def user(content):
    """A message of the user: a text, or parts."""
    return {"role": "user", "content": content}


def function_tool(name, **fields):
    """A tool as /v1/chat/completions takes it."""
    return {"type": "function", "function": {"name": name, **fields}}


@dataclass(frozen=True)
class Serving:
    """A running server, its engine and its URL."""

    engine: AsyncLLM
    app: Any
    server: DrainingServer
    thread: threading.Thread
    url: str

    @property
    def address(self):
        return self.server.servers[0].sockets[0].getsockname()[:2]

    def client(self, key="none", **options):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60.0, **options)

    def anthropic(self, key="none"):
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0, timeout=60.0)

    def async_client(self, key="none"):
        limits = httpx.Limits(max_connections=None)
        http = httpx.AsyncClient(limits=limits, timeout=60.0)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=http)

    def http(self, **options):
        return httpx.Client(base_url=self.url, timeout=60.0, **options)

    def request(self, method, path, json=None, **options):
        """Send one request on a connection of its own."""
        with self.http(verify=False) as http:  # no certificates to read
            return http.request(method, path, json=json, **options)

    def answer(self, path, *fields, status=200, **options):
        """What a request is answered, whose body has these fields as objects or JSON; the last ones count."""
        body = {}
        for given in fields:
            body |= json.loads(given) if isinstance(given, str) else given
        answer = self.post(path, body, **options)
        assert answer.status_code == status, answer.text
        return answer.json()

    def error(self, path, *fields, status=400, **options):
        """The error of such a request, which is refused."""
        return self.answer(path, *fields, status=status, **options)["error"]

    def refuses(self, path, param, said, *fields, status=400):
        """Check that such a request is refused by the name of this field and with these words."""
        error = self.error(path, *fields, status=status)
        assert error["param"] == param and said in error["message"], error

    get = partialmethod(request, "GET")
    head = partialmethod(request, "HEAD")
    options = partialmethod(request, "OPTIONS")
    post = partialmethod(request, "POST")

    def stats(self):
        return run_in_subprocess(self.engine.stats())

    def stop(self):
        """Stop the server as a signal does; returns the exit code."""
        self.server.handle_exit(15, None)
        self.thread.join(60.0)
        assert not self.thread.is_alive()
        return self.server.exit_code

    def is_idle(self):
        stats = self.stats()
        return (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


@contextlib.contextmanager
def serving(
    settings=None,
    *,
    model=None,
    tokenizer=None,
    send_buffer=None,
    front_door=AsyncLLM,
    **options,
):
    """A server of a tiny model, stopped at the end of the block.

    Args:
        send_buffer: bytes that the system keeps of what a client has not read.
    """
    model = tiny_model(num_layers=1) if model is None else model
    engine = front_door(model, tokenizer=tokenizer or tiny_tokenizer(), **(OPTIONS | options))
    own = ServerSettings(**({"port": 0, "served_model_name": MODEL, "drain_timeout": 0.0} | (settings or {})))
    app = create_app(engine, own, model=MODEL)
    server = build_server(app, engine, own)
    listeners = None
    if send_buffer is not None:  # which connections inherit
        listeners = [socket.create_server(("127.0.0.1", 0))]
        listeners[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    thread = threading.Thread(target=server.run, args=(listeners,), daemon=True)
    thread.start()
    comes_true(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    running = Serving(engine, app, server, thread, f"http://127.0.0.1:{port}")
    try:
        yield running
    finally:
        running.stop()  # closes the engine too


def thinking_server(template=THINKING_TEMPLATE):
    """A server whose template knows tools and thought, and whose answers end."""
    return serving({"tool_format": "hermes"}, model=ending_model(), tokenizer=thinking_tokenizer(template))


def served(open_server):
    """A fixture: the server of a file, which `open_server` opens when a test needs it."""

    @pytest.fixture(scope="module")
    def running():
        with open_server() as running:
            yield running

    return running


def run_in_subprocess(work):
    """Run `work` in a thread of its own: playwright's event loop may run in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


@contextlib.contextmanager
def streaming(running, body, count=1, running_at_once=None):
    """So many requests of clients that read nothing, which run within the block; they leave at its end."""
    connections = [raw_stream(running, body) for _ in range(count)]
    comes_true(lambda: running.stats().num_running == (count if running_at_once is None else running_at_once))
    yield connections
    for connection in connections:
        connection.close()
    comes_true(running.is_idle)


def raw_stream(running, body, path="/v1/completions"):
    """Send a request and return the socket, with the answer unread."""
    data = json.dumps({"stream": True} | body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(running.address)
    connection.sendall(head.encode() + data)
    return connection
