"""A request as its owner sees it, or one of its samples: the sequence that computes it, its text, its times."""

from __future__ import annotations

import time
from dataclasses import replace
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
        self.num_seen_tokens = 0  # generated tokens of which all was taken note
        self._prompt_token_ids = sequence.token_ids.tolist()  # one list for all of its outputs
        self._tokenizer = tokenizer
        self._skips_special = sequence.params.skip_special_tokens
        self._stop = sequence.params.stop
        self._shows_stop = sequence.params.include_stop_str_in_output
        self._incremental: IncrementalDetokenizer | None = None
        # Text behind this may be the beginning of a stop string that the next tokens complete.
        self._hold_back = 0 if self._shows_stop else max((len(stop) for stop in self._stop), default=1) - 1
        self._stopped_at: int | None = None
        self._read(0)

    def _read(self, num_tokens: int) -> None:
        """Begin the text with the first `num_tokens` generated tokens, if somebody reads along or it may end it."""
        if self._tokenizer is not None and (self.stream or self._stop):
            self._incremental = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=self._skips_special)
            for token_id in self.sequence.output_token_ids[:num_tokens]:
                self._incremental.add(token_id)

    def start_over(self) -> None:
        """Return to the tokens of which all was taken note; a sequence that has ended stays so."""
        sequence = self.sequence
        if not sequence.is_finished:
            sequence.start_over(self.num_seen_tokens)
        if self.num_seen_tokens < sequence.num_output_tokens or not sequence.is_finished:
            self._stopped_at = None
            self._read(self.num_seen_tokens)

    def advance(self) -> str | None:
        """Take note of the sequence's newest token; returns the stop string that it completes, if it does."""
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.monotonic()
        if self._incremental is None:
            return None
        searched = len(self._incremental.text)
        self._incremental.add(self.sequence.token_ids[-1])
        if not self._stop or self.sequence.num_output_tokens < self.sequence.params.min_tokens:
            return None
        # A string that ended before was searched for then, and maybe passed over because of min_tokens.
        text = self._incremental.text
        found = [(text.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in self._stop]
        at, stop = min(((at, stop) for at, stop in found if at >= 0), default=(-1, None))
        if stop is not None:
            self._stopped_at = at + len(stop) if self._shows_stop else at
        return stop

    def give_up_text(self, error: Exception) -> None:
        """The tokenizer failed: the request ends with its tokens alone."""
        self._tokenizer = self._incremental = None
        self.sequence.error = (
            f"request {self.sequence.request_id!r}: the tokenizer could not decode its tokens "
            f"({type(error).__name__}: {error})"
        )

    def output(self) -> RequestOutput:
        sequence = self.sequence
        if sequence.is_finished and self.metrics.finished_time is None:
            self.metrics.finished_time = time.monotonic()
        completion = CompletionOutput(
            index=sequence.index,
            text=self._text(),
            token_ids=sequence.output_token_ids,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=None if sequence.logprobs is None else sequence.logprobs[:],
        )
        return RequestOutput(
            request_id=sequence.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[completion],
            finished=sequence.is_finished,
            num_cached_tokens=sequence.num_cached_tokens,
            metrics=replace(self.metrics),  # a copy, which later tokens leave alone
            error=sequence.error,
            prompt_logprobs=sequence.prompt_logprobs,
        )

    def _text(self) -> str:
        if self._tokenizer is None:
            return ""
        if self._stopped_at is not None and self._incremental is not None:
            return self._incremental.text[: self._stopped_at]
        if self.sequence.is_finished or self._incremental is None:
            return decode(self._tokenizer, self.sequence.output_token_ids, skip_special_tokens=self._skips_special)
        text = self._incremental.text
        return text[: len(text) - self._hold_back]


def merged(samples: list[RequestOutput]) -> RequestOutput:
    """One output of a request from those of its samples in order of their index; the first speaks for the prompt."""
    if len(samples) == 1:
        return samples[0]
    finished = all(sample.finished for sample in samples)
    first_tokens = [sample.metrics.first_token_time for sample in samples]
    ends = [sample.metrics.finished_time for sample in samples]
    return replace(
        samples[0],
        outputs=[completion for sample in samples for completion in sample.outputs],
        finished=finished,
        metrics=replace(
            samples[0].metrics,
            first_token_time=min((time for time in first_tokens if time is not None), default=None),
            finished_time=max(time for time in ends if time is not None) if finished else None,
        ),
        error=next((sample.error for sample in samples if sample.error), None),
    )
