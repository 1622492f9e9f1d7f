"""Request of a pool: its input and its progress, so that it can resume in another replica."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from nanovllm.features.resume.resumption import Resumed, ResumedSample
from nanovllm.features.scoring.scores import AnswerLogits
from nanovllm.outputs import (
    CompletionOutput,
    ErrorKind,
    FinishReason,
    OutputKind,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from nanovllm.requests import InputProcessor
from nanovllm.responses import Request
from nanovllm.sequence import NewRequest
from nanovllm.serving.replicas.messages import SentOutput

# Deaths of replicas without a token for the request, after which the request counts as their cause.
MAX_DEATHS = 3


@dataclass(slots=True)
class PoolSample:
    """Progress of a sample; text stays empty for a final output only."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    weight_versions: list[tuple[int, str | None]] | None = None

    def add_versions(self, later: list[tuple[int, str | None]] | None) -> None:
        """Add runs of weights; called before their tokens are added."""
        if later is not None:
            runs = self.weight_versions or [(0, None)] * bool(self.token_ids)
            self.weight_versions = runs + [run for run in later if run not in runs]


class PoolRequest:
    """An unfinished request of a pool.

    Args:
        new: the request, with a seed, so that every replica samples the same tokens.

    placement: number of its latest assignment to a replica; -1 before the first.
    replica: index of its replica; None while it waits for one.
    samples, metrics: last report of its replica.
    num_deaths: deaths of replicas that may have run it, since its last new token.
    has_begun: True once its current replica has reported a token.
    """

    def __init__(self, new: NewRequest) -> None:
        self.new = new
        self.placement = -1
        self.replica: int | None = None
        self.num_deaths = 0
        self.is_ended = self.has_begun = False
        self.deadline = None if new.timeout is None else new.arrival_time + new.timeout
        reports = new.params.logprobs is not None
        self.samples = [PoolSample(logprobs=[] if reports else None) for _ in range(new.params.n)]
        self.metrics = RequestMetrics(new.arrival_time, num_prompt_tokens=len(new.prompt_token_ids))
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._embedding: NDArray[np.float32] | None = None
        self._answer = AnswerLogits.find_in(new.params)
        self._error: str | None = None
        self._error_kind: ErrorKind | None = None

    def note_death(self) -> str | None:
        """Count a death of its replica; returns an error after MAX_DEATHS, else None."""
        self.num_deaths += 1
        if self.num_deaths < MAX_DEATHS:
            return None
        return f"request {self.new.request_id!r}: {MAX_DEATHS} replicas died with it before they gave it a token"

    @property
    def is_suspect(self) -> bool:
        """Whether one more death would end it."""
        return self.num_deaths == MAX_DEATHS - 1

    def record(self, sent: SentOutput) -> RequestOutput | None:
        """Record an output; returns the reader's output, or None if it is progress toward a final output only."""
        kind = self.new.output_kind
        is_final = self.new.output_kind is OutputKind.FINAL
        self.metrics = RequestMetrics(*sent.metrics)
        self._num_cached_tokens = sent.num_cached_tokens
        self._error = sent.error
        self._error_kind = sent.error_kind
        if sent.prompt_logprobs is not None:
            self._prompt_logprobs = sent.prompt_logprobs
        if sent.embedding is not None:
            self._embedding = np.frombuffer(sent.embedding, np.float32).copy()  # bytes cannot be written to
        if self._answer is not None:
            self._answer.logits = sent.answer_logits
        if is_final and sent.finished:
            return self._output([completion.to_output() for completion in sent.completions], is_finished=True)
        self.has_begun = True
        for completion in sent.completions:
            if completion.token_ids:  # an empty output is no progress: earlier deaths still count
                self.num_deaths = 0
            sample = self.samples[completion.index]
            sample.add_versions(completion.weight_versions)
            sample.text += completion.text
            sample.token_ids += completion.token_ids
            if sample.logprobs is not None:
                sample.logprobs += completion.logprobs or ()
            sample.finish_reason = completion.finish_reason
            sample.stop_reason = completion.stop_reason
        if is_final:
            return None
        if kind is OutputKind.DELTA:
            completions = [completion.to_output() for completion in sent.completions]
        else:
            completions = [self._so_far(completion.index) for completion in sent.completions]
        return self._output(completions, is_finished=sent.finished)

    def record_token(self, text: str, token_id: int, time: float) -> RequestOutput:
        """Record one more token of its only sample, of `TokenColumns`; returns the reader's output."""
        sample = self.samples[0]
        before = self.metrics
        sample.text += text
        sample.token_ids.append(token_id)
        self.num_deaths = 0
        first = before.first_token_time  # fmt: skip
        last = before.last_token_time
        num_gaps = before.num_output_tokens
        longest = before.max_itl
        assert first is not None and last is not None  # its first token set both
        itl = time - last
        self.metrics = RequestMetrics(
            before.arrival_time,
            before.scheduled_time,
            first,
            time,
            None,
            before.num_prompt_tokens,
            before.num_cached_tokens,
            num_gaps + 1,
            before.num_preemptions,
            (time - first) / num_gaps,
            itl if longest is None or itl > longest else longest,
        )
        if self.new.output_kind is OutputKind.DELTA:
            runs = sample.weight_versions and sample.weight_versions[-1:]
            completion = CompletionOutput(0, text, [token_id], None, None, weight_versions=runs)
            return self._output([completion], is_finished=False)
        return self._output([self._so_far(0)], is_finished=False)

    def resumed(self, *, num_preemptions: int = 0) -> Resumed | None:
        """Progress for the next replica, with `num_preemptions` added; None without tokens.

        Without complete prompt log-probabilities the request begins anew, with the same tokens.
        """
        if not any(sample.token_ids for sample in self.samples):
            return None
        samples = [
            ResumedSample(s.token_ids, s.logprobs, s.finish_reason, s.stop_reason, s.weight_versions)
            for s in self.samples
        ]
        before = self.metrics
        metrics = replace(before, num_preemptions=before.num_preemptions + num_preemptions)
        return Resumed(samples, metrics, self._prompt_logprobs, self._error, self._error_kind)

    def end(
        self, reason: FinishReason, now: float, input_processor: InputProcessor, error: str | None = None
    ) -> RequestOutput:
        """Build the last output, with the tokens so far, of a request that the front ends."""
        new = replace(self.new, resumed=self.resumed())
        request = Request(new, input_processor, number=0, arrivals=count())
        for sequence in request.sequences:
            if not sequence.is_finished:
                sequence.finish_reason = reason
                sequence.is_finished = True
                sequence.error = error
                sequence.error_kind = None if error is None else ErrorKind.INTERNAL
        return request.output(now)

    def _so_far(self, index: int) -> CompletionOutput:
        sample = self.samples[index]
        logprobs = None if sample.logprobs is None else sample.logprobs[:]
        return CompletionOutput(
            index,
            sample.text,
            sample.token_ids[:],
            sample.finish_reason,
            sample.stop_reason,
            logprobs,
            sample.weight_versions and sample.weight_versions[:],
        )

    def _output(self, completions: list[CompletionOutput], *, is_finished: bool) -> RequestOutput:
        new = self.new
        prompt_logprobs = self._prompt_logprobs
        return RequestOutput(
            new.request_id,
            new.prompt,
            new.prompt_token_ids,
            completions,
            is_finished,
            self._num_cached_tokens,
            self.metrics,
            self._error,
            None if prompt_logprobs is None else prompt_logprobs[:],
            self._error_kind,
            self._embedding,
        )
