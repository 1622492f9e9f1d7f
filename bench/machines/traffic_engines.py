"""The engines of the traffic benchmark under one interface: this one and vLLM, offline and as streams.

Requests are (prompt token ids, sampling options by the names that both engines share). Imports of vLLM are lazy.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from bench.machines.step_counts import StepWatch, decode_seconds
from nanovllm.tools.bench.replay import Finished, Replay
from nanovllm.tools.workloads.workloads import Workload

Params = dict[str, Any]
VLLM_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}


class Offline(Protocol):
    """An engine that completes a list of prompts."""

    watch: StepWatch

    def generate(self, prompts: list[list[int]], params: list[Params]) -> float:
        """Return the seconds of a call; raises RuntimeError if an output is not `max_tokens` long."""

    def decode_seconds(self, prompts: list[list[int]], params: list[Params]) -> list[float]:
        """Return the seconds of each step in which all of the requests decode, in order."""

    def reset_prefix_cache(self) -> None: ...

    def close(self) -> None: ...


class Streaming(Protocol):
    """An engine that streams, in this process's event loop.

    prepares_when_idle: whether idle time changes it.
    """

    watch: StepWatch
    prepares_when_idle: bool

    def stream(self, prompt: list[int], params: Params) -> AsyncIterator[int]:
        """Yield the number of new tokens of each output."""

    async def reset_prefix_cache(self) -> None: ...

    async def close(self) -> None: ...


def check_lengths(lengths: list[int], params: list[Params]) -> None:
    for number, (length, wanted) in enumerate(zip(lengths, params, strict=True)):
        if length != wanted["max_tokens"]:
            raise RuntimeError(f"request {number} got {length} tokens instead of {wanted['max_tokens']}")


# ---------------------------------------------------------------------------------------------------------- nanovllm


class OurOffline:
    """`LLM`."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from bench.machines.random_models import NoText
        from nanovllm import LLM, SamplingParams

        self.watch = StepWatch()
        self._attached = self.watch.attached()
        self._attached.__enter__()
        self._params = SamplingParams
        self._llm = LLM(model, tokenizer=NoText(), on_step=self.watch.on_step, **options)

    def generate(self, prompts: list[list[int]], params: list[Params]) -> float:
        made = [self._params(**each) for each in params]
        self.watch.num_unfinished = len(prompts)
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, made, use_tqdm=False)
        seconds = time.perf_counter() - begin
        self.watch.num_unfinished = 0
        for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
        check_lengths([len(output.outputs[0].token_ids) for output in outputs], params)
        return seconds

    def decode_seconds(self, prompts: list[list[int]], params: list[Params]) -> list[float]:
        self.generate(prompts, params)
        return decode_seconds(self.watch.records, len(prompts))

    def reset_prefix_cache(self) -> None:
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        self._llm.close()
        self._attached.__exit__(None, None, None)


class OurStreaming:
    """`AsyncLLM`, which captures further graphs while idle."""

    prepares_when_idle = True

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from bench.machines.random_models import NoText
        from nanovllm import AsyncLLM, SamplingParams

        self.watch = StepWatch()
        self._attached = self.watch.attached()
        self._attached.__enter__()
        self._params = SamplingParams
        options = {"prepares_when_idle": self.prepares_when_idle} | options
        self._llm = AsyncLLM(model, tokenizer=NoText(), on_step=self.watch.on_step, **options)

    async def stream(self, prompt: list[int], params: Params) -> AsyncIterator[int]:
        async for output in self._llm.generate(prompt, self._params(**params), output_kind="delta"):
            if output.error:
                raise RuntimeError(output.error)
            yield len(output.outputs[0].token_ids)

    async def reset_prefix_cache(self) -> None:
        await self._llm.reset_prefix_cache()

    async def close(self) -> None:
        await self._llm.close()
        self._attached.__exit__(None, None, None)


# -------------------------------------------------------------------------------------------------------------- vLLM


def vllm_options(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in VLLM_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return {"skip_tokenizer_init": True, "enable_prefix_caching": True, "disable_log_stats": True} | options


class VllmOffline:
    """vLLM's `LLM`."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        options = vllm_options(options)
        from vllm import LLM, SamplingParams

        self.watch = StepWatch()  # without records: nothing is counted
        self._params = SamplingParams
        self._llm = LLM(model, **options)
        self._num_added = 0

    def generate(self, prompts: list[list[int]], params: list[Params]) -> float:
        made = [self._params(detokenize=False, **each) for each in params]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        begin = time.perf_counter()
        outputs = self._llm.generate(asked, made, use_tqdm=False)
        seconds = time.perf_counter() - begin
        check_lengths([len(output.outputs[0].token_ids) for output in outputs], params)
        return seconds

    def decode_seconds(self, prompts: list[list[int]], params: list[Params]) -> list[float]:
        """The seconds between two returns of the engine's `step` that each gave every request a token."""
        engine = self._llm.llm_engine
        for prompt, each in zip(prompts, params, strict=True):
            made = self._params(detokenize=False, **each)
            engine.add_request(str(self._num_added), {"prompt_token_ids": prompt}, made)
            self._num_added += 1
        seconds, last, is_whole = [], 0.0, False
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            was_whole, is_whole = is_whole, len(outputs) == len(prompts)
            if was_whole and is_whole:
                seconds.append(now - last)
            last = now
        return seconds

    def reset_prefix_cache(self) -> None:
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        pass  # its processes end with this one


class VllmStreaming:
    """vLLM's `AsyncLLM`, with the defaults of its server; all its captures come at start-up."""

    prepares_when_idle = False

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        options = vllm_options(options)
        from vllm import AsyncEngineArgs, SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        self.watch = StepWatch()
        self._params = SamplingParams
        self._kind = RequestOutputKind.DELTA
        arguments = AsyncEngineArgs(model=model, **options)
        self._llm = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)
        self._num_added = 0

    async def stream(self, prompt: list[int], params: Params) -> AsyncIterator[int]:
        self._num_added += 1
        made = self._params(detokenize=False, output_kind=self._kind, **params)
        async for output in self._llm.generate({"prompt_token_ids": prompt}, made, str(self._num_added)):
            yield len(output.outputs[0].token_ids)

    async def reset_prefix_cache(self) -> None:
        await self._llm.reset_prefix_cache()

    async def close(self) -> None:
        self._llm.shutdown()


OFFLINE: dict[str, type[Any]] = {"nanovllm": OurOffline, "vllm": VllmOffline}
STREAMING: dict[str, type[Any]] = {"nanovllm": OurStreaming, "vllm": VllmStreaming}


async def play(engine: Streaming, workload: Workload, params: list[Params]) -> Replay:
    """Send each request when it is due and read its stream; arrivals and token times are of the client's clock."""
    start = time.monotonic()

    async def client(number: int) -> Finished:
        request, times = workload.requests[number], []
        await asyncio.sleep(start + request.arrival - time.monotonic())
        engine.watch.num_unfinished += 1
        try:
            async for num_tokens in engine.stream(request.prompt_token_ids, params[number]):
                times += [time.monotonic()] * num_tokens
        finally:
            engine.watch.num_unfinished -= 1
        return Finished(number, times)

    finished = await asyncio.gather(*map(client, range(len(workload.requests))))
    arrivals = [start + request.arrival for request in workload.requests]
    return Replay(time.monotonic() - start, arrivals, finished)
