"""A replica on Ray: an engine with the server's application, which answers the requests that a front forwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import islice
from typing import Any

from starlette.types import Message, Scope

from nanovllm.async_llm import AsyncLLM
from nanovllm.cache.cache_groups import known_prefixes
from nanovllm.core.errors import EngineDeadError
from nanovllm.engine import Engine
from nanovllm.process.gc_control import OldObjectsFrozen
from nanovllm.ray.prompt import Prompt
from nanovllm.ray.router import MAX_REPORTED, fingerprints
from nanovllm.server.app import create_app
from nanovllm.server.settings import ServerSettings


class Replica:
    """Answers requests as the server does; the methods beside `answer` are called by Serve.

    Args:
        model, tokenizer, engine_options: as for `AsyncLLM`.
    """

    def __init__(
        self, model: str, tokenizer: str | None, settings: ServerSettings, engine_options: dict[str, Any]
    ) -> None:
        self._engine = AsyncLLM(model, tokenizer=tokenizer, prepares_when_idle=True, **engine_options)
        self._stall_timeout = settings.stall_timeout
        self._app = create_app(self._engine, settings, model=model)
        OldObjectsFrozen.freeze_for_good()

    async def answer(self, scope: Scope, body: bytes, prompt: Prompt) -> AsyncGenerator[list[Message], None]:
        """Yield the messages of an ASGI response, those that are ready together in one list.

        Closing it, or cancelling the call, disconnects the client: the engine aborts its request.

        Args:
            prompt: for the router.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        received, is_gone = [{"type": "http.request", "body": body, "more_body": False}], asyncio.Event()

        async def receive() -> Message:
            if received:
                return received.pop()
            await is_gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(self._app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while not task.done() or not messages.empty():
                ready = [await messages.get()]
                while not messages.empty():
                    ready.append(messages.get_nowait())
                if found := [message for message in ready if message is not None]:
                    yield found
            await task
        finally:
            is_gone.set()
            if not task.done():
                await asyncio.wait((task,), timeout=1.0)  # it sees the client leave, and aborts
            task.cancel()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Queue lengths and findable blocks, for the routers."""

        def look(engine: Engine) -> bytes:
            entries = known_prefixes(engine.scheduler.block_manager)  # in the order in which they became findable
            return fingerprints(islice(entries, max(0, len(entries) - MAX_REPORTED), None))

        blocks, stats = await self._engine.inspect(look), self._engine.heartbeat().stats
        return {"num_waiting": stats.num_waiting, "num_running": stats.num_running, "blocks": blocks}

    async def record_replica_metadata(self) -> dict[str, Any]:
        """What routers need to compute the hashes of this engine's blocks."""
        hash_seed = await self._engine.inspect(lambda engine: engine.scheduler.block_manager.hash_seed)
        config = self._engine.config
        return {"hash_seed": hash_seed, "block_size": config.block_size, "max_num_seqs": config.max_num_seqs}

    def check_health(self) -> None:
        """Raise if the engine is dead or has stalled: Serve then starts another replica."""
        if self._engine.is_dead:
            raise EngineDeadError("the engine has failed; see the replica's log.")
        if (age := self._engine.heartbeat().age) > self._stall_timeout:
            raise TimeoutError(f"no step has ended for {age:.0f} s, above stall_timeout ({self._stall_timeout:g}).")
