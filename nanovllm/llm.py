"""The offline front door: prompts in, `RequestOutput`s out."""

from __future__ import annotations

import itertools
import numbers
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from torch import nn
from tqdm import tqdm

from nanovllm import loader
from nanovllm.config import EngineConfig
from nanovllm.default_model import DEFAULT_MODEL
from nanovllm.engine import Engine
from nanovllm.garbage import LongCall, collector_paused
from nanovllm.model_binding import ModelBinding
from nanovllm.model_probe import UnsupportedModelError
from nanovllm.model_runner import ModelRunner, preferred_block_size
from nanovllm.outputs import EngineStats, RequestOutput
from nanovllm.sampling_params import SamplingParams

Prompt = str | SequenceABC[int]
Message = Mapping[str, Any]


@dataclass(slots=True)
class _PreparedRequest:
    """A checked request, ready to be queued."""

    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str
    request_id: str


class LLM:
    """A model with its engine.

    Args:
        model: "smollm2-135m-instruct" (the embedded default), a local folder, a hub id, or a loaded `transformers`
            causal language model, which is then used as it is, without a copy, and stays its owner's between calls.
        tokenizer: a tokenizer, a folder or hub id of one; None takes the model's own. A loaded module without one
            takes prompts as token ids only.
        **options: see `EngineConfig`.

    Raises TypeError for an unknown option (naming the near ones), ValueError for options that contradict each other or
    the model, ModelLoadError and UnsupportedModelError.

    Calls from several threads, and streams read in between, run together in one batch. Use it in a `with` block, or
    call `close`.
    """

    def __init__(
        self, model: str | os.PathLike[str] | nn.Module = DEFAULT_MODEL, *, tokenizer: Any = None, **options: Any
    ) -> None:
        config = EngineConfig.from_options(**options)
        with collector_paused():
            loaded = loader.load(model, tokenizer, config)
        binding = ModelBinding(loaded.model, is_live=loaded.is_live)
        limits = config.resolve_limits(
            binding.device.type, loaded.max_position_embeddings, block_size=preferred_block_size(binding, config)
        )
        if binding.window is not None and limits.max_model_len > binding.window:
            raise UnsupportedModelError(
                f"{type(loaded.model).__name__} attends within a sliding window of {binding.window} tokens, which is "
                f"not implemented. It is exact for shorter sequences: set max_model_len to at most {binding.window}."
            )
        self.tokenizer = loaded.tokenizer
        runner = ModelRunner(binding, limits, max_model_len_is_set=config.max_model_len is not None)
        self._engine: Engine | None = Engine(
            runner,
            tokenizer=loaded.tokenizer,
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            model_identity=loaded.identity,
        )
        self._lock = threading.Lock()
        self._request_numbers = itertools.count()
        self._abandoned: deque[str] = deque()  # ids of requests whose call has ended
        self._inboxes: dict[str, list[RequestOutput]] = {}  # by request id: where the call that waits for it looks

    # ----------------------------------------------------------------------------------------------- generation

    def generate(
        self,
        prompts: Prompt | SequenceABC[Prompt],
        sampling_params: SamplingParams | SequenceABC[SamplingParams] | None = None,
        *,
        priority: int | SequenceABC[int] = 0,
        cache_salt: str | SequenceABC[str] = "",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; returns one `RequestOutput` each, in their order.

        Args:
            prompts: a string, a list of token ids, or a list that mixes both.
            sampling_params: one for all, or one each; None samples at temperature 1.
            priority: lower runs first; one for all, or one each.
            cache_salt: prompts share cached prefixes only within one salt; one for all, or one each.
            use_tqdm: show a progress bar on stderr.

        A bad prompt or parameter raises before any work starts. A request whose logits are not finite ends with
        finish_reason "error"; any other failure ends them all and raises.
        """
        requests = self._prepare(prompts, sampling_params, priority, cache_salt)
        outputs: dict[str, RequestOutput] = {}
        bar = tqdm(total=len(requests), desc="Requests", disable=not use_tqdm, dynamic_ncols=True)
        show_rate = _rate_display(bar, self._open_engine())
        with bar, LongCall() as call:

            def after_step(engine: Engine) -> None:
                call.step()
                show_rate(engine)

            for output in self._run(requests, stream=False, after_step=after_step):
                outputs[output.request_id] = output
                bar.update()
        return [outputs[request.request_id] for request in requests]

    def chat(
        self,
        messages: SequenceABC[Message] | SequenceABC[SequenceABC[Message]],
        sampling_params: SamplingParams | SequenceABC[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations through the tokenizer's chat template.

        Args:
            messages: one conversation, a list of {"role": ..., "content": ...}, or a list of conversations.
            sampling_params, **options: as in `generate`.
        """
        return self.generate(self.apply_chat_template(messages), sampling_params, **options)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding what there is after each token; closing the iterator ends the request."""
        return self._run(self._prepare([prompt], sampling_params, 0, cache_salt), stream=True)

    def apply_chat_template(
        self, messages: SequenceABC[Message] | SequenceABC[SequenceABC[Message]]
    ) -> list[list[int]]:
        """Token ids of one conversation or several, ready for the answer; always a list of prompts."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("chat needs a tokenizer with a chat template; use generate, or pass another tokenizer.")
        if not isinstance(messages, SequenceABC) or isinstance(messages, str) or not messages:
            raise ValueError(f"messages must be a conversation or a list of them, not {messages!r}.")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        for conversation in conversations:
            if not conversation or not all(
                isinstance(m, Mapping) and "role" in m and "content" in m for m in conversation
            ):
                raise ValueError(f"a conversation is a list of {{'role': ..., 'content': ...}}, not {conversation!r}.")
        return [self._apply_chat_template(conversation) for conversation in conversations]

    def _apply_chat_template(self, conversation: Any) -> list[int]:
        try:
            return list(
                self.tokenizer.apply_chat_template(list(conversation), add_generation_prompt=True, return_dict=False)
            )
        except TemplateError as error:  # a template may demand an order of roles, say
            raise ValueError(f"the tokenizer's chat template refuses this conversation: {error}") from error

    def _run(
        self, requests: list[_PreparedRequest], *, stream: bool, after_step: Callable[[Engine], None] = lambda _: None
    ) -> Iterator[RequestOutput]:
        """Queue requests and yield what comes of them; leaving early, or by an exception, ends them.

        Whoever holds the lock steps for all, and leaves the outputs of other calls in their inboxes.
        """
        inbox: list[RequestOutput] = []
        unfinished = {request.request_id for request in requests}
        try:
            with self._turn() as engine:
                for request in requests:
                    self._inboxes[request.request_id] = inbox
                    engine.add_request(
                        request.request_id,
                        request.token_ids,
                        request.params,
                        prompt=request.prompt,
                        priority=request.priority,
                        cache_salt=request.cache_salt,
                        stream=stream,
                    )
            while unfinished:
                with self._turn() as engine:
                    if not inbox:
                        self._step(engine)
                        after_step(engine)
                    arrived = inbox[:]
                    inbox.clear()
                for output in arrived:
                    if output.finished:
                        unfinished.discard(output.request_id)
                    yield output
        finally:
            # A forgotten iterator is closed by the garbage collector at any moment, maybe within somebody's step: then
            # the lock is taken, and whoever takes it next does the rest.
            self._abandoned.extend(request.request_id for request in requests)
            if self._lock.acquire(blocking=False):
                try:
                    self._abort_abandoned()
                finally:
                    self._lock.release()

    def _step(self, engine: Engine) -> None:
        """One step for everybody's requests; each output goes to the call that waits for it."""
        if not engine.outputs:
            if not engine.has_unfinished:
                raise RuntimeError("the engine has lost a request that a call still waits for; please report this.")
            engine.step()
        while engine.outputs:
            output = engine.outputs[0]
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:  # else its call was interrupted, and the request is about to be aborted
                inbox.append(output)
            engine.outputs.popleft()

    @contextmanager
    def _turn(self) -> Iterator[Engine]:
        """The engine, for this thread alone."""
        with self._lock:
            engine = self._open_engine()
            self._abort_abandoned()
            yield engine

    def _abort_abandoned(self) -> None:
        """End the requests that nobody waits for any more; nothing to do for those that have ended."""
        while self._abandoned:
            request_id = self._abandoned.popleft()
            self._inboxes.pop(request_id, None)
            if self._engine is not None:
                self._engine.abort(request_id)

    # ----------------------------------------------------------------------------------------------- preparation

    def _prepare(self, prompts: Any, sampling_params: Any, priority: Any, cache_salt: Any) -> list[_PreparedRequest]:
        """The requests of one call, all of them checked before the first is queued."""
        engine = self._open_engine()
        prompts = _as_prompts(prompts)
        count = len(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        params = _one_each("sampling_params", sampling_params, SamplingParams, count)
        priorities = _one_each("priority", priority, int, count)
        salts = _one_each("cache_salt", cache_salt, str, count)
        requests = []
        for number, prompt in enumerate(prompts):
            try:
                token_ids = self._tokenize(prompt)
                engine.check_request(token_ids, params[number])
            except (TypeError, ValueError) as error:
                if count == 1:
                    raise
                raise type(error)(f"prompt {number}: {error}") from error
            text = prompt if isinstance(prompt, str) else None
            request_id = str(next(self._request_numbers))
            requests.append(
                _PreparedRequest(text, token_ids, params[number], priorities[number], salts[number], request_id)
            )
        return requests

    def _tokenize(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            return _as_token_ids(prompt)
        if self.tokenizer is None:
            raise ValueError("a prompt as text needs a tokenizer; pass tokenizer=... to LLM, or give token ids.")
        if not prompt:
            raise ValueError("the prompt is an empty string; it needs at least one token.")
        return list(self.tokenizer(prompt)["input_ids"])

    # ---------------------------------------------------------------------------------------------------- state

    @property
    def config(self) -> EngineConfig:
        """The resolved options."""
        return self._open_engine().config

    def stats(self) -> EngineStats:
        with self._turn() as engine:
            return engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        with self._turn() as engine:
            engine.reset_prefix_cache()

    def weights_changed(self) -> None:
        """Forget all KV, and what was captured of the model, after an edit that nothing tells the engine.

        Such are edits of weights that leave no trace in a parameter's version or storage, and edits of anything else of
        a module (its functions, flags, submodules) while requests run; between calls the engine sees those itself, as
        far as they replace an attribute.
        """
        with self._turn() as engine:
            engine.drop_computed()

    def close(self) -> None:
        """End all requests, free the caches and let go of the model; closing again does nothing."""
        with self._lock:
            if self._engine is not None:
                self._engine.close()
                self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this LLM is closed; build a new one.")
        return self._engine


def _rate_display(bar: tqdm, engine: Engine) -> Callable[[Engine], None]:
    """Shows tokens/s beside a bar over requests, with the tokens of those that run still, a few times a second."""
    start = shown = time.monotonic()
    num_before = engine.scheduler.stats.num_output_tokens

    def after_step(engine: Engine) -> None:
        nonlocal shown
        if not bar.disable:
            now, num_tokens = time.monotonic(), engine.scheduler.stats.num_output_tokens - num_before
            is_due = now - shown > 0.25
            bar.set_postfix_str(f"{num_tokens / (now - start):.0f} tokens/s", refresh=is_due)
            shown = now if is_due else shown

    return after_step


def _as_prompts(prompts: Any) -> list[Any]:
    """A list of prompts from one prompt or several."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, SequenceABC) or isinstance(prompts, (bytes, bytearray)):
        prompts = _as_token_ids(prompts)
    if not prompts:
        raise ValueError("the list of prompts is empty; give at least one prompt.")
    if all(isinstance(item, numbers.Integral) for item in prompts):
        return [prompts]
    return list(prompts)


def _as_token_ids(prompt: Any) -> list[Any]:
    """A list from a list, tuple, array or one-dimensional tensor of token ids, with Python's own numbers."""
    items = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(items, SequenceABC) or isinstance(items, (str, bytes, bytearray)):
        raise TypeError(f"a prompt is a string or a list of token ids, not {prompt!r}.")
    if set(map(type, items)) <= {int}:  # a prompt may be long, and this is fast
        return list(items)
    is_number = [isinstance(item, numbers.Integral) and not isinstance(item, bool) for item in items]
    return [int(item) if fits else item for item, fits in zip(items, is_number, strict=True)]


def _one_each(name: str, values: Any, kind: type, count: int) -> list[Any]:
    """`values` for each of `count` prompts: itself if it is one, else as many as there are prompts."""
    if isinstance(values, kind) and not isinstance(values, bool):
        return [values] * count
    if not isinstance(values, SequenceABC) or isinstance(values, str):
        raise TypeError(f"{name} must be of type {kind.__name__} or a list of them, not {values!r}.")
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts; give one for all, or one each.")
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} must hold {kind.__name__} only, not {value!r}.")
    return list(values)
