"""One engine in this process, or a pool of them in others: what the option `data_parallel_size` says."""

from __future__ import annotations

from typing import Any

from nanovllm.observability.step_records import StepHook
from nanovllm.process.gc_control import collector_paused
from nanovllm.process.import_index import import_index_kept
from nanovllm.streaming.engines import AnyEngine


def open_engine(
    model: Any,
    tokenizer: Any,
    on_step: StepHook | None,
    options: dict[str, Any],
    *,
    trace: Any = None,
    **of_replicas: bool,
) -> AnyEngine:
    """The engine behind a front door; arguments as for `LLM`, `of_replicas` as for `open_pool`."""
    # Both are imported here: a front that starts replicas before it imports what they import starts them sooner.
    if options.get("data_parallel_size", 1) == 1:
        with collector_paused(), import_index_kept():  # transformers is imported here
            from nanovllm.build import build_engine

        return build_engine(model, tokenizer, on_step, options, trace=trace)
    from nanovllm.replicas.opening import open_pool  # with msgspec

    return open_pool(model, tokenizer, on_step, options, trace=trace, **of_replicas)
