"""The front and a replica without a cluster: prompts are read as the engine reads them; what becomes of failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from nanovllm.core.block_hashes import num_leading_hits
from nanovllm.ray.front import Front
from nanovllm.ray.prompt import Prompt
from nanovllm.ray.replica import Replica
from nanovllm.ray.router import HeldBlocks
from nanovllm.server.settings import ServerSettings
from tests.support.tiny_models import save_tiny

OPTIONS: dict[str, Any] = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 129, "max_model_len": 512}
TEXT = "The quick brown fox jumps over the lazy dog. " * 8
SETTINGS = ServerSettings(served_model_name="tiny", api_key=("secret",), cache_salt_per_key=True, ui=False)
STREAM = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
PLAIN = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
DATA = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b"", "more_body": False}


def scope_of(path: str) -> dict[str, Any]:
    headers = [(b"host", b"127.0.0.1"), (b"authorization", b"Bearer secret"), (b"content-type", b"application/json")]
    names = {"http_version": "1.1", "scheme": "http", "query_string": b"", "root_path": "", "client": ("127.0.0.1", 1)}
    return {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers} | names


class Response:
    """What a call of a handle returns: messages, then maybe an error."""

    def __init__(self, messages: list[Any], error: Exception | None) -> None:
        self.messages, self.error, self.is_cancelled = messages, error, False

    async def __aiter__(self) -> AsyncIterator[list[Any]]:
        for message in self.messages:
            yield [message]
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """A deployment's handle whose calls end as given, one after the other."""

    def __init__(self, *responses: Response) -> None:
        self.left, self.sent = list(responses), 0

    def options(self, **_: Any) -> Handle:
        return self

    @property
    def answer(self) -> Handle:
        return self

    def remote(self, *_: Any, **__: Any) -> Response:
        self.sent += 1
        return self.left.pop(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": TEXT}),
    ("/v1/completions", {"prompt": list(range(100)), "cache_salt": "mine"}),
    ("/v1/completions", {"prompt": TEXT, "truncate_prompt_tokens": 40}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]}),
    ("/v1/messages", {"model": "tiny", "system": TEXT, "messages": [{"role": "user", "content": TEXT}]}),
    ("/v1/responses", {"model": "tiny", "instructions": TEXT, "input": TEXT}),
], ids=["text", "tokens and salt", "truncated", "chat", "messages", "responses"])  # fmt: skip
def test_a_replica_reports_the_blocks_that_the_front_reads_from_the_prompt(folder, path, body):
    limit = {"max_output_tokens": 16} if path == "/v1/responses" else {"max_tokens": 1}
    encoded = json.dumps(body | limit).encode()

    async def answer() -> tuple[dict[str, Any], dict[str, Any]]:
        replica = Replica(folder, None, SETTINGS, OPTIONS)
        messages = [m async for part in replica.answer(scope_of(path), encoded, Prompt()) for m in part]
        assert messages[0]["status"] == 200, messages
        stats, metadata = await replica.record_routing_stats(), await replica.record_replica_metadata()
        await replica._engine.close()
        return stats, metadata

    stats, metadata = asyncio.run(answer())
    prompt = Front(Handle(), folder, None, SETTINGS, OPTIONS)._prompts.read(path, "secret", encoded)
    hashes = prompt.hashes(metadata["hash_seed"], metadata["block_size"])
    held = HeldBlocks()
    held.report(stats["blocks"])
    assert len(hashes) >= 2
    assert num_leading_hits(hashes, held) == len(hashes)


def relayed(folder: str, *responses: Response) -> tuple[list[Any], Handle]:
    """What a client gets."""
    handle, sent = Handle(*responses), []
    body = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> Any:
        return body.pop() if body else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    front = Front(handle, folder, None, SETTINGS, OPTIONS)
    asyncio.run(front._forward(scope_of("/v1/completions"), receive, send))
    assert all(response.is_cancelled for response in responses[: handle.sent])
    return sent, handle


def test_a_replica_that_dies_before_its_answer_costs_nothing(folder):
    sent, handle = relayed(folder, Response([], ActorDiedError()), Response([PLAIN, END], None))
    assert (sent, handle.sent) == ([PLAIN, END], 2)


def test_after_three_replicas_that_die_the_client_is_told(folder):
    sent, handle = relayed(folder, *(Response([], ActorDiedError()) for _ in range(4)))
    assert (sent[0]["status"], handle.sent) == (503, 3)
    assert json.loads(sent[1]["body"])["error"]["code"] == "replica_died"


def test_a_stream_whose_replica_dies_ends_with_an_error(folder):
    sent, handle = relayed(folder, Response([STREAM, DATA], ActorDiedError()))
    assert sent[:2] == [STREAM, DATA] and handle.sent == 1
    assert json.loads(sent[2]["body"].removeprefix(b"data: "))["error"]["code"] == "replica_died"
    assert not sent[2]["more_body"]


def test_a_full_queue_is_429(folder):
    sent, _ = relayed(folder, Response([], BackPressureError(num_queued_requests=9, max_queued_requests=9)))
    assert sent[0]["status"] == 429
