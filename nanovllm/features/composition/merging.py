"""The metrics of a request, from those of its samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanovllm.outputs import RequestMetrics


def merged_metrics(samples: list[RequestMetrics]) -> RequestMetrics:
    """Sums, first and last times of all samples; fields of the prompt are the first one's."""

    def known(name: str) -> list[Any]:
        return [value for value in (getattr(sample, name) for sample in samples) if value is not None]

    num_gaps = [max(0, sample.num_output_tokens - 1) for sample in samples]
    in_gaps = sum(gaps * (sample.mean_itl or 0.0) for gaps, sample in zip(num_gaps, samples, strict=True))
    ends = known("finished_time")
    itls = known("itls")
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
