"""A request as its owner sees it: the sequence that computes it, its text, its times."""

from __future__ import annotations

import time
from typing import Any

from nanovllm.detokenizer import IncrementalDetokenizer, decode
from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm.sequence import Sequence


class Request:
    """Follows one sequence: detokenises it when somebody reads along or a stop string may end it, else at the end."""

    def __init__(self, sequence: Sequence, prompt: str | None, tokenizer: Any, *, stream: bool) -> None:
        self.sequence = sequence
        self.prompt = prompt
        self.stream = stream
        self.metrics = RequestMetrics(arrival_time=time.monotonic())
        self._tokenizer = tokenizer
        self._stop = sequence.params.stop
        self._incremental = IncrementalDetokenizer(tokenizer) if tokenizer and (stream or self._stop) else None
        # Text behind this may be the beginning of a stop string that the next tokens complete.
        self._hold_back = max((len(stop) for stop in self._stop), default=1) - 1
        self._stopped_at: int | None = None

    def advance(self) -> str | None:
        """Take note of the sequence's newest token; returns the stop string that it completes, if it does."""
        now = time.monotonic()
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        if self._incremental is None:
            return None
        searched = len(self._incremental.text) - self._hold_back
        self._incremental.add(self.sequence.token_ids[-1])
        if not self._stop or self.sequence.num_output_tokens < self.sequence.params.min_tokens:
            return None
        found = [(self._incremental.text.find(stop, max(0, searched)), stop) for stop in self._stop]
        at, stop = min(((at, stop) for at, stop in found if at >= 0), default=(-1, None))
        if stop is not None:
            self._stopped_at = at
        return stop

    def output(self) -> RequestOutput:
        sequence = self.sequence
        if sequence.is_finished and self.metrics.finished_time is None:
            self.metrics.finished_time = time.monotonic()
        completion = CompletionOutput(
            index=0,
            text=self._text(),
            token_ids=sequence.output_token_ids,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
        return RequestOutput(
            request_id=sequence.request_id,
            prompt=self.prompt,
            prompt_token_ids=sequence.token_ids[: sequence.num_prompt_tokens].tolist(),
            outputs=[completion],
            finished=sequence.is_finished,
            num_cached_tokens=sequence.num_cached_tokens,
            metrics=self.metrics,
            error=sequence.error,
        )

    def _text(self) -> str:
        if self._tokenizer is None:
            return ""
        if self._stopped_at is not None and self._incremental is not None:
            return self._incremental.text[: self._stopped_at]
        if self.sequence.is_finished or self._incremental is None:
            return decode(self._tokenizer, self.sequence.output_token_ids)
        text = self._incremental.text
        return text[: len(text) - self._hold_back]
