"""A trace of what is measured, without what comes before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from nanovllm.observability.step_records import News
from nanovllm.observability.trace_writer import TraceWriter


class PlayTrace(TraceWriter):
    """Follows an engine within `recording`, and not in the warm-ups before."""

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

    def follow(self, news: News) -> None:
        if self._is_recording:
            super().follow(news)
        else:
            for of_a_kind in (news.added, news.steps, news.ended):
                of_a_kind.clear()
