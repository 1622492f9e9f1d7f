"""A step in the form that rank 0 sends to the other ranks, which have no requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nanovllm.batch import Copy, ScheduledBatch
from nanovllm.features.embeddings.embeddings import EmbeddedRows
from nanovllm.features.logprobs.logprobs import PromptRows, StepLogprobs
from nanovllm.layout import BatchLayout
from nanovllm.sampler import DrawInputs


@dataclass(frozen=True, slots=True)
class StepOrder:
    """One step for the other ranks.

    layout: its entries have no sequence.
    draws: None if rank 0 samples.
    prompt, embedded: further rows of the report, without their sequences.
    slots: slots of the rows' adapters; None for a step without adapters.
    """

    layout: BatchLayout
    copies: tuple[Copy, ...]
    draws: DrawInputs | None
    prompt: PromptRows | None
    embedded: EmbeddedRows | None
    slots: Any

    @classmethod
    def from_step(
        cls,
        batch: ScheduledBatch,
        layout: BatchLayout,
        draws: DrawInputs | None,
        report: StepLogprobs | None,
        slots: Any,
    ) -> StepOrder:
        prompt, embedded = (None, None) if report is None else (report.prompt, report.embedded)
        return cls(
            _without_sequences(layout), batch.copies, draws,
            None if prompt is None else replace(prompt, spans=[]),
            None if embedded is None else embedded.without_sequences(), slots,
        )  # fmt: skip


def _without_sequences(layout: BatchLayout) -> BatchLayout:
    entries = [entry._replace(sequence=None) for entry in layout.entries]  # type: ignore[arg-type]
    return replace(layout, entries=entries, others=tuple(map(_without_sequences, layout.others)))
