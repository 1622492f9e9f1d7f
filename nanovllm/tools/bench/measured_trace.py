"""Trace writer that records the measured replay and leaves the warm-ups out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from nanovllm.batch import ScheduledBatch
from nanovllm.observability.step_records import StepRecord
from nanovllm.observability.trace_writer import TraceWriter
from nanovllm.sequence import Sequence


class MeasuredTrace(TraceWriter):
    """Traces an engine within `recording` only."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._is_recording = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def request_added(self, sequences: list[Sequence]) -> None:
        if self._is_recording:
            super().request_added(sequences)

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        if self._is_recording:
            super().step_ended(record, batch)

    def request_ended(self, sequence: Sequence, time: float) -> None:
        if self._is_recording:
            super().request_ended(sequence, time)
