"""The engines that `play` knows, by name, and this engine as it sees it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from nanovllm.tools.bench.peers import VLLM, LlamaCpp, TransformersContinuous, TransformersGenerate
from nanovllm.tools.bench.play import Finished, Player
from nanovllm.tools.workloads.workloads import TimedRequest, Workload

if TYPE_CHECKING:
    from nanovllm.observability.trace_writer import TraceWriter


class NanoVLLM:
    """This engine, stepped by the one who plays."""

    takes_arrivals = True
    warm_up_requests: int | None = None

    def __init__(self, model: str, options: dict[str, Any], longest: int, trace: TraceWriter | None = None) -> None:
        from nanovllm.build import build_engine

        tokenizer = options.pop("tokenizer", None)
        if options.setdefault("record_itl", True) is False:
            raise ValueError("record_itl is False, but times between tokens are to be measured. Leave it out.")
        self._engine = build_engine(model, tokenizer, None, options, trace=trace)
        self._engine.model_runner.binding.caches.take_memory()

    def prepare(self, workload: Workload) -> None:
        from nanovllm.requests.checks import check_prompt
        from nanovllm.sampling_params import SamplingParams

        self._engine.reset_prefix_cache()
        while workload.is_timed and self._engine.model_runner.capture_ahead():
            pass  # as an engine in a thread does while nobody wants anything
        for request in workload.requests:  # min_tokens: it has to fit as a whole
            check_prompt(
                request.prompt_token_ids,
                SamplingParams(max_tokens=request.num_output_tokens, min_tokens=request.num_output_tokens),
                self._engine.input_processor.limits,
            )

    def add(self, number: int, request: TimedRequest) -> None:
        from nanovllm.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=request.num_output_tokens)
        options = {"priority": request.priority, "cache_salt": request.cache_salt}
        processor = self._engine.input_processor
        self._engine.add(processor.process_one(str(number), request.prompt_token_ids, params, **options))

    def step(self) -> list[Finished]:
        engine, ended = self._engine, []
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


# By the names of the command line: the player, and the package that it needs.
PLAYERS: dict[str, tuple[type[Any], str]] = {
    "nanovllm": (NanoVLLM, "nanovllm"),
    "vllm": (VLLM, "vllm"),
    "transformers": (TransformersGenerate, "transformers"),
    "transformers-continuous": (TransformersContinuous, "transformers"),
    "llama.cpp": (LlamaCpp, "llama_cpp"),
}


def check_takes(engine: str, workload: Workload) -> None:
    """Raise ValueError if an engine cannot respect the workload's arrivals."""
    if workload.is_timed and not PLAYERS[engine][0].takes_arrivals:
        raise ValueError(
            f"{engine} generates for static batches, and requests of {workload.name!r} arrive over time. Leave the "
            "engine out, take transformers-continuous, or a workload whose requests are all there from the start."
        )


def open_player(
    engine: str, model: str, options: dict[str, Any], longest: int, *, trace: TraceWriter | None = None
) -> Player:
    """Load an engine.

    Args:
        longest: tokens of the longest sequence that it will be asked for.
        trace: follows what it does, if it is this engine.
    """
    return PLAYERS[engine][0](model, options, longest, **({} if trace is None else {"trace": trace}))
