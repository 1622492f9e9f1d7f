"""The asynchronous front door: clients in one event loop or several share an engine that runs in its own thread."""

from __future__ import annotations

import asyncio
import os
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable
from collections.abc import Sequence as SequenceABC
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast

from nanovllm.errors import QueueFullError
from nanovllm.features.adapters.loading import Adapter
from nanovllm.features.adapters.opening import load_adapter, unload_adapter
from nanovllm.features.adapters.salts import salted
from nanovllm.features.chat.chat import Message
from nanovllm.features.chat.tokenization import AsyncTokenization
from nanovllm.features.engine_options import EngineOptions
from nanovllm.features.engine_stats import EngineStats, ReplicaStatus
from nanovllm.features.intake.headless import check_head
from nanovllm.features.intake.intake import Intake, IntakeClosedError
from nanovllm.features.intake.preparation import (
    check_request_ids,
    compiles_form,
    num_samples,
    prepare_ahead,
    text_size,
    texts_of,
)
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.features.scoring.scoring import AsyncScoring
from nanovllm.features.updates.pausing import AsyncPausing
from nanovllm.features.updates.sleeping import sleep, wake
from nanovllm.features.updates.updating import Weights, update_weights
from nanovllm.models.default_model import DEFAULT_MODEL
from nanovllm.observability.step_records import StepHook
from nanovllm.outputs import OutputKind, RequestOutput
from nanovllm.requests import Prompt
from nanovllm.sequence import NewRequest
from nanovllm.serving.llm import open_engine
from nanovllm.serving.streaming.engine_thread import EngineThread
from nanovllm.serving.streaming.engines import EngineInterface
from nanovllm.serving.streaming.heartbeat import Heartbeat
from nanovllm.serving.streaming.streams import OutputRouter, OutputStream, Preparation, Stream, relay

if TYPE_CHECKING:
    from torch import nn

    from nanovllm.observability.trace_writer import TraceWriter

Result = TypeVar("Result")


class RequestOptions(TypedDict, total=False):
    """Options of a request.

    adapter: name of a loaded adapter; None is the model alone.
    priority: lower runs first.
    cache_salt: prompts share cached prefixes only within one salt.
    timeout: seconds from its arrival after which it ends with finish_reason "timeout" and its output so far.
    client: clients of one priority share the engine, see `EngineConfig.client_weights`.
    """

    adapter: str | None
    priority: int
    cache_salt: str
    timeout: float | None
    client: str


