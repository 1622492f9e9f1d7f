"""A replica on Ray: an engine that runs the requests which the fronts send, and reports as an engine process does."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from nanovllm.cache.cache_groups import known_prefixes
from nanovllm.core.errors import ModelLoadError
from nanovllm.core.outputs import RequestMetrics
from nanovllm.core.sequence import NewRequest
from nanovllm.observability.step_records import RECENT_STEPS, StepRecord
from nanovllm.process.gc_control import OldObjectsFrozen
from nanovllm.ray.prompt import Prompt
from nanovllm.ray.router import MAX_REPORTED, fingerprints
from nanovllm.replicas.engine_process import Reporter, build
from nanovllm.replicas.messages import (
    Abort,
    Add,
    FromEngine,
    Report,
    SentOutput,
    SentRequest,
    decode_to_engine,
    encode,
    metric_values,
)
from nanovllm.requests.grammar.trials import MAX_TRIALS
from nanovllm.streaming.engine_thread import EngineThread

logger = logging.getLogger("nanovllm")

TIMES = ("arrival_time", "scheduled_time", "first_token_time", "last_token_time", "finished_time")


def shifted(metrics: RequestMetrics, seconds: float) -> RequestMetrics:
    """Metrics on another machine's clock, which is so far ahead."""
    times = {name: getattr(metrics, name) for name in TIMES}
    return replace(metrics, **{name: time + seconds for name, time in times.items() if time is not None})


class RayReporter(Reporter):
    """A `Reporter` whose process may end in order."""

    is_stopping = False

    def end(self, refusal: Callable[[], Exception]) -> None:
        if not self.is_stopping:
            logger.error("the replica ends, and its requests go on in others: %s", refusal())
            os._exit(1)  # the fronts and Serve notice at once


