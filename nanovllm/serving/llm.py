"""The public `LLM`: the engine's, with the methods of features, the default model and replicas."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn
from tqdm import tqdm

import nanovllm.llm
from nanovllm.fast.gpu.early_start import begin_gpu
from nanovllm.fast.host.gc_control import collector_paused
from nanovllm.features.adapters.adapting import Adapting
from nanovllm.features.beams.beam_search import BeamSearching
from nanovllm.features.chat.chatting import Chatting
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.engine_options import EngineOptions
from nanovllm.features.engine_stats import EngineStats, ReplicaStatus
from nanovllm.features.extras import check_extra
from nanovllm.features.forks.forking import Forking
from nanovllm.features.interrupts import InterruptsHeld
from nanovllm.features.resume.resumption import Resuming
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.features.scoring.scoring import Scoring
from nanovllm.features.updates.sleeping import Sleeping
from nanovllm.features.updates.updating import Updating
from nanovllm.models.default_model import DEFAULT_MODEL
from nanovllm.observability.progress import rate_display
from nanovllm.observability.step_records import StepHook
from nanovllm.outputs import RequestOutput
from nanovllm.requests import Prompt
from nanovllm.serving.streaming.engines import EngineInterface
from nanovllm.serving.streaming.idle_thread import take_memory_when_idle

if TYPE_CHECKING:
    from nanovllm.observability.trace_writer import TraceWriter


def open_engine(
    model: Any,
    tokenizer: Any,
    on_step: StepHook | None,
    options: dict[str, Any],
    *,
    trace: Any = None,
    engine_process: bool = False,
    **of_replicas: bool,
) -> EngineInterface:
    """The engine or pool for a front door; arguments as for `AsyncLLM`, `of_replicas` as for `open_pool`."""
    # Imports are local: a front starts its replicas before it loads modules that only engines need.
    if options.get("data_parallel_size", 1) == 1 and not engine_process:
        begin_gpu(model, options)
        with collector_paused():  # transformers is imported here
            from nanovllm.build import build_engine

        return build_engine(model, tokenizer, on_step, options, trace=trace)
    check_extra("engine_process" if engine_process else "data_parallel_size", "serve", "msgspec")
    from nanovllm.serving.replicas.opening import open_pool

    return open_pool(model, tokenizer, on_step, options, trace=trace, **of_replicas)


class LLM(Adapting, Updating, Sleeping, Chatting, Scoring, Resuming, BeamSearching, Forking, nanovllm.llm.LLM):
    """A model with its engine.

    Args:
        model: "smollm2-135m-instruct" (the embedded default), a folder, GGUF file or hub id, or a loaded `transformers`
            causal language model, which is used without a copy and belongs to its owner between calls.
        tokenizer: a tokenizer, a folder, GGUF file or hub id of one; None takes the model's own. A loaded module
            without one takes prompts as token ids only.
        on_step: function of a `StepRecord`, called after each step in the thread that steps. If it raises, the error is
            logged and it is not called again.
        trace: writes the events of every request and step to a file; close it after the LLM.
        **options: see `EngineConfig`.

    Raises TypeError for an unknown option (naming the near ones), ValueError for options that contradict each other or
    the model, ModelLoadError and UnsupportedModelError.

    Calls from several threads, and streams read in between, run together in one batch. Use it in a `with` block, or
    call `close`. In a forked child every call but `close` raises RuntimeError.
    """

    _interrupts: Callable[[], Any] = InterruptsHeld
    _build_engine: Callable[..., Any] = staticmethod(open_engine)

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module = DEFAULT_MODEL,
        *,
        tokenizer: Any = None,
        on_step: StepHook | None = None,
        trace: TraceWriter | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, tokenizer=tokenizer, on_step=on_step, trace=trace, **options)
        take_memory_when_idle(self._open_engine())

    def generate(  # type: ignore[override]  # parameters have the options of features
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
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
            adapter: name of a loaded adapter; None is the model alone.
            priority: priority level; the lowest runs first.
            cache_salt: name of a separate part of the prefix cache; prompts share prefixes only under equal salts.
            timeout: seconds after which a request ends with finish_reason "timeout" and its output so far.
            client: name of a client; clients of one priority share the engine, see `client_weights`.
            use_tqdm: True shows a progress bar on stderr.

        Each option except use_tqdm is one value for all prompts, or a list of one each. A bad prompt or option raises
        before any work starts, and so do more prompts than `max_queue` has room for (QueueFullError). A request with
        non-finite logits ends with finish_reason "error"; any other failure ends all requests of the call and raises.
        """
        options: dict[str, Any] = {"priority": priority, "timeout": timeout, "client": client, "use_tqdm": use_tqdm}
        salt = cache_salt if adapter is None and not cache_salt else self._salted(adapter, cache_salt)
        return super().generate(prompts, sampling_params, cache_salt=salt, **options)

    def stream(  # type: ignore[override]
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        client: str = "",
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding the output so far after each token; closing the iterator ends the request.

        Steps run only while the iterator is read, so a `timeout` ends the request at the next read. Arguments as in
        `generate`.
        """
        options: dict[str, Any] = {"priority": priority, "timeout": timeout, "client": client}
        salt = self._salted(adapter, cache_salt)
        return super().stream(prompt, sampling_params, cache_salt=salt, **options)

    def as_completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Complete prompts as `generate` does, yielding the index of each and its `RequestOutput` when it has ended.

        Its options are those of `generate` but use_tqdm. Closing the iterator ends the prompts that are left.
        """
        processor = self._open_engine().input_processor
        options = self._with_salt(**options)
        requests = processor.process(prompts, sampling_params, request_ids=self._request_ids, **options)
        indices = {request.request_id: index for index, request in enumerate(requests)}
        interrupts = self._interrupts()
        return interrupts.held_in((indices[out.request_id], out) for out in self._run(requests, interrupts))

    @property
    def sampling_defaults(self) -> dict[str, int | float]:
        """The sampling options that the model's generation config sets, by name; empty if they are left out."""
        return dict(self._open_engine().input_processor.limits.sampling_defaults)

    @property
    def can_generate(self) -> bool:
        """Whether the model has a language model head; without one it embeds alone."""
        return self._open_engine().input_processor.limits.has_head

    def stats(self) -> EngineStats:
        with self._interrupts(), self._turn() as engine:
            return engine.stats()

    def replicas(self) -> list[ReplicaStatus]:
        """The state of each replica; empty with data_parallel_size=1."""
        return list(self._open_engine().statuses)

    def weights_changed(self) -> None:
        """Forget all KV and captured graphs after an edit of the model that the engine cannot detect.

        Those are edits of weights that change neither a parameter's version nor its storage, as through `.data`
        (`p.data.mul_(0.9)`), and edits of a module's functions, flags or submodules while requests run; between calls
        the engine detects replaced attributes.
        """
        with self._interrupts(), self._turn() as engine:
            engine.drop_computed()

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Parameters of requests without any; vary them by `dataclasses.replace(llm.default_sampling_params, ...)`."""
        return self._open_engine().input_processor.default_params

    @property
    def config(self) -> EngineConfig:
        """The resolved options."""
        return self._open_engine().config

    def _after_step(self, bar: tqdm) -> Callable[[], None] | None:
        return None if bar.disable else rate_display(bar, self._open_engine().num_output_tokens)