class AsyncLLM(AsyncTokenization, AsyncScoring, AsyncPausing):
    """A model with its engine in a thread, for asyncio.

    Args:
        model, tokenizer, on_step, trace, **options: as for `LLM`, with the same errors. Loading takes seconds and
            blocks; where an event loop runs already, build it in a thread (`await asyncio.to_thread(AsyncLLM, ...)`).
        prepares_when_idle: True captures usual steps on a GPU, and tries each sampling option, while no request runs.
            Only where no other code of the process uses that GPU: waiting for the device (`torch.cuda.synchronize`)
            fails during a capture, and the capture with it. No effect on a live module.
        engine_process: run the engine in a process, as a pool of one replica: readers do not share its interpreter.

    Use it in an `async with` block, or await `close`. After an error outside of a step, or of the device, it is dead:
    every open stream and every later call raises EngineDeadError, caused by the error. See docs/guide/async.md.
    """

    _open = staticmethod(open_engine)  # the front on Ray overrides it

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module = DEFAULT_MODEL,
        *,
        tokenizer: Any = None,
        on_step: StepHook | None = None,
        trace: TraceWriter | None = None,
        prepares_when_idle: bool = False,
        engine_process: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        how = {"prepares_when_idle": prepares_when_idle, "sends_records": True, "is_stepped_when_idle": True}
        engine = self._open(
            model, tokenizer, on_step, cast(Any, options), trace=trace, engine_process=engine_process, **how
        )
        self.config = engine.config
        self.tokenizer = engine.tokenizer
        self.limits = engine.input_processor.limits  # the model's, for requests
        self.vocab_size = self.limits.vocab_size  # prompts' token ids lie below it
        self.num_logits = self.limits.num_logits  # tokens that can be sampled
        self.observers = engine.observers  # the engine's thread calls them; append at any time
        self._input_processor = engine.input_processor
        # Parameters of requests that bring none.
        self.default_sampling_params: SamplingParams = engine.input_processor.default_params
        self._router = OutputRouter()
        self.on_request_end = self._router.on_end  # the engine's thread calls them; append at any time
        self._engine_thread = EngineThread(engine, self._router, prepares_when_idle=prepares_when_idle)
        self._clock = engine.clock
        self._look_at_queue = engine.check_queue
        self._preparing: dict[str, Preparation] = {}  # requests that are not queued yet, by id
        self._intake = Intake(is_parallel=getattr(self.tokenizer, "is_fast", False))
        self._intake.submit(partial(prepare_ahead, engine.input_processor), compiles=True)
        # An object dropped without `close` stops its thread.
        weakref.finalize(self, self._engine_thread.stop).atexit = False

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        output_kind: OutputKind | str = OutputKind.CUMULATIVE,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, yielding outputs as they come; cancelling the task or closing the generator aborts it.

        Args:
            prompt: a string or a list of token ids.
            sampling_params: None takes `default_sampling_params`.
            request_id: its name in outputs and for `abort`; None makes a unique one.
            output_kind: "cumulative", "delta" or "final", see `OutputKind`; a slow reader gets several tokens at once.
            **options: see `RequestOptions`.

        Raises, before the first output: TypeError and ValueError for bad input, QueueFullError, EngineDeadError, and
        RuntimeError once it is closed.
        """
        submit = partial(
            self.submit, [prompt], sampling_params, request_ids=None if request_id is None else [request_id],
            output_kind=output_kind, **options,
        )  # fmt: skip
        return relay(submit)

    def chat(
        self,
        messages: SequenceABC[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        template_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, a list of {"role": ..., "content": ...}, through the tokenizer's chat template.

        Args:
            tools: functions that the template describes to the model, as OpenAI defines them.
            template_options: variables of the template, such as {"enable_thinking": False}.
            sampling_params, **options: as in `generate`.
        """
        submit = partial(self.submit_chat, messages, sampling_params, tools=tools, template_options=template_options)
        return relay(partial(submit, **options))

    async def submit(
        self,
        prompts: SequenceABC[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        request_ids: SequenceABC[str] | None = None,
        output_kind: OutputKind | str = OutputKind.CUMULATIVE,
        **options: Any,
    ) -> OutputStream:
        """Queue prompts, all of them together or none, and return once they are queued.

        Args:
            request_ids: one for each prompt, its name in outputs; None makes new ones.
            sampling_params, output_kind, **options: as in `generate`, for all of them.

        Raises the errors of `generate`; QueueFullError if not all of them have room.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts must be a list of prompts, not a string; put it into a list.")
        if request_ids is None:
            request_ids = [uuid.uuid4().hex for _ in prompts]
        if not prompts or len(request_ids) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts and {len(request_ids)} request ids; give one for each.")
        options = self._with_salt(**options)
        prepare = partial(self._input_processor.process_each, list(prompts), sampling_params, **options)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        return await self._submit(prepare, request_ids, output_kind, sampling_params, texts, options.get("client"))

    async def submit_chat(
        self,
        messages: SequenceABC[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        template_options: dict[str, Any] | None = None,
        request_id: str | None = None,
        output_kind: OutputKind | str = OutputKind.CUMULATIVE,
        **options: Any,
    ) -> OutputStream:
        """Queue a conversation and return once it is queued; arguments as in `chat`."""
        check_head(self.limits)
        options = self._with_salt(**options)

        def prepare(**given: Any) -> list[NewRequest]:
            processor = self._input_processor
            limit = processor.limit_of(sampling_params)
            variables = template_options or {}
            token_ids = processor.parts.chat.apply_to(messages, limit, tools=tools, **variables)
            return processor.process_each([token_ids], sampling_params, **given, **options)

        request_ids = [uuid.uuid4().hex if request_id is None else request_id]
        texts = (messages, tools)
        client = options.get("client")
        return await self._submit(prepare, request_ids, output_kind, sampling_params, texts, client)

    def _with_salt(self, *, adapter: Any = None, cache_salt: Any = "", **options: Any) -> dict[str, Any]:
        """Options of requests, with the adapter that they name in their cache_salt."""
        return options | {"cache_salt": salted(self._input_processor.parts.adapters, adapter, cache_salt)}

    async def _submit(
        self,
        prepare: Callable[..., list[NewRequest]],
        request_ids: SequenceABC[str],
        output_kind: OutputKind | str,
        sampling_params: Any,
        texts: Any,
        client: Any,
    ) -> OutputStream:
        """Queue the requests that `prepare` makes of a client's `texts`."""
        arrival_time = self._clock()
        check_request_ids(request_ids, self._preparing)
        if output_kind not in list(OutputKind):
            raise ValueError(f"output_kind is {output_kind!r}; it must be one of {', '.join(OutputKind)}.")
        stream = Stream(kind := OutputKind(output_kind))
        count = num_samples(sampling_params, len(request_ids))
        preparation = Preparation(stream, request_ids, count // len(request_ids), arrival_time)

        def add(requests: list[NewRequest], engine: EngineInterface) -> None:
            engine.add(*requests)
            preparation.is_queued = True
            for request in requests:
                self._router.open(request, stream)
                if request.request_id in preparation.aborted:
                    self._abort_in(engine, request.request_id)

        def prepare_and_queue() -> Future[None]:  # runs in the preparation thread, which no busy event loop delays
            requests = prepare(request_ids=request_ids, output_kind=kind, arrival_time=arrival_time)
            return self._engine_thread.submit(lambda engine: None if stream.is_abandoned else add(requests, engine))

        async def prepared() -> None:
            await self._check_queue(count)
            compiles = compiles_form(self._input_processor, sampling_params)
            words = texts_of(sampling_params)
            work = self.prepare(prepare_and_queue, (texts, words), compiles=compiles, client=client)
            await asyncio.wrap_future(await work)

        preparation.work = asyncio.ensure_future(prepared())
        self._preparing |= dict.fromkeys(request_ids, preparation)
        try:
            await self._queued(preparation)
        except BaseException:  # a cancellation may come when they are queued already
            self._abandon(request_ids, stream)
            raise
        finally:
            for request_id in request_ids:
                del self._preparing[request_id]
        return OutputStream(stream, request_ids, self._abandon)

    async def _queued(self, preparation: Preparation) -> None:
        """Wait until requests are queued, or ended before since all of them were aborted."""
        try:
            await preparation.work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not preparation.is_dropped or (task is not None and task.cancelling()):
                raise
            await self._run(lambda _: preparation.end(self._clock()))

    async def _check_queue(self, count: int) -> None:
        """Refuse samples without room before they are tokenised, between two steps: an abort may be on its way."""
        try:
            self._look_at_queue(count)
        except QueueFullError:
            if not self.is_dead:
                await self._run(lambda engine: engine.check_queue(count))

    async def prepare(
        self, work: Callable[[], Result], texts: Any = (), *, compiles: bool = False, client: str | None = None
    ) -> Result:
        """Run `work`, which tokenises `texts` and may compile forms, in its client's turn; cancelling drops it."""
        if self._engine_thread.is_elsewhere:
            raise self._engine_thread.refusal()
        try:
            task = self._intake.submit(work, text_size(texts), client=client, compiles=compiles)
            return await asyncio.wrap_future(task)
        except IntakeClosedError:
            raise self._engine_thread.refusal() from None

    def _abandon(self, request_ids: Iterable[str], stream: Stream) -> None:
        """Abort requests without a reader before the next step; does not wait, since this may be a cancellation."""
        stream.is_abandoned = True

        def abort(engine: EngineInterface) -> None:
            for request_id in request_ids:
                if self._router.close(request_id, stream):
                    self._router.record_end(request_id, engine.abort(request_id))

        try:
            self._engine_thread.submit(abort)
        except RuntimeError:
            return  # the engine is closed or dead, and its requests have ended

    async def _run(self, call: Callable[[EngineInterface], Result]) -> Result:
        """Run a call in the engine's thread, between two steps, and return its result."""
        return await asyncio.wrap_future(self._engine_thread.submit(call))

    # ---------------------------------------------------------------------------------------------------- requests

    async def abort(self, request_id: str) -> bool:
        """End a request now; its stream ends with finish_reason "abort" and the output so far. False if none runs.

        The preparation of one that is not queued yet is dropped at once; its output has no prompt tokens.
        """
        preparation = self._preparing.get(request_id)
        if preparation is not None:
            preparation.abort(request_id)

        def abort(engine: EngineInterface) -> bool:
            return self._abort_in(engine, request_id) or (preparation is not None and not preparation.is_queued)

        return await self._run(abort)

    def _abort_in(self, engine: EngineInterface, request_id: str) -> bool:
        """Abort a request, in the engine's thread; returns whether it ran."""
        if (output := engine.abort(request_id)) is not None:
            self._router.deliver([output])
        return output is not None

    # ------------------------------------------------------------------------------------------------------- state

    @property
    def is_dead(self) -> bool:
        """Whether an error ended the engine; calls raise it as the cause of an EngineDeadError."""
        return self._engine_thread.is_dead

    async def stats(self) -> EngineStats:
        return await self._run(lambda engine: engine.stats())

    def heartbeat(self) -> Heartbeat:
        """Statistics between the last two steps, and their age; never waits."""
        return self._engine_thread.heartbeat()

    async def inspect(self, look: Callable[[Any], Result]) -> Result:
        """The result of look(engine), called in the engine's thread between two steps; it must change nothing.

        Raises EngineDeadError, RuntimeError once closed, and errors of `look`; with replicas it gets the `ReplicaPool`.
        """
        return await self._run(look)

    def replicas(self) -> list[ReplicaStatus]:
        """The state of each replica; empty with data_parallel_size=1. Never waits."""
        return self._engine_thread.statuses()

    async def load_adapter(self, name: str, path: str | os.PathLike[str]) -> Adapter:
        """As `LLM.load_adapter`, between two steps."""
        return await self._run(lambda engine: load_adapter(engine, name, path))

    async def unload_adapter(self, name: str) -> None:
        """As `LLM.unload_adapter`."""
        await self._run(lambda engine: unload_adapter(engine, name))

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The loaded adapters by name."""
        return dict(self._input_processor.parts.adapters)

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        await self._run(lambda engine: engine.reset_prefix_cache())

    async def update_weights(self, weights: Weights, *, keep_kv: bool = False, version: str | None = None) -> None:
        """As `LLM.update_weights`, between two steps."""
        await self._run(lambda engine: update_weights(engine, weights, keep_kv=keep_kv, version=version))

    async def sleep(self, level: int = 1) -> None:
        """As `LLM.sleep`, between two steps; streams wait for `wake`."""
        await self._run(lambda engine: sleep(engine, level))

    async def wake(self) -> None:
        """As `LLM.wake`."""
        await self._run(wake)

    @property
    def is_asleep(self) -> bool:
        """As `LLM.is_asleep`."""
        return self._engine_thread.is_asleep

    async def weights_changed(self) -> None:
        """As `LLM.weights_changed`."""
        await self._run(lambda engine: engine.drop_computed())

    async def close(self) -> None:
        """End all requests (their streams with finish_reason "abort") and free the caches.

        A live module is its owner's again. Waits for the step that runs; does nothing again, or in a forked child.
        """
        if self._engine_thread.is_elsewhere:
            return
        self._intake.shutdown()
        self._engine_thread.stop()
        await asyncio.to_thread(self._engine_thread.join)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
