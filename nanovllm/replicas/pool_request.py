"""A request as the front keeps it: what was asked, and how far it is, so that it can go on in another replica."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm.core.config import EngineConfig
from nanovllm.core.outputs import CompletionOutput, ErrorKind, OutputKind, RequestMetrics, RequestOutput, TokenLogprobs
from nanovllm.core.resumed import Resumed, ResumedSample
from nanovllm.core.sequence import NewRequest
from nanovllm.replicas.messages import SentOutput
from nanovllm.requests.output_processor import Request
from nanovllm.requests.scores import AnswerLogits

# Replicas that may die with a request which got no token from them, until the request itself is what killed them.
MAX_DEATHS = 3


@dataclass(slots=True)
class PoolSample:
    """What is known of a sample; text is that of a stream."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class PoolRequest:
    """An unfinished request of a pool.

    Args:
        new: with a seed of its own, so that it draws the same in any replica.

    placement: changes with each replica that it is sent to.
    replica: index of the one that runs it; None while it waits for one.
    samples, metrics: as last reported.
    num_deaths: replicas that died while they may have run it, since it last got a token that it had not had before.
    has_begun: whether it has a token in its present replica.
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
        self._answer = AnswerLogits.of(new.params)
        self._error: str | None = None
        self._error_kind: ErrorKind | None = None

    def note_death(self) -> str | None:
        """Note that its replica has died; returns the error that ends it, if there were too many."""
        self.num_deaths += 1
        if self.num_deaths < MAX_DEATHS:
            return None
        return f"request {self.new.request_id!r}: {MAX_DEATHS} replicas died with it before they gave it a token"

    @property
    def is_suspect(self) -> bool:
        """Whether one more death would end it."""
        return self.num_deaths == MAX_DEATHS - 1

    def take(self, sent: SentOutput) -> RequestOutput | None:
        """Take an output; returns what the reader gets, or None for the progress of one whose output is final."""
        kind, is_final = self.new.output_kind, self.new.output_kind is OutputKind.FINAL
        self.metrics, self._num_cached_tokens = RequestMetrics(*sent.metrics), sent.num_cached_tokens
        self._error, self._error_kind = sent.error, sent.error_kind
        if sent.prompt_logprobs is not None:
            self._prompt_logprobs = sent.prompt_logprobs
        if sent.embedding is not None:
            self._embedding = np.frombuffer(sent.embedding, np.float32).copy()  # bytes cannot be written to
        if self._answer is not None:
            self._answer.logits = sent.answer_logits
        if is_final and sent.finished:
            return self._output([completion.to_output() for completion in sent.completions], is_finished=True)
        self.has_begun = True
        if any(completion.token_ids for completion in sent.completions):  # else it begins anew in each replica
            self.num_deaths = 0
        for completion in sent.completions:
            sample = self.samples[completion.index]
            sample.text += completion.text
            sample.token_ids += completion.token_ids
            if sample.logprobs is not None:
                sample.logprobs += completion.logprobs or ()
            sample.finish_reason, sample.stop_reason = completion.finish_reason, completion.stop_reason
        if is_final:
            return None
        if kind is OutputKind.DELTA:
            completions = [completion.to_output() for completion in sent.completions]
        else:
            completions = [self._so_far(completion.index) for completion in sent.completions]
        return self._output(completions, is_finished=sent.finished)

    def resumed(self, *, num_preemptions: int = 0) -> Resumed | None:
        """How far it is, with so many preemptions more; None before its first report.

        One whose log-probabilities of the prompt are not complete begins anew, which changes no token.
        """
        if not any(sample.token_ids for sample in self.samples):
            return None
        samples = [ResumedSample(s.token_ids, s.logprobs, s.finish_reason, s.stop_reason) for s in self.samples]
        before = self.metrics
        metrics = replace(before, num_preemptions=before.num_preemptions + num_preemptions)
        return Resumed(samples, metrics, self._prompt_logprobs, self._error, self._error_kind)

    def end(
        self,
        reason: str,
        now: float,
        config: EngineConfig,
        *,
        tokenizer: Any,
        eos_token_ids: Iterable[int],
        error: str | None = None,
    ) -> RequestOutput:
        """Its last output, with what has come: the front ends it by itself, as an engine would."""
        resumed = self.resumed()
        request = Request(
            replace(self.new, resumed=resumed),
            config,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            number=0,
            arrivals=count(),
        )
        for sequence in request.sequences:
            if not sequence.is_finished:
                sequence.finish_reason, sequence.is_finished = reason, True
                sequence.error, sequence.error_kind = error, None if error is None else ErrorKind.INTERNAL
        return request.output(now)

    def _so_far(self, index: int) -> CompletionOutput:
        sample = self.samples[index]
        logprobs = None if sample.logprobs is None else sample.logprobs[:]
        return CompletionOutput(
            index, sample.text, sample.token_ids[:], sample.finish_reason, sample.stop_reason, logprobs
        )

    def _output(self, completions: list[CompletionOutput], *, is_finished: bool) -> RequestOutput:
        new, prompt_logprobs = self.new, self._prompt_logprobs
        return RequestOutput(
            request_id=new.request_id,
            prompt=new.prompt,
            prompt_token_ids=new.prompt_token_ids,
            outputs=completions,
            finished=is_finished,
            num_cached_tokens=self._num_cached_tokens,
            metrics=self.metrics,
            error=self._error,
            prompt_logprobs=None if prompt_logprobs is None else prompt_logprobs[:],
            error_kind=self._error_kind,
            embedding=self._embedding,
        )