class Replica:
    """Runs requests of fronts; the methods beside `describe` and `generate` are called by Serve.

    Args:
        model, tokenizer, engine_options: as for `AsyncLLM`, without a bound of the queue.
        stall_timeout: seconds without a step, while there is work, after which it is replaced.
    """

    def __init__(
        self, model: str, tokenizer: str | None, engine_options: dict[str, Any], *, stall_timeout: float
    ) -> None:
        self._setup = model, tokenizer, engine_options
        engine, self._ready = build(model, tokenizer, engine_options)
        self._stall_timeout = stall_timeout
        self._placements = itertools.count()  # own ones: those of several fronts would be the same
        self._queues: dict[int, asyncio.Queue[SentOutput]] = {}  # by placement
        self._loop: asyncio.AbstractEventLoop | None = None  # of the calls
        self._stats = engine.stats()
        self._records: deque[StepRecord] = deque(maxlen=RECENT_STEPS)  # that no front has yet
        self._reporter = RayReporter(engine, self._take, sends_records=True, sends_block_events=False)
        self._thread = EngineThread(engine, self._reporter, prepares_when_idle=True)
        self._input_processor = engine.input_processor
        # Apart from the loop's own threads, so that a plain request never waits for forms.
        self._forms = ThreadPoolExecutor(MAX_TRIALS, thread_name_prefix="nanovllm-prepare-form")
        OldObjectsFrozen.freeze_for_good()

    async def describe(self, model: str, tokenizer: str | None, engine_options: dict[str, Any]) -> bytes | None:
        """An encoded `Ready`; None if the replica was started with others, of an application that is being updated."""
        return encode(self._ready) if self._setup == (model, tokenizer, engine_options) else None

    async def generate(
        self, data: bytes, hash_seed: str, sent_at: float, prompt: Prompt
    ) -> AsyncGenerator[bytes, None]:
        """Yield encoded reports of one request until it ends. Closing it, or cancelling the call, aborts the request.

        Args:
            data: an encoded `Add` of one request.
            hash_seed: of the model that the front has read the prompt for.
            sent_at: on the front's clock, in seconds.
            prompt: for the router.

        Raises ModelLoadError if this engine has another model: an answer would be half of each.
        """
        if hash_seed != self._ready.hash_seed:
            raise ModelLoadError(
                f"the replica has loaded {self._ready.hash_seed!r}, and the front {hash_seed!r} (model, revision, "
                "dtype). Name the revision, and start the application anew."
            )
        ahead = time.monotonic() - sent_at  # this clock, of that one
        request = decode_request(data)
        placement, request.placement = request.placement, next(self._placements)
        request.arrival_time += ahead
        if request.resumed is not None:
            request.resumed = replace(request.resumed, metrics=shifted(request.resumed.metrics, ahead))
        queue = self._queues[request.placement] = asyncio.Queue()
        self._loop = loop = asyncio.get_running_loop()
        is_finished = False
        try:
            threads = self._forms if request.compiles(self._input_processor) else None
            (new,) = await loop.run_in_executor(threads, self._reporter.prepare, Add([request]))
            await asyncio.wrap_future(self._thread.submit(lambda _: self._add(request, new)))
            while not is_finished:
                outputs = [await queue.get()]
                while not queue.empty():
                    outputs.append(queue.get_nowait())
                is_finished = outputs[-1].finished
                yield self._report(outputs, placement, ahead)
        finally:
            del self._queues[request.placement]
            if not is_finished:
                with suppress(RuntimeError):  # it is closed
                    self._thread.submit(lambda _: self._reporter.abort(Abort(request.request_id, request.placement)))

    def _report(self, outputs: list[SentOutput], placement: int, ahead: float) -> bytes:
        """Outputs as the front knows their request, with what no front has been told yet."""
        for sent in outputs:
            sent.placement = placement
            sent.metrics = metric_values(shifted(RequestMetrics(*sent.metrics), -ahead))
        records = list(self._records)
        self._records.clear()
        return encode(Report(outputs, self._stats, records, b""))

    def _add(self, request: SentRequest, new: NewRequest) -> None:
        """In the engine's thread."""
        if (stale := self._reporter.placements.get(new.request_id)) is not None:  # whose front could not reach us
            self._reporter.abort(Abort(new.request_id, stale))
        self._reporter.add(Add([request]), [new])

    def _take(self, message: FromEngine) -> None:
        """In the engine's thread."""
        if isinstance(message, Report) and self._loop is not None:
            self._loop.call_soon_threadsafe(self._distribute, message)

    def _distribute(self, report: Report) -> None:
        self._stats = report.stats
        self._records += report.records
        for sent in report.outputs:
            if (queue := self._queues.get(sent.placement)) is not None:
                queue.put_nowait(sent)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Queue lengths and findable blocks, for the routers."""

        def look(engine: Any) -> bytes:
            entries = known_prefixes(engine.block_manager)  # in the order in which they became findable
            return fingerprints(islice(entries, max(0, len(entries) - MAX_REPORTED), None))

        blocks, stats = await asyncio.wrap_future(self._thread.submit(look)), self._thread.heartbeat().stats
        return {"num_waiting": stats.num_waiting, "num_running": stats.num_running, "blocks": blocks}

    async def record_replica_metadata(self) -> dict[str, Any]:
        """What routers need to compute the hashes of this engine's blocks."""
        config = self._ready.config
        return {
            "hash_seed": self._ready.hash_seed,
            "block_size": config["block_size"],
            "max_num_seqs": config["max_num_seqs"],
        }

    def check_health(self) -> None:
        """Raise if the engine has stalled: Serve then starts another replica. A dead one ends its process."""
        if (age := self._thread.heartbeat().age) > self._stall_timeout:
            raise TimeoutError(f"no step has ended for {age:.0f} s, above stall_timeout ({self._stall_timeout:g}).")

    def __del__(self) -> None:
        """Called by Serve when it takes the replica away; nothing runs then."""
        self._reporter.is_stopping = True
        self._thread.stop()


def decode_request(data: bytes) -> SentRequest:
    """The one request of an encoded `Add`."""
    message = decode_to_engine(data)
    if not isinstance(message, Add):
        raise TypeError(f"a front sent {message!r}.")
    (request,) = message.requests
    return request
