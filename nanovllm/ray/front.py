"""Front on Ray: the server's application over a pool of replicas that Serve runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle

from nanovllm.errors import EngineDeadError
from nanovllm.features.engine_config import EngineConfig
from nanovllm.models.loader import load_tokenizer
from nanovllm.ray.fleet import RayFleet
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.replicas.messages import Ready, decode_from_engine
from nanovllm.serving.replicas.opening import pool_parts
from nanovllm.serving.replicas.pool import ReplicaPool
from nanovllm.serving.server.app import create_app
from nanovllm.serving.server.settings import ServerSettings

UPDATE_SECONDS = 1.0  # seconds between attempts to find a replica with this setup, while Serve replaces old ones


class FrontLLM(AsyncLLM):
    """`AsyncLLM` over replicas on Ray."""

    def __init__(self, pool: ReplicaPool, model: str) -> None:
        self._pool = pool
        super().__init__(model)

    def _open(self, *_: Any, **__: Any) -> ReplicaPool:
        return self._pool


class Front:
    """ASGI application of one front; Serve runs `num_fronts` of them.

    Args:
        replicas: handle of the `Replica` deployment.
        setup: model, tokenizer and engine options of the replicas.
        max_queue: see `AsyncLLM`.
        max_replicas: maximum number of replicas; bounds the front's queue together with max_num_seqs.
    """

    async def __init__(  # type: ignore[misc]  # `serve.ingress` allows a coroutine: it waits for a replica
        self,
        replicas: DeploymentHandle,
        setup: tuple[str, str | None, dict[str, Any]],
        settings: ServerSettings,
        *,
        max_queue: int | None,
        max_replicas: int,
    ) -> None:
        model, tokenizer, engine_options = setup
        self._model = model
        self._settings = settings
        options = EngineConfig.from_options(**engine_options, max_queue=max_queue)
        own_tokenizer = await asyncio.to_thread(load_tokenizer, model, tokenizer, options)
        ready = await _first_ready(replicas, setup)
        parts = pool_parts(options, own_tokenizer, [ready])
        config = replace(parts.config, data_parallel_size=max_replicas)
        fleet = RayFleet(
            replicas,
            asyncio.get_running_loop(),
            max_num_seqs=config.max_num_seqs,
            hash_seed=parts.hash_seed,
        )
        # Serve's `PolicyRouter` chooses the replica, not the pool.
        pool = ReplicaPool(fleet, replace(parts, config=config, expects_prefixes=False), _first)
        self.engine = FrontLLM(pool, model)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self.engine, self._settings, model=self._model)

    def check_health(self) -> None:
        """Raise if no request can be served: Serve then starts another front."""
        if self.engine.is_dead:
            raise EngineDeadError("the front's pool has failed; see its log.")


async def _first_ready(replicas: DeploymentHandle, setup: tuple[str, str | None, dict[str, Any]]) -> Ready:
    """Wait for a replica with this setup; returns its description."""
    while (described := await replicas.describe.remote(*setup)) is None:
        await asyncio.sleep(UPDATE_SECONDS)
    ready = decode_from_engine(described)
    if not isinstance(ready, Ready):
        raise TypeError(f"a replica describes itself as {ready!r}.")
    return ready


def _first(hashes: Sequence[bytes], replicas: Sequence[Any]) -> int:
    return 0
