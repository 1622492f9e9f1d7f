"""Turns sampled tokens into outputs: text, stop strings, times, and one output per request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

from nanovllm.outputs import CompletionOutput, ErrorKind, FinishReason, OutputKind, RequestMetrics, RequestOutput
from nanovllm.requests import IncrementalDetokenizer, InputProcessor, decode, plain_detokenizer
from nanovllm.sampling_params import sample_seeds
from nanovllm.sequence import NewRequest, Sequence


@dataclass(slots=True)
class TokenTimes:
    """Latencies of one step's tokens, in seconds.

    ttfts: time to first token of each sequence that got its first.
    request_ttfts: time to first token of each request that got its first, from any of its samples.
    itls: latency since a sequence's previous token -> number of tokens; sequences that decode together share one.
    num_cut: number of drawn tokens that were dropped, since they follow a stop string.
    """

    ttfts: list[float] = field(default_factory=list)
    request_ttfts: list[float] = field(default_factory=list)
    itls: defaultdict[float, int] = field(default_factory=lambda: defaultdict(int))
    num_cut: int = 0


@dataclass(slots=True)
class StepTimes:
    """Times of a step's scheduling, reading and delivery on the engine's clock, and seconds of its parts."""

    start_time: float
    schedule_time: float = 0.0
    launch_time: float = 0.0
    wait_time: float = 0.0
    read_time: float = 0.0
    delivered_time: float = 0.0  # time of the tokens in metrics of requests
    tokens: TokenTimes = field(default_factory=TokenTimes)


class Sample:
    """One sampled continuation of a request: its sequence, text and times.

    Text is detokenised incrementally if the request streams or has stop strings, else once at the end.

    Args:
        tokenizer: tokenizer of the text; None leaves the text empty.
        detokenizer: function that makes a detokenizer from a tokenizer.
        record_itl: True keeps every inter-token latency, in seconds.
    """

    def __init__(
        self,
        request: NewRequest,
        sequence: Sequence,
        tokenizer: Any = None,
        detokenizer: Callable[..., IncrementalDetokenizer] = plain_detokenizer,
        *,
        record_itl: bool = False,
    ) -> None:
        params = sequence.params
        self.sequence = sequence
        self.is_streamed = request.output_kind is not OutputKind.FINAL
        self.request = request
        self._tokenizer = tokenizer
        self.incremental: IncrementalDetokenizer | None = None
        if tokenizer is not None and (self.is_streamed or params.stop):
            self.incremental = detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        # Characters held back at the end of the text, since they may begin a stop string.
        self._hold_back = 0 if params.include_stop_str_in_output else max(map(len, params.stop), default=1) - 1
        self._stopped_at: int | None = None
        self._ends = getattr(request.prompt_token_ids, "end_token_ids", ()) if params.skip_special_tokens else ()
        self._text_without_tokenizer = ""
        self.num_shown_tokens = self.num_shown_chars = 0  # tokens and characters of earlier deltas
        self.last_token_time: float | None = None
        self.first_token_time: float | None = None
        self.finished_time: float | None = None
        self.max_itl: float | None = None
        self._itls: list[float] | None = [] if record_itl else None

    def advance(self, now: float, num_tokens: int = 0) -> str | None:
        """Process the sequence's newest token, or the last of the first `num_tokens`.

        Returns the stop string that it completes, or None.
        """
        if self.last_token_time is None:
            self.first_token_time = now
        else:
            itl = now - self.last_token_time
            if self.max_itl is None or itl > self.max_itl:
                self.max_itl = itl
            if self._itls is not None:
                self._itls.append(itl)
        self.last_token_time = now
        if self.incremental is None:
            return None
        sequence = self.sequence
        num_output_tokens = (num_tokens or len(sequence.token_ids)) - sequence.num_prompt_tokens
        return self.read(sequence.token_ids[num_tokens - 1], may_stop=num_output_tokens >= sequence.params.min_tokens)

    def read(self, token_id: int, *, may_stop: bool) -> str | None:
        """Detokenise one token; returns the stop string that it completes, or None; always None unless may_stop."""
        incremental = cast(IncrementalDetokenizer, self.incremental)
        params = self.sequence.params
        searched = len(incremental.text)
        incremental.add(token_id)
        if not params.stop or not may_stop:
            return None
        # Search only strings that end in the new text: earlier ones were found before, or ignored due to min_tokens.
        text = incremental.text
        found = [(text.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in params.stop]
        at, stop = min(((at, stop) for at, stop in found if at >= 0), default=(-1, None))
        if stop is not None:
            self._stopped_at = at + len(stop) if params.include_stop_str_in_output else at
        return stop

    def fail_text(self, error: Exception) -> None:
        """Record a failure of the tokenizer: the sample keeps all tokens, and the text sent so far."""
        if self.incremental is not None and self.is_streamed:
            self._text_without_tokenizer = self._shown_text(self.incremental)
        self._tokenizer = self.incremental = None
        self.sequence.error_kind = ErrorKind.INTERNAL
        self.sequence.error = (
            f"request {self.sequence.request_id!r}: the tokenizer could not decode its tokens "
            f"({type(error).__name__}: {error})"
        )

    def output(self, now: float) -> RequestOutput:
        """The output at the time `now`; a delta contains only text and tokens not returned before."""
        sequence = self.sequence  # runs for each streamed token
        request = self.request
        first = self.num_shown_tokens
        if sequence.is_finished and self.finished_time is None:
            self.finished_time = now
        text = self.text()
        token_ids = sequence.token_ids[sequence.num_prompt_tokens + first :].tolist()
        # Some tokenizers do not skip the stop token as special.
        if sequence.stop_reason in self._ends and self._tokenizer is not None:
            text = text.removesuffix(self._tokenizer.decode([sequence.stop_reason]))
        if request.output_kind is OutputKind.DELTA:
            self.num_shown_tokens = first + len(token_ids)
            text, self.num_shown_chars = text[self.num_shown_chars :], len(text)
        logprobs = None if sequence.logprobs is None else sequence.logprobs[first:]
        completion = CompletionOutput(
            sequence.index, text, token_ids, sequence.finish_reason, sequence.stop_reason, logprobs
        )
        return RequestOutput(
            sequence.request_id,
            request.prompt,
            request.prompt_token_ids,
            [completion],
            sequence.is_finished,
            sequence.num_cached_tokens,
            self.metrics(),
            sequence.error,
            None if sequence.prompt_logprobs is None else sequence.prompt_logprobs[:],
            sequence.error_kind,
            sequence.embedding,
        )

    def metrics(self) -> RequestMetrics:
        sequence = self.sequence
        first = self.first_token_time
        last = self.last_token_time
        num_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
        return RequestMetrics(
            sequence.arrival_time,
            sequence.scheduled_time,
            first,
            last,
            self.finished_time,
            sequence.num_prompt_tokens,
            sequence.num_cached_tokens,
            num_tokens,
            sequence.num_preemptions,
            None if first is None or last is None or num_tokens < 2 else (last - first) / (num_tokens - 1),
            self.max_itl,
            None if self.finished_time is None else self._itls,
        )

    def text(self) -> str:
        """The text so far; in a stream it only grows at the end."""
        if self._tokenizer is None:
            return self._text_without_tokenizer
        incremental = self.incremental
        is_finished = self.finished_time is not None
        if incremental is not None and self._stopped_at is not None:
            return incremental.text[: self._stopped_at]
        if incremental is None or (is_finished and not self.is_streamed):
            token_ids = self.sequence.output_token_ids
            skips_special = self.sequence.params.skip_special_tokens
            return decode(self._tokenizer, token_ids, skip_special_tokens=skips_special)
        return incremental.text + incremental.unfinished_text() if is_finished else self._shown_text(incremental)

    def _shown_text(self, incremental: IncrementalDetokenizer) -> str:
        return incremental.text[: max(0, len(incremental.text) - self._hold_back)]


class Request:
    """A request with its id, deadline and samples, in order of their index, one sequence each.

    Args:
        number: number of the request in its engine; seeds the noise of requests without a seed.
        arrivals: counter that numbers the engine's sequences.
    """

    def __init__(
        self,
        new: NewRequest,
        input_processor: InputProcessor,
        *,
        number: int,
        arrivals: Iterator[int],
    ) -> None:
        config = input_processor.config
        parts = input_processor.parts
        self._merge_metrics: Callable[[list[RequestMetrics]], RequestMetrics] = parts.merged_metrics
        self.weight_runs = getattr(input_processor, "weight_runs", None)  # `WeightRuns`, after an update of weights
        self.request_id = new.request_id
        self.deadline = None if new.timeout is None else new.arrival_time + new.timeout  # time on the engine's clock
        self.is_streamed = new.output_kind is not OutputKind.FINAL
        seeds = sample_seeds(new.params.seed, new.params.n, engine_seed=config.seed, request_number=number)
        self.sequences = [
            Sequence(
                new,
                arrival=next(arrivals),
                max_model_len=config.max_model_len,
                eos_token_ids=(
                    *input_processor.limits.eos_token_ids,
                    *getattr(new.prompt_token_ids, "end_token_ids", ()),
                ),
                seed=seed,
                index=index,
            )
            for index, seed in enumerate(seeds)
        ]
        if len(seeds) > 1:
            for sequence in self.sequences:
                sequence.samples = self.sequences
        self.samples = [
            Sample(new, sequence, input_processor.tokenizer, parts.detokenizer, record_itl=config.record_itl)
            for sequence in self.sequences
        ]
        if new.resumed is not None:
            for sample in self.samples:
                new.resumed.restore(sample)
        self.has_token = any(sequence.num_output_tokens for sequence in self.sequences)

    def metrics(self) -> RequestMetrics:
        """The request's metrics so far."""
        each = [sample.metrics() for sample in self.samples]
        return each[0] if len(each) == 1 else self._merge_metrics(each)

    def output(self, now: float) -> RequestOutput:
        """The request's output at the time `now`."""
        outputs = []
        for sample in self.samples:
            try:
                outputs.append(sample.output(now))
            except Exception as error:  # the tokenizer cannot decode a finished sample
                sample.fail_text(error)
                sample.sequence.finish_reason = "error"
                outputs.append(sample.output(now))
        if self.weight_runs is not None:
            self.weight_runs.report(self.samples, outputs)
        if len(outputs) == 1:
            return outputs[0]
        failed = next((output for output in outputs if output.error), outputs[0])
        return replace(
            outputs[0],
            outputs=[completion for output in outputs for completion in output.outputs],
            finished=all(output.finished for output in outputs),
            metrics=self._merge_metrics([output.metrics for output in outputs]),
            error=failed.error,
            error_kind=failed.error_kind,
        )


