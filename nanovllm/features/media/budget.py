"""Admission of requests with pictures: while others run, they start once their pictures are encoded."""

from __future__ import annotations

from itertools import islice
from typing import Any

from nanovllm.features.media.features import Encoder
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence

_AHEAD = 16  # requests in the queue with pictures for one call of the encoder


class EncodedFirst:
    """A `Budget` in front of another: a request that lacks features waits.

    Each step encodes one picture that a waiting request lacks, so streams wait for one call of the encoder at most. A
    request starts at once where nothing runs, and its pictures are encoded in the steps that compute their rows.
    """

    def __init__(self, scheduler: Scheduler, encoder: Encoder) -> None:
        self._scheduler = scheduler
        self._inner: Any = scheduler.budget
        self._encoder = encoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def has_time(self, sequence: Sequence) -> bool:
        if sequence.media is not None and self._scheduler.running:
            books = self._scheduler.block_manager
            start = len(books.lookup(sequence)) * books.block_size
            lacking = sequence.media.within(start, sequence.num_prompt_tokens)
            if not self._encoder.is_ready(span.picture for span in lacking):
                for other in islice(self._scheduler.waiting.in_order(), _AHEAD):
                    if other.media is not None:
                        self._encoder.is_ready(span.picture for span in other.media.spans)
                return False
        return bool(self._inner.has_time(sequence))
