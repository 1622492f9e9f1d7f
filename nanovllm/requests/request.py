"""A request as its owner sees it: its id, its samples, its deadline, and one output made of theirs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.outputs import OutputKind, RequestMetrics, RequestOutput
from nanovllm.requests.sample import Sample
from nanovllm.seeds import request_seed, sample_seed
from nanovllm.sequence import NewRequest, Sequence


class Request:
    """The samples of a request, a sequence each, in order of their index.

    Args:
        number: how many requests the engine has had before; unseeded ones draw by it.
        first_arrival: how many sequences it has had before.
    """

    def __init__(
        self,
        new: NewRequest,
        config: EngineConfig,
        *,
        tokenizer: Any,
        eos_token_ids: Iterable[int],
        number: int,
        first_arrival: int,
    ) -> None:
        self.request_id = new.request_id
        self.deadline = None if new.timeout is None else new.arrival_time + new.timeout  # on the engine's clock
        self.is_streamed = new.output_kind is not OutputKind.FINAL
        self.has_token = False  # any of its samples
        seed = request_seed(config.seed, number) if new.params.seed is None else new.params.seed
        self.sequences = [
            Sequence(
                new,
                arrival=first_arrival + index,
                max_model_len=config.max_model_len,
                eos_token_ids=eos_token_ids,
                seed=sample_seed(seed, index),
                index=index,
            )
            for index in range(new.params.n)
        ]
        self.samples = [Sample(new, sequence, tokenizer, record_itl=config.record_itl) for sequence in self.sequences]

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    def output(self, now: float) -> RequestOutput:
        """The request's output at the time `now`."""
        outputs = []
        for sample in self.samples:
            try:
                outputs.append(sample.output(now))
            except Exception as error:  # a tokenizer that cannot decode, of a finished sample
                sample.fail_text(error)
                sample.sequence.finish_reason = "error"
                outputs.append(sample.output(now))
        return outputs[0] if len(outputs) == 1 else _merged(outputs)


def _merged(samples: list[RequestOutput]) -> RequestOutput:
    """One output of a request from those of its samples in order of their index; the first speaks for the prompt."""
    failed = next((sample for sample in samples if sample.error), samples[0])
    return replace(
        samples[0],
        outputs=[completion for sample in samples for completion in sample.outputs],
        finished=all(sample.finished for sample in samples),
        metrics=_merged_metrics([sample.metrics for sample in samples]),
        error=failed.error,
        error_kind=failed.error_kind,
    )


def _merged_metrics(samples: list[RequestMetrics]) -> RequestMetrics:
    def known(name: str) -> list[Any]:
        return [value for value in (getattr(sample, name) for sample in samples) if value is not None]

    num_gaps = [max(0, sample.num_output_tokens - 1) for sample in samples]
    in_gaps = sum(gaps * (sample.mean_itl or 0.0) for gaps, sample in zip(num_gaps, samples, strict=True))
    ends, itls = known("finished_time"), known("itls")
    return replace(
        samples[0],
        scheduled_time=min(known("scheduled_time"), default=None),
        first_token_time=min(known("first_token_time"), default=None),
        last_token_time=max(known("last_token_time"), default=None),
        finished_time=max(ends) if len(ends) == len(samples) else None,
        num_output_tokens=sum(sample.num_output_tokens for sample in samples),
        num_preemptions=sum(sample.num_preemptions for sample in samples),
        mean_itl=in_gaps / sum(num_gaps) if any(num_gaps) else None,
        max_itl=max(known("max_itl"), default=None),
        itls=[itl for of_sample in itls for itl in of_sample] if len(itls) == len(samples) else None,
    )
