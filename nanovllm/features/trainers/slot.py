"""The slot `generate_batch` of a trainer's model, served by an engine on the live module."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, cast

from torch import nn
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from nanovllm.features.logprobs.draws import DrawnLogprob
from nanovllm.features.trainers.generation_options import (
    checked_options,
    end_tokens,
    log_hints,
    sampling_params,
    seed_of,
)
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import sample_seeds
from nanovllm.serving.llm import LLM

SLOT = "generate_batch"


@dataclass
class Rollout(GenerationOutput):
    """`GenerationOutput` with the numbers that importance ratios need, one a token.

    logprobs: log-probabilities under the distribution of the draws: after penalties, temperature and filters.
    model_logprobs: log-probabilities of the model's own distribution, before them.
    log_kept: logs of the mass that filters keep; logprobs + log_kept has no filters in it.
    """

    model_logprobs: list[float] = field(default_factory=list)
    log_kept: list[float] = field(default_factory=list)


class Slot:
    """Stands in for `generate_batch` of one model. Copies and pickles of the model have a slot with its own engine.

    Args:
        model: causal language model that is loaded; it belongs to its trainer between calls.
        options: options of the engine.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        self._model = model
        self._options = options
        self._llm: LLM | None = None
        self._form: Any = None  # dtype and device for which the engine was built

    def __reduce__(self) -> Any:
        return Slot, (self._model, self._options)

    def __call__(
        self,
        inputs: Sequence[Sequence[int]],
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **kwargs: Any,
    ) -> dict[str, Rollout]:
        """Complete prompts of token ids, with the signature of `transformers`.

        Args:
            generation_config: `GenerationConfig`; None takes the model's.
            continuous_batching_config: hint without an effect, like persistent_manager and warmup.
            record_timestamps: flag for the times of tokens, of `time.perf_counter`.
            **kwargs: values that replace those of generation_config.

        Returns results by request id: prompt i is "req_i", its further sequences "req_i__child#j" precede it.
        """
        log_hints(["continuous_batching_config"] if continuous_batching_config is not None else [])
        config = self._model.generation_config if generation_config is None else generation_config
        options = checked_options(config, kwargs)
        params = sampling_params(options, end_tokens(self._model, options))
        count = options["num_return_sequences"] or 1
        if count > 1 and params.is_greedy:
            raise ValueError(f"num_return_sequences is {count} without do_sample: all would be the same. Use 1.")
        if not inputs:
            return {}
        seeds = sample_seeds(seed_of(options), len(inputs) * count, engine_seed=0, request_number=0)
        prompts = [{"prompt_token_ids": [int(token) for token in prompt]} for prompt in inputs for _ in range(count)]
        created = time.perf_counter()
        outputs = self._engine().generate(
            prompts, [replace(params, seed=seed) for seed in seeds], use_tqdm=progress_bar
        )
        results = _results(outputs, count, created)
        if not record_timestamps:
            for result in results.values():
                result.timestamps = None
        return results

    def _engine(self) -> LLM:
        """The engine of the module in its present dtype and on its present device."""
        first = next(self._model.parameters())
        if self._llm is None or self._form != (first.dtype, first.device):
            self.close()
            self._llm = LLM(self._model, **{"record_itl": True} | self._options)
            self._form = (first.dtype, first.device)
        return self._llm

    def close(self) -> None:
        """Free the engine's memory; the next call builds another."""
        if self._llm is not None:
            self._llm.close()
            self._llm = None


def install(model: nn.Module, **options: Any) -> None:
    """Replace `model.generate_batch` by an engine on the live module, built at the first call and kept.

    Trainers that generate through this method of `transformers`, such as TRL's GRPO, run on the engine unchanged. The
    module stays its trainer's: the next call sees changed weights.

    Args:
        **options: see `EngineConfig`. On a GPU, leave memory to the trainer by num_kv_blocks or gpu_memory_utilization.

    Raises TypeError if the model is not a module with a generation config.
    """
    if not isinstance(model, nn.Module) or getattr(model, "generation_config", None) is None:
        raise TypeError(
            f"model is {type(model).__name__}; a loaded causal language model of transformers is needed, with its "
            "generation_config."
        )
    uninstall(model)
    setattr(model, SLOT, Slot(model, options))


def uninstall(model: nn.Module) -> None:
    """Restore the model's own `generate_batch` and free the engine. No-op without one."""
    slot = vars(model).get(SLOT)
    if isinstance(slot, Slot):
        slot.close()
        delattr(model, SLOT)


def _results(outputs: list[RequestOutput], count: int, created: float) -> dict[str, Rollout]:
    """Results by request id in the order of `transformers`: a prompt's children, then the parent."""
    children = [f"__child#{child}" for child in range(count - 1)]
    names = (f"req_{index}{end}" for index in range(len(outputs) // count) for end in (*children, ""))
    return {name: _result(name, output, created) for name, output in zip(names, outputs, strict=True)}


def _result(name: str, output: RequestOutput, created: float) -> Rollout:
    completion = output.outputs[0]
    metrics = output.metrics
    shift = time.perf_counter() - time.monotonic()
    start = metrics.scheduled_time if metrics.scheduled_time is not None else metrics.arrival_time
    end = metrics.finished_time if metrics.finished_time is not None else start
    first = metrics.first_token_time
    reports = zip(completion.logprobs or (), completion.token_ids, strict=True)
    entries = [cast(DrawnLogprob, report[token_id]) for report, token_id in reports]
    return Rollout(
        request_id=name,
        prompt_ids=output.prompt_token_ids,
        generated_tokens=completion.token_ids,
        logprobs=[entry.drawn for entry in entries],
        model_logprobs=[entry.logprob for entry in entries],
        log_kept=[entry.log_kept for entry in entries],
        error=output.error,
        status=RequestStatus.FINISHED if output.error is None else RequestStatus.FAILED,
        created_time=created,
        lifespan=(start + shift, end + shift),
        timestamps=[] if first is None else [time + shift for time in accumulate(metrics.itls or (), initial=first)],
    )
