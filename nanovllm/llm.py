"""The offline front door: prompts in, `RequestOutput`s out."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

from tqdm import tqdm

from nanovllm.config import EngineConfig
from nanovllm.errors import EngineClosedError, ForkedChildError
from nanovllm.outputs import OutputKind, RequestOutput
from nanovllm.requests import Prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import NewRequest

if TYPE_CHECKING:
    from nanovllm.engine import Engine


class Interrupts:
    """Ctrl-C while the engine's state changes: it raises at once, and the engine is dead if it cut a change short.

    `nanovllm.LLM` has `InterruptsHeld`, which defers it to the end of the change.
    """

    is_in_step = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Raise a deferred interrupt."""

    def pass_on(self) -> None:
        """Raise a deferred interrupt now."""

    def held_in(self, items: Any) -> Any:
        """The generator `items`, with this context entered while it runs."""
        return items


def _build_engine(*model: Any, trace: Any) -> Engine:
    from nanovllm.build import build_engine  # the composition root imports every part: not before the first LLM

    return build_engine(*model, trace=trace)


class LLM:
    """A model with its engine, for the threads that call it; `nanovllm.LLM` adds the methods of features.

    Args:
        model: a loaded `transformers` causal language model, used without a copy and free for its owner between calls,
            or the name or path of a model, which the loader resolves.
        tokenizer: tokenizer of the model; a loaded module without one takes prompts as token ids only.
        on_step: function of a `StepRecord`, called after each step in the thread that steps.
        trace: `TraceWriter` that gets the events of every request and step.
        **options: fields of `EngineConfig`.

    Calls from several threads, and streams read in between, run together in one batch. In a forked child every call but
    `close` raises RuntimeError.
    """

    _interrupts: Callable[[], Any] = Interrupts
    _build_engine: Callable[..., Any] = staticmethod(_build_engine)

    def __init__(self, model: Any, *, tokenizer: Any = None, on_step: Any = None, trace: Any = None, **options: Any):
        engine: Engine = self._build_engine(model, tokenizer, on_step, options, trace=trace)
        self.tokenizer = engine.tokenizer
        self._process_id = os.getpid()
        self._engine: Engine | None = engine
        self._lock = threading.Lock()
        self._owner: int | None = None  # thread that holds `_lock`
        self._request_ids: Iterator[str] = map(str, itertools.count())
        self._inboxes: dict[str, deque[RequestOutput]] = {}  # request id -> outputs for its call
        self._abandoned: deque[str] = deque()  # ids of requests that their calls left unfinished
        self._close = weakref.finalize(self, engine.close)  # an LLM that is dropped gives its memory back at once
        self._close.atexit = False

    # ----------------------------------------------------------------------------------------------- generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | Sequence[str] = "",
        timeout: float | Sequence[float] | None = None,
        client: str | Sequence[str] = "",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; returns one `RequestOutput` each, in their order.

        Args:
            prompts: a string, a list of token ids, {"prompt": ...}, {"prompt_token_ids": ...}, or a list or an iterator
                of any of them.
            sampling_params: options of sampling; None takes `default_sampling_params`.
            priority: priority level; the lowest runs first.
            cache_salt: name of a separate part of the prefix cache; prompts share prefixes only under equal salts.
            timeout: seconds after which a request ends with finish_reason "timeout" and its output so far.
            client: name of a client; clients of one priority share the engine, see `client_weights`.
            use_tqdm: True shows a progress bar on stderr.

        Each option except use_tqdm is one value for all prompts, or a list of one each. A bad prompt or option raises
        before any work starts, and so do more prompts than `max_queue` has room for (QueueFullError). A request with
        non-finite logits ends with finish_reason "error"; any other failure ends all requests of the call and raises.
        """
        options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "timeout": timeout, "client": client}
        process = self._open_engine().input_processor.process
        requests = process(prompts, sampling_params, request_ids=self._request_ids, **options)
        outputs: dict[str, RequestOutput] = {}
        bar = tqdm(total=len(requests), desc="Requests", disable=not use_tqdm, dynamic_ncols=True)
        with bar, self._interrupts() as interrupts:
            for output in self._run(requests, interrupts, after_step=self._after_step(bar)):
                outputs[output.request_id] = output
                bar.update()
        return [outputs[request.request_id] for request in requests]

    def _after_step(self, bar: tqdm) -> Callable[[], None] | None:
        """Function that `generate` calls after each step."""
        return None

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        client: str = "",
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding the output so far after each token; closing the iterator ends the request.

        Steps run only while the iterator is read, so a `timeout` ends the request at the next read.
        """
        options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "timeout": timeout, "client": client}
        process = self._open_engine().input_processor.process_one
        number = next(self._request_ids)
        return self._stream(process(number, prompt, sampling_params, output_kind=OutputKind.CUMULATIVE, **options))

    def _stream(self, request: NewRequest, add: Callable[..., None] | None = None) -> Iterator[RequestOutput]:
        interrupts = self._interrupts()
        held: Iterator[RequestOutput] = interrupts.held_in(self._run([request], interrupts, add=add))
        return held

    def _run(
        self,
        requests: list[NewRequest],
        interrupts: Interrupts,
        *,
        after_step: Callable[[], None] | None = None,
        add: Callable[..., None] | None = None,
    ) -> Generator[RequestOutput]:
        """Add requests to the engine, by `add` if given, and yield their outputs. Leaving early aborts them.

        The thread that holds the lock steps the engine for all calls, and puts each output into its call's inbox.
        """
        inbox: deque[RequestOutput] = deque()
        unfinished = {request.request_id for request in requests}
        try:
            with self._turn() as engine:
                (add or engine.add)(*requests)
                self._inboxes |= dict.fromkeys(unfinished, inbox)
            while unfinished:
                interrupts.pass_on()
                with self._turn() as engine:
                    if not inbox:
                        self._step(engine, interrupts)
                        if after_step is not None:
                            after_step()
                while inbox:
                    output = inbox.popleft()
                    if output.finished:
                        unfinished.discard(output.request_id)
                    yield output
        finally:
            # The garbage collector may close a forgotten iterator in the middle of another call's step: the lock is
            # taken then, and its next holder aborts the requests. A forked child aborts nothing of its parent's.
            self._abandoned.extend(unfinished)
            if unfinished and os.getpid() == self._process_id and self._lock.acquire(blocking=False):
                try:
                    self._abort_abandoned()
                finally:
                    self._lock.release()

    def _step(self, engine: Engine, interrupts: Interrupts) -> None:
        """One step for the requests of all calls; each output goes into the inbox of its call."""
        if not engine.outputs:
            if not engine.requests:
                raise RuntimeError("the engine has lost a request that a call still waits for; please report this.")
            interrupts.is_in_step = True
            try:
                engine.step()
            finally:
                interrupts.is_in_step = False
        while engine.outputs:
            output = engine.outputs.popleft()
            inbox = (self._inboxes.pop if output.finished else self._inboxes.get)(output.request_id, None)
            if inbox is not None:  # None: its call has ended, and the next turn aborts the request
                inbox.append(output)

    @contextmanager
    def _turn(self) -> Iterator[Engine]:
        """The engine, locked for this thread; raises RuntimeError for a call from within a step."""
        self._open_engine()  # raises in a forked child, where the lock may be held for ever
        if self._owner == threading.get_ident():
            raise RuntimeError(
                "this LLM was called from within one of its own steps, by on_step or a logits processor, which "
                "would be a deadlock. Call it after the step."
            )
        with self._lock:
            self._owner = threading.get_ident()
            try:
                engine = self._open_engine()
                if self._abandoned:
                    self._abort_abandoned()
                yield engine
            finally:
                self._owner = None

    def _abort_abandoned(self) -> None:
        """Abort requests of calls that have ended."""
        while self._abandoned:
            request_id = self._abandoned.popleft()
            self._inboxes.pop(request_id, None)
            if self._engine is not None and not self._engine.is_dead:
                self._engine.abort(request_id)

    # ---------------------------------------------------------------------------------------------------- state

    @property
    def config(self) -> EngineConfig:
        """The resolved options."""
        return self._open_engine().config

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Parameters of requests without any."""
        return self._open_engine().input_processor.default_params

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        with self._interrupts(), self._turn() as engine:
            engine.reset_prefix_cache()

    def close(self) -> None:
        """Abort all requests and free the caches and the model. No-op if closed already, and in a forked child."""
        with suppress(EngineClosedError, ForkedChildError), self._interrupts(), self._turn():
            self._close()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_engine(self) -> Engine:
        if os.getpid() != self._process_id:
            raise ForkedChildError("LLM", self._process_id)
        if self._engine is None:
            raise EngineClosedError("this LLM is closed; build a new one.")
        return self._engine
