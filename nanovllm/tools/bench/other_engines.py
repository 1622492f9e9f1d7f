"""Adapters for other engines: vLLM, transformers, llama.cpp. Imports are lazy: each has its own environment."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from nanovllm.models.source import is_gguf
from nanovllm.tools.bench.replay import Finished
from nanovllm.tools.workloads.workloads import TimedRequest, Workload

# Warm-up requests of llama.cpp and transformers: the first few suffice, and the whole workload takes too long.
SLOW_WARM_UP_REQUESTS = 4


class VLLM:
    """vLLM's engine, stepped by `replay`; on a CPU with its threads bound, as its documentation recommends."""

    takes_arrivals = True
    takes_sampling = True
    warm_up_requests: int | None = None

    def __init__(
        self, model: str, options: dict[str, Any], longest: int, *, sampling: dict[str, Any] | None = None
    ) -> None:
        self._sampling = {"temperature": 0.0, **(sampling or {})}
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; zero-filled at start-up
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        options = {"max_model_len": max(2048, longest), "enable_prefix_caching": True} | options
        self._options = options
        self._llm = LLM(model, **options)
        self._ids = itertools.count()  # unique over all runs
        self._running: dict[str, tuple[int, list[float]]] = {}
        self._num_steps = 0

    def prepare(self, workload: Workload) -> None:
        self._llm.reset_prefix_cache()

    def add(self, number: int, request: TimedRequest) -> None:
        request_id = str(next(self._ids))
        length = request.num_output_tokens
        params = self._params(**self._sampling, ignore_eos=True, max_tokens=length)
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_token_ids}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        self._running[request_id] = (number, [])
        self._llm.llm_engine.add_request(request_id, prompt, params, priority=request.priority)

    def step(self) -> list[Finished]:
        outputs = self._llm.llm_engine.step()
        self._num_steps += 1
        now = time.monotonic()
        ended = []
        for output in outputs:
            number, times = self._running[output.request_id]
            times += [now] * (len(output.outputs[0].token_ids) - len(times))
            if output.finished:
                del self._running[output.request_id]
                ended.append(Finished(number, times, output.num_cached_tokens or 0))
        return ended

    def counters(self) -> dict[str, int]:
        return {"steps": self._num_steps}

    def config(self) -> dict[str, Any]:
        return self._options

    def close(self) -> None:
        pass  # its processes end with the worker


class _TransformersModel:
    """Base of the two adapters for `transformers`: loads the model and keeps its options."""

    warm_up_requests: int | None = SLOW_WARM_UP_REQUESTS

    def __init__(self, model: str, options: dict[str, Any], longest: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._options = dict(options)
        module = AutoModelForCausalLM.from_pretrained(model, dtype=options.pop("dtype", "auto"))
        self._module = module.to("cuda" if torch.cuda.is_available() else "cpu")
        self._own = options

    def counters(self) -> dict[str, int]:
        return {}

    def config(self) -> dict[str, Any]:
        return self._options


class TransformersGenerate(_TransformersModel):
    """`generate` on static, left-padded batches; a batch runs until its longest output ends.

    Options: dtype, batch_size (16).
    """

    takes_arrivals = False
    takes_sampling = False

    def __init__(self, model: str, options: dict[str, Any], longest: int) -> None:
        if unknown := sorted(options.keys() - {"dtype", "batch_size"}):
            raise ValueError(f"no option {unknown[0]!r}; there are dtype and batch_size.")
        super().__init__(model, options, longest)

    def prepare(self, workload: Workload) -> None:
        self._waiting: deque[tuple[int, TimedRequest]] = deque()

    def add(self, number: int, request: TimedRequest) -> None:
        self._waiting.append((number, request))

    def step(self) -> list[Finished]:
        import torch

        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._own.get("batch_size", 16)))]
        prompts = [request.prompt_token_ids for _, request in batch]
        width = max(map(len, prompts))
        length = max(request.num_output_tokens for _, request in batch)
        device = self._module.device
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        times: list[float] = []

        def clock(ids: Any, scores: Any) -> Any:
            times.append(time.monotonic())
            return scores

        with torch.no_grad():
            self._module.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=length, min_new_tokens=length,
                pad_token_id=0, logits_processor=[clock],
            )  # fmt: skip
        return [Finished(number, times[: request.num_output_tokens]) for number, request in batch]

    def close(self) -> None:
        pass