def deliver(
    requests: Mapping[str, Request],
    advanced: Iterable[Sequence],
    now: float,
    times: TokenTimes,
    finish: Callable[[Sequence, FinishReason], None],
    runs: Mapping[Sequence, int] = MappingProxyType({}),
) -> list[RequestOutput]:
    """Detokenise new tokens; returns outputs of these sequences' requests, if streamed or finished.

    Adds the tokens' latencies to `times`.

    Args:
        requests: id -> request of the engine.
        finish: function that ends a running sequence, at a stop string or where its tokens cannot be decoded.
        runs: sequences that may have several new tokens -> tokens before them.
    """
    reported: dict[Request, None] = {}
    for sequence in advanced:
        request = requests[sequence.request_id]
        num_before = runs.get(sequence)
        num_tokens = len(sequence.token_ids)
        has_token = sequence.finish_reason != "error" or (num_before is not None and num_tokens > num_before)
        reason = advance(request, sequence, now, times, num_before) if has_token else None
        if reason is not None and sequence.is_finished:  # its last token completed the stop string
            sequence.finish_reason = reason
        elif reason is not None:
            finish(sequence, reason)
        # The sequence's own finish reason first: most are still running.
        if request.is_streamed or (
            sequence.finish_reason is not None and all(s.finish_reason is not None for s in request.sequences)
        ):
            reported[request] = None
    return [request.output(now) for request in reported]


