"""Registry of the engines under benchmark, by name, and the adapter for this engine."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nanovllm.tools.bench.other_engines import VLLM, LlamaCpp, TransformersContinuous, TransformersGenerate
from nanovllm.tools.bench.replay import BenchEngine, Finished
from nanovllm.tools.workloads.workloads import TimedRequest, Workload

if TYPE_CHECKING:
    from nanovllm.observability.trace_writer import TraceWriter


class NanoVLLM:
    """This engine, stepped by `replay`."""

    takes_arrivals = True
    takes_sampling = True
    warm_up_requests: int | None = None

    def __init__(
        self,
        model: str,
        options: dict[str, Any],
        longest: int,
        *,
        sampling: dict[str, Any] | None = None,
        trace: TraceWriter | None = None,
    ) -> None:
        from nanovllm.build import build_engine
        from nanovllm.fast.host.memory import take_memory
        from nanovllm.features.refusals import check_one_process

        check_one_process("nanovllm bench", options)
        self._sampling = {"temperature": 0.0, **(sampling or {})}
        tokenizer = options.pop("tokenizer", None)
        if options.setdefault("record_itl", True) is False:
            raise ValueError("record_itl is False, but the benchmark measures ITL. Leave it out.")
        self._engine = build_engine(model, tokenizer, None, options, trace=trace)
        take_memory(self._engine.model_runner.binding.caches)

    def prepare(self, workload: Workload) -> None:
        from nanovllm.features.sampling_params import SamplingParams

        self._engine.reset_prefix_cache()
        while workload.is_timed and self._engine.model_runner.capture_ahead():
            pass  # an idle engine thread captures CUDA graphs, too
        for request in workload.requests:  # min_tokens: prompt and output must fit into max_model_len
            length = request.num_output_tokens
            params = SamplingParams(max_tokens=length, min_tokens=length)
            self._engine.input_processor.process(request.prompt_token_ids, params, request_ids=["0"])

    def add(self, number: int, request: TimedRequest) -> None:
        from nanovllm.features.sampling_params import SamplingParams

        params = SamplingParams(**self._sampling, ignore_eos=True, max_tokens=request.num_output_tokens)
        options = {"priority": request.priority, "cache_salt": request.cache_salt, "client": request.client}
        processor = self._engine.input_processor
        self._engine.add(processor.process_one(str(number), request.prompt_token_ids, params, **options))

    def step(self) -> list[Finished]:
        engine = self._engine
        ended = []
        engine.step()
        while engine.outputs:
            output = engine.outputs.popleft()
            if output.error:
                raise RuntimeError(output.error)
            metrics = output.metrics
            times = list(itertools.accumulate(metrics.itls or (), initial=metrics.first_token_time))
            ended.append(Finished(int(output.request_id), times, output.num_cached_tokens))
        return ended

    def counters(self) -> dict[str, int]:
        stats = self._engine.stats()
        return {"steps": stats.num_steps, "computed_tokens": stats.num_scheduled_tokens}

    def config(self) -> dict[str, Any]:
        return dataclasses.asdict(self._engine.config)

    def close(self) -> None:
        self._engine.close()


# Name on the command line -> adapter, and the package that it needs.
ENGINES: dict[str, tuple[type[Any], str]] = {
    "nanovllm": (NanoVLLM, "nanovllm"),
    "vllm": (VLLM, "vllm"),
    "transformers": (TransformersGenerate, "transformers"),
    "transformers-continuous": (TransformersContinuous, "transformers"),
    "llama.cpp": (LlamaCpp, "llama_cpp"),
}


def check_arrivals(engine: str, workload: Workload) -> None:
    """Raise ValueError if an engine cannot follow the workload's arrivals."""
    if workload.is_timed and not ENGINES[engine][0].takes_arrivals:
        raise ValueError(
            f"{engine} generates for static batches, but requests of {workload.name!r} arrive over time. Leave the "
            "engine out, use transformers-continuous, or use a workload without arrivals."
        )


# Options with the same meaning in every engine that takes sampling options.
SHARED_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs",
)  # fmt: skip


def check_sampling(engine: str, sampling: dict[str, Any]) -> None:
    """Raise TypeError or ValueError if an engine does not support the sampling options."""
    from nanovllm.features.sampling_params import SamplingParams
    from nanovllm.sampling_params import FILTERS

    if unknown := sampling.keys() - set(SHARED_SAMPLING):
        raise ValueError(f"--sampling has no option {min(unknown)!r}; there are {', '.join(SHARED_SAMPLING)}.")
    SamplingParams(**sampling)
    if (of_sampling := sampling.keys() & set(FILTERS)) and not sampling.get("temperature"):
        raise ValueError(f"--sampling has {min(of_sampling)}, but is greedy. Give a temperature too, such as 0.8.")
    takers = [name for name, (adapter, _) in ENGINES.items() if adapter.takes_sampling]
    if sampling and engine not in takers:
        raise ValueError(f"{engine} is greedy here, without --sampling; {' and '.join(takers)} take it. Leave one out.")


def load_engine(
    engine: str,
    model: str,
    options: dict[str, Any],
    longest: int,
    *,
    sampling: dict[str, Any] | None = None,
    trace: TraceWriter | None = None,
) -> BenchEngine:
    """Load an engine.

    Args:
        longest: length of the longest sequence, in tokens.
        sampling: options of all requests, which are greedy without; see `check_sampling`.
        trace: trace writer; for this engine only.
    """
    adapter: Callable[..., BenchEngine] = ENGINES[engine][0]
    given = {"sampling": sampling or None, "trace": trace}
    return adapter(model, options, longest, **{name: value for name, value in given.items() if value is not None})