class TransformersContinuous(_TransformersModel):
    """Continuous batching of `transformers`, in its own thread; options: dtype and those of `ContinuousBatchingConfig`.

    Session start-up is not measured. Its timestamps come from `time.perf_counter`, on Linux the clock of
    `time.monotonic`.
    """

    takes_arrivals = True
    takes_sampling = False

    def __init__(self, model: str, options: dict[str, Any], longest: int) -> None:
        super().__init__(model, options, longest)
        self._session = ExitStack()

    def prepare(self, workload: Workload) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self._session.close()
        longest = max(request.num_output_tokens for request in workload.requests)
        manager = self._module.continuous_batching_context_manager(
            generation_config=GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(**self._own),
        )
        self._manager = self._session.enter_context(manager)

    def add(self, number: int, request: TimedRequest) -> None:
        length = request.num_output_tokens
        self._manager.add_request(
            request.prompt_token_ids, str(number), length, record_timestamps=True, eos_token_id=-1
        )

    def step(self) -> list[Finished]:
        if not self._manager.is_running():
            raise RuntimeError("the batching thread ended with unfinished requests")
        result = self._manager.get_result(timeout=0.005)
        if result is None:
            return []
        if result.error:
            raise RuntimeError(result.error)
        return [Finished(int(result.request_id), result.timestamps)] if result.is_finished() else []

    def close(self) -> None:
        self._session.close()


class LlamaCpp:
    """llama.cpp through `llama-cpp-python`: one request at a time, in order of arrival.

    Options: gguf (the same model as a GGUF file; required unless the model is one) and those of `llama_cpp.Llama`. The
    prefix shared with the previous request is reused.
    """

    takes_arrivals = True
    takes_sampling = False
    warm_up_requests: int | None = SLOW_WARM_UP_REQUESTS

    def __init__(self, model: str, options: dict[str, Any], longest: int) -> None:
        from llama_cpp import Llama

        self._options = {"n_ctx": longest + 1, "verbose": False} | options
        options = dict(self._options)
        options.pop("dtype", None)  # the GGUF file determines it
        file = options.pop("gguf", model if is_gguf(model) else None)
        if file is None:
            raise ValueError("llama.cpp needs the model as a GGUF file: --engines llama.cpp:gguf=FILE.")
        self._llm = Llama(file, **options)

    def prepare(self, workload: Workload) -> None:
        self._llm.reset()
        self._waiting: deque[tuple[int, TimedRequest]] = deque()
        self._tokens: Iterator[int] | None = None
        self._times: list[float] = []

    def add(self, number: int, request: TimedRequest) -> None:
        self._waiting.append((number, request))

    def step(self) -> list[Finished]:
        number, request = self._waiting[0]
        if self._tokens is None:
            kept = zip(self._llm.input_ids[: self._llm.n_tokens].tolist(), request.prompt_token_ids[:-1], strict=False)
            self._num_cached = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], kept))
            self._tokens = self._llm.generate(request.prompt_token_ids, temp=0.0)
        next(self._tokens)
        self._times.append(time.monotonic())
        if len(self._times) < request.num_output_tokens:
            return []
        ended = Finished(number, self._times, self._num_cached)
        self._waiting.popleft()
        self._tokens = None
        self._times = []
        return [ended]

    def counters(self) -> dict[str, int]:
        return {}

    def config(self) -> dict[str, Any]:
        return self._options

    def close(self) -> None:
        self._llm.close()