def advance(
    request: Request, sequence: Sequence, now: float, times: TokenTimes, num_before: int | None
) -> FinishReason | None:
    """Detokenise the new token, or those after the first `num_before`; returns why the text ends the sequence."""
    if sequence.params.embeds:
        return None
    sample = request.samples[sequence.index]
    if sample.last_token_time is None:
        times.ttfts.append(now - sequence.arrival_time)
        if not request.has_token:
            request.has_token = True
            times.request_ttfts.append(times.ttfts[-1])
    else:
        times.itls[now - sample.last_token_time] += 1
    try:
        stop = sample.advance(now) if num_before is None else _advance_run(sample, now, times, num_before)
    except Exception as error:  # ends only the sample that cannot be decoded
        sample.fail_text(error)
        return "error"
    if stop is None:
        return None
    sequence.stop_reason = stop
    sequence.error = sequence.error_kind = None  # an error of a row after the stop string does not count
    return "stop"


def _advance_run(sample: Sample, now: float, times: TokenTimes, num_before: int) -> str | None:
    """Process the tokens after the first `num_before`; the sequence ends with the first stop string, if any."""
    sequence = sample.sequence
    stop = None
    end = num_before
    try:
        while stop is None and end < len(sequence.token_ids):
            end += 1
            stop = sample.advance(now, end)
    finally:
        times.num_cut += len(sequence.token_ids) - end
        times.itls[0.0] += end - num_before - 1
        sequence.cut(end)
    return stop
