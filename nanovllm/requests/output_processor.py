"""Turns the tokens that a step gave into outputs: text, stop strings, and who is to be told."""

from __future__ import annotations

from nanovllm.observability.step_records import StepRecorder
from nanovllm.outputs import RequestOutput
from nanovllm.requests.request_table import RequestTable
from nanovllm.requests.sample import Request, merged
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence, SequenceStatus


class OutputProcessor:
    """Lets requests read their new tokens, and ends in the scheduler those that end by their text.

    Args:
        recorder: counts the seconds before each token.
    """

    def __init__(self, requests: RequestTable, scheduler: Scheduler, recorder: StepRecorder) -> None:
        self._requests, self._scheduler, self._recorder = requests, scheduler, recorder

    def collect(self, advanced: list[Sequence], now: float) -> list[RequestOutput]:
        """Outputs of the requests that ended, and of those that stream, among the owners of some sequences."""
        requests: dict[str, list[Request]] = {}  # those that somebody may have to be told of
        for sequence in advanced:
            sample = self._requests.sample_of(sequence)
            try:
                self._advance(sample, now)
            except Exception as error:
                self._give_up_text(sample, error)
            if sample.is_streamed or sequence.status is SequenceStatus.FINISHED:
                requests[sequence.request_id] = self._requests[sequence.request_id]
        return [
            self.output_of(samples, now)
            for samples in requests.values()
            if samples[0].is_streamed or all(sample.sequence.is_finished for sample in samples)
        ]

    def output_of(self, samples: list[Request], now: float) -> RequestOutput:
        """What there is to tell of a request."""
        return merged([self._output_of_sample(sample, now) for sample in samples])

    def _output_of_sample(self, sample: Request, now: float) -> RequestOutput:
        try:
            return sample.output(now)
        except Exception as error:
            self._give_up_text(sample, error)
            return sample.output(now)

    def _give_up_text(self, sample: Request, error: Exception) -> None:
        """A tokenizer that cannot decode ends the sample that it cannot decode, not its neighbours."""
        sample.give_up_text(error)
        if not sample.sequence.is_finished:
            self._scheduler.finish(sample.sequence, "error")
        sample.sequence.finish_reason = "error"

    def _advance(self, sample: Request, now: float) -> None:
        """Let a sample read its new token, if it got one, and end it if that completes a stop string."""
        sequence = sample.sequence
        num_tokens = sequence.num_output_tokens
        if sample.num_seen_tokens == num_tokens:
            return
        if sample.last_token_time is not None:
            self._recorder.note_itl(now - sample.last_token_time)
        else:
            samples = self._requests[sequence.request_id]
            is_requests_first = all(other.last_token_time is None for other in samples)
            self._recorder.note_first_token(now - sequence.arrival_time, is_requests_first)
        stop = sample.advance(now)
        if stop is not None:
            sequence.stop_reason = stop
            if sequence.is_finished:  # its last token by length, or a stop token, completed the string
                sequence.finish_reason = "stop"
            else:
                self._scheduler.finish(sequence, "stop")
        sample.num_seen_tokens = num_tokens
