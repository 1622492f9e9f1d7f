"""Replica on Ray: an engine that runs requests of the fronts, and reports like an engine process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from nanovllm.errors import ModelLoadError
from nanovllm.features.intake.intake import Intake
from nanovllm.observability.step_records import RECENT_STEPS, StepRecord
from nanovllm.outputs import RequestMetrics, RequestOutput
from nanovllm.ray.prompt import Prompt
from nanovllm.ray.router import MAX_REPORTED, fingerprints
from nanovllm.sequence import NewRequest
from nanovllm.serving.replicas.engine_process import Reporter, build
from nanovllm.serving.replicas.messages import (
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
from nanovllm.serving.streaming.engine_thread import EngineThread

logger = logging.getLogger("nanovllm")

TIMES = ("arrival_time", "scheduled_time", "first_token_time", "last_token_time", "finished_time")


def shifted(metrics: RequestMetrics, seconds: float) -> RequestMetrics:
    """Shift the times of metrics to a clock that is `seconds` ahead."""
    times = {name: getattr(metrics, name) for name in TIMES}
    return replace(metrics, **{name: time + seconds for name, time in times.items() if time is not None})


class RayReporter(Reporter):
    """`Reporter` of a process that Serve may stop."""

    is_stopping = False

    def end(self, refusal: Callable[[], Exception]) -> None:
        if not self.is_stopping:
            logger.error("the replica ends, and its requests go on in others: %s", refusal())
            os._exit(1)  # the fronts and Serve notice at once

    def deliver(self, outputs: list[RequestOutput]) -> list[str]:
        """Report each output whole (see `Reporter`): every front has its own placements and clock."""
        self._report([self._sent(output) for output in outputs])
        return []


class Replica:
    """Engine for the fronts' requests. Fronts call `describe` and `generate`, Serve the other methods.

    Args:
        model, tokenizer, engine_options: see `AsyncLLM`; without max_queue.
        stall_timeout: seconds without a step, despite work, after which Serve replaces it.
    """

    def __init__(
        self, model: str, tokenizer: str | None, engine_options: dict[str, Any], *, stall_timeout: float
    ) -> None:
        self._setup = model, tokenizer, engine_options
        engine, self._ready = build(model, tokenizer, engine_options)
        self._stall_timeout = stall_timeout
        self._placements = itertools.count()  # numbers of different fronts may be equal
        self._queues: dict[int, asyncio.Queue[SentOutput]] = {}  # outputs to be sent, by placement
        self._loop: asyncio.AbstractEventLoop | None = None  # event loop of the calls
        self._stats = engine.stats()
        self._records: deque[StepRecord] = deque(maxlen=RECENT_STEPS)  # not yet sent to any front
        self._reporter = RayReporter(engine, self._receive_report, sends_records=True, sends_block_events=False)
        self._thread = EngineThread(engine, self._reporter, prepares_when_idle=True)
        self._input_processor = engine.input_processor
        # Apart from the loop's own threads, so that a plain request never waits for forms.
        self._forms = Intake()

    async def describe(self, model: str, tokenizer: str | None, engine_options: dict[str, Any]) -> bytes | None:
        """Encode a `Ready`; None if the replica has another setup, during an update of the application."""
        return encode(self._ready) if self._setup == (model, tokenizer, engine_options) else None

    async def generate(
        self, data: bytes, hash_seed: str, sent_at: float, prompt: Prompt
    ) -> AsyncGenerator[bytes, None]:
        """Yield encoded reports of one request until it ends. Closing it, or cancelling the call, aborts the request.

        Args:
            data: an encoded `Add` of one request.
            hash_seed: hash seed of the front's model.
            sent_at: time on the front's clock, in seconds.
            prompt: argument for the router only; empty here.

        Raises ModelLoadError if this engine has another model: a moved request would mix two models.
        """
        if hash_seed != self._ready.hash_seed:
            raise ModelLoadError(
                f"the replica has loaded {self._ready.hash_seed!r}, and the front {hash_seed!r} (model, revision, "
                "dtype). Name the revision, and start the application anew."
            )
        ahead = time.monotonic() - sent_at  # offset of this machine's clock
        request = decode_request(data)
        placement, request.placement = request.placement, next(self._placements)
        request.arrival_time += ahead
        if request.resumed is not None:
            request.resumed = replace(request.resumed, metrics=shifted(request.resumed.metrics, ahead))
        queue = self._queues[request.placement] = asyncio.Queue()
        self._loop = loop = asyncio.get_running_loop()
        is_finished = False
        try:
            prepare = partial(self._reporter.prepare, Add([request]))
            if request.compiles(self._input_processor):
                (new,) = await asyncio.wrap_future(self._forms.submit(prepare, client=request.client, compiles=True))
            else:
                (new,) = await loop.run_in_executor(None, prepare)
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
                with suppress(RuntimeError):  # the engine is closed
                    self._thread.submit(lambda _: self._reporter.abort(Abort(request.request_id, request.placement)))

    def _report(self, outputs: list[SentOutput], placement: int, ahead: float) -> bytes:
        """Encode outputs with the front's placement and clock, and step records that no front has yet."""
        for sent in outputs:
            sent.placement = placement
            sent.metrics = metric_values(shifted(RequestMetrics(*sent.metrics), -ahead))
        records = list(self._records)
        self._records.clear()
        return encode(Report(outputs, self._stats, records, b""))

    def _add(self, request: SentRequest, new: NewRequest) -> None:
        """Add a request; called in the engine's thread."""
        if (stale := self._reporter.placements.get(new.request_id)) is not None:  # its front lost the connection
            self._reporter.abort(Abort(new.request_id, stale))
        self._reporter.add(Add([request]), [new])

    def _receive_report(self, message: FromEngine) -> None:
        """Pass a report on to the event loop; called in the engine's thread."""
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
            entries = engine.block_manager.entries  # oldest first: the newest are reported
            return fingerprints(islice(entries, max(0, len(entries) - MAX_REPORTED), None))

        blocks, stats = await asyncio.wrap_future(self._thread.submit(look)), self._thread.heartbeat().stats
        return {"num_waiting": stats.num_waiting, "num_running": stats.num_running, "blocks": blocks}

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Data for routers to compute this engine's block hashes."""
        config = self._ready.config
        return {
            "hash_seed": self._ready.hash_seed,
            "block_size": config["block_size"],
            "max_num_seqs": config["max_num_seqs"],
        }

    def check_health(self) -> None:
        """Raise if the engine has stalled, so that Serve replaces the replica. A dead engine ends the process."""
        if (age := self._thread.heartbeat().age) > self._stall_timeout:
            raise TimeoutError(f"no step has ended for {age:.0f} s, above stall_timeout ({self._stall_timeout:g}).")

    def __del__(self) -> None:
        """Stop the engine; Serve calls this to remove the replica, when no request runs."""
        self._reporter.is_stopping = True
        self._thread.stop()


def decode_request(data: bytes) -> SentRequest:
    """Decode an `Add` of one request."""
    message = decode_to_engine(data)
    if not isinstance(message, Add):
        raise TypeError(f"a front sent {message!r}.")
    (request,) = message.requests
    return request
