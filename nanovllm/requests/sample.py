"""One sampled continuation of a request: the sequence that computes it, its text, its times."""

from __future__ import annotations

from typing import Any

from nanovllm.outputs import CompletionOutput, ErrorKind, OutputKind, RequestMetrics, RequestOutput
from nanovllm.requests.detokenizer import IncrementalDetokenizer, decode
from nanovllm.sequence import NewRequest, Sequence


class Sample:
    """Detokenises a sequence as it grows if its request streams or has stop strings, else once at the end.

    Args:
        tokenizer: None leaves the text empty.
        record_itl: keep the seconds between tokens, one by one.
    """

    def __init__(
        self, request: NewRequest, sequence: Sequence, tokenizer: Any = None, *, record_itl: bool = False
    ) -> None:
        self.sequence = sequence
        self.is_streamed = request.output_kind is not OutputKind.FINAL
        self._request = request
        self.num_seen_tokens = sequence.num_prompt_tokens  # of the sequence; behind them is what `advance` takes
        self._tokenizer = tokenizer
        self._skips_special = sequence.params.skip_special_tokens
        self._stop = sequence.params.stop
        self._shows_stop = sequence.params.include_stop_str_in_output
        self._incremental: IncrementalDetokenizer | None = None
        if tokenizer is not None and (self.is_streamed or self._stop):
            self._incremental = IncrementalDetokenizer(tokenizer, skip_special_tokens=self._skips_special)
        # Text behind this may be the beginning of a stop string that the next tokens complete.
        self._hold_back = 0 if self._shows_stop else max((len(stop) for stop in self._stop), default=1) - 1
        self._stopped_at: int | None = None
        self._text_given_up = ""
        self._num_shown_tokens = self._num_shown_chars = 0  # in deltas
        self.last_token_time: float | None = None
        self._first_token_time: float | None = None
        self._finished_time: float | None = None
        self._max_itl: float | None = None
        self._itls: list[float] | None = [] if record_itl else None

    def advance(self, now: float) -> str | None:
        """Take the sequence's newest token; returns the stop string that it completes, if it does."""
        if self.last_token_time is None:
            self._first_token_time = now
        else:
            itl = now - self.last_token_time
            if self._max_itl is None or itl > self._max_itl:
                self._max_itl = itl
            if self._itls is not None:
                self._itls.append(itl)
        self.last_token_time = now
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

    def fail_text(self, error: Exception) -> None:
        """The tokenizer failed: the request ends with all its tokens, and of the text with what was shown."""
        if self._incremental is not None and self.is_streamed:
            self._text_given_up = self._incremental.text[: max(0, len(self._incremental.text) - self._hold_back)]
        self._tokenizer = self._incremental = None
        self.sequence.error_kind = ErrorKind.INTERNAL
        self.sequence.error = (
            f"request {self.sequence.request_id!r}: the tokenizer could not decode its tokens "
            f"({type(error).__name__}: {error})"
        )

    def output(self, now: float) -> RequestOutput:
        """The output at the time `now`; each delta is given once."""
        sequence = self.sequence
        if sequence.is_finished and self._finished_time is None:
            self._finished_time = now
        first = self._num_shown_tokens
        text, token_ids = self._text(), sequence.token_ids[sequence.num_prompt_tokens + first :]
        if self._request.output_kind is OutputKind.DELTA:
            self._num_shown_tokens += len(token_ids)
            text, self._num_shown_chars = text[self._num_shown_chars :], max(len(text), self._num_shown_chars)
        completion = CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=token_ids.tolist(),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=None if sequence.logprobs is None else sequence.logprobs[first:],
        )
        return RequestOutput(
            request_id=sequence.request_id,
            prompt=self._request.prompt,
            prompt_token_ids=self._request.prompt_token_ids,
            outputs=[completion],
            finished=sequence.is_finished,
            num_cached_tokens=sequence.num_cached_tokens,
            metrics=self._metrics(),
            error=sequence.error,
            prompt_logprobs=None if sequence.prompt_logprobs is None else sequence.prompt_logprobs[:],
            error_kind=sequence.error_kind,
        )

    def _metrics(self) -> RequestMetrics:
        sequence = self.sequence
        first, last, num_gaps = self._first_token_time, self.last_token_time, sequence.num_output_tokens - 1
        mean_itl = (last - first) / num_gaps if first is not None and last is not None and num_gaps > 0 else None
        return RequestMetrics(
            arrival_time=sequence.arrival_time,
            scheduled_time=sequence.scheduled_time,
            first_token_time=first,
            last_token_time=last,
            finished_time=self._finished_time,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            num_output_tokens=sequence.num_output_tokens,
            num_preemptions=sequence.num_preemptions,
            mean_itl=mean_itl,
            max_itl=self._max_itl,
            itls=self._itls if sequence.is_finished else None,
        )

    def _text(self) -> str:
        """The text so far; of a stream it never changes what it was before, but goes on."""
        if self._tokenizer is None:
            return self._text_given_up
        if self._stopped_at is not None and self._incremental is not None:
            return self._incremental.text[: self._stopped_at]
        if self._incremental is None or (self.sequence.is_finished and not self.is_streamed):
            return decode(self._tokenizer, self.sequence.output_token_ids, skip_special_tokens=self._skips_special)
        text = self._incremental.text
        if self.sequence.is_finished:
            return text + self._incremental.unfinished_text()
        return text[: max(0, len(text) - self._hold_back)]
