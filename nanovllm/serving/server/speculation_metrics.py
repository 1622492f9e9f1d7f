"""Figures of drafts for Prometheus, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from nanovllm.features.engine_stats import SpeculationStats


def speculation_figures(prefix: str, model_name: str, stats: SpeculationStats | None) -> Iterator[Metric]:
    if stats is None:
        return
    counters = {
        "num_drafts": ("Entries of steps with drafts.", stats.num_drafts),
        "num_draft_tokens": ("Draft tokens computed.", stats.num_draft_tokens),
        "num_accepted_tokens": ("Draft tokens that equal the model's draws.", stats.num_accepted_tokens),
        "num_failures": ("Calls of a drafter that failed.", stats.num_failures),
    }
    for name, (text, value) in counters.items():
        counter = CounterMetricFamily(f"{prefix}spec_decode_{name}", text, labels=["model_name"])
        counter.add_metric([model_name], value)
        yield counter
    name = f"{prefix}spec_decode_num_accepted_tokens_per_pos"
    text = "Accepted draft tokens by place in their draft."
    by_depth = CounterMetricFamily(name, text, labels=["model_name", "position"])
    for position, count in enumerate(stats.accepted_by_depth):
        by_depth.add_metric([model_name, str(position)], count)
    yield by_depth
    labels = ["model_name", "source"]
    drafted = CounterMetricFamily(f"{prefix}spec_decode_source_draft_tokens", "Draft tokens by source.", labels=labels)
    accepted = CounterMetricFamily(
        f"{prefix}spec_decode_source_accepted_tokens", "Accepted draft tokens by source.", labels=labels
    )
    for source, (num_drafted, num_accepted) in stats.by_source.items():
        drafted.add_metric([model_name, source], num_drafted)
        accepted.add_metric([model_name, source], num_accepted)
    yield drafted
    yield accepted
