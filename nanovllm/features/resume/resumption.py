"""Restores the progress of a sequence: one moved from another engine, or one that a limit cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.features.refusals import REPLICAS, refuse
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.outputs import ErrorKind, FinishReason, OutputKind, RequestMetrics, RequestOutput, TokenLogprobs
from nanovllm.responses import Sample

ENDED = ("stop", "error")  # finish reasons after which no token follows


@dataclass(frozen=True, slots=True)
class ResumedSample:
    """Tokens of a sample from another engine; with a finish_reason it has ended there."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    weight_versions: list[tuple[int, str | None]] | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """Progress and metrics of a request when its engine died, for the engine that continues it.

    samples: samples of the request, in order of their index.
    prompt_logprobs: log-probabilities of prompt tokens, complete if any sample has a token.
    error: message of a sample with finish_reason "error".
    """

    samples: list[ResumedSample]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    error_kind: ErrorKind | None = None

    def restore(self, sample: Sample) -> None:
        """Restore a new sample's progress, as after a preemption: all tokens known, none computed."""
        sequence = sample.sequence
        before = self.metrics
        own = self.samples[sequence.index]
        sequence.token_ids.extend(own.token_ids)
        sequence.num_known_tokens = sequence.num_counted_tokens = len(sequence.token_ids)
        if sequence.logprobs is not None and own.logprobs is not None:
            sequence.logprobs = list(own.logprobs)
        if sequence.prompt_logprobs is not None and self.prompt_logprobs is not None:
            sequence.prompt_logprobs = list(self.prompt_logprobs)
        sequence.finish_reason = own.finish_reason
        sequence.stop_reason = own.stop_reason
        sequence.is_finished = own.finish_reason is not None
        if own.finish_reason == "error":
            sequence.error = self.error
            sequence.error_kind = self.error_kind
        sequence.scheduled_time = before.scheduled_time
        sequence.num_cached_tokens = before.num_cached_tokens
        sequence.num_preemptions = 0 if sequence.index else before.num_preemptions  # outputs sum over samples
        _catch_up(sample, before)


def _catch_up(sample: Sample, before: RequestMetrics) -> None:
    """Read the tokens of a restored sequence, which were all sent before."""
    sequence = sample.sequence
    token_ids = sample.sequence.output_token_ids
    sample.max_itl = before.max_itl
    if token_ids:
        sample.first_token_time = before.first_token_time
        sample.last_token_time = before.last_token_time
    if sample.incremental is not None:
        for count, token_id in enumerate(token_ids, start=1):
            sample.read(token_id, may_stop=count >= sequence.params.min_tokens)
    if sequence.is_finished:
        sample.finished_time = before.last_token_time
    if sample.request.output_kind is OutputKind.DELTA:
        sample.num_shown_tokens, sample.num_shown_chars = len(token_ids), len(sample.text())


def continuation(output: RequestOutput, params: SamplingParams, max_model_len: int) -> tuple[SamplingParams, Resumed]:
    """Parameters and progress of a request that continues `output`; max_tokens counts its new tokens.

    Raises ValueError for several samples, an output that ended, and one that fills max_model_len.
    """
    if len(output.outputs) > 1 or params.n > 1:
        raise ValueError(
            f"the request has {max(len(output.outputs), params.n)} samples; resume continues one. Set n=1."
        )
    token_ids = []
    logprobs = versions = None
    for completion in output.outputs:  # none before the first token
        token_ids = completion.token_ids
        logprobs = completion.logprobs
        versions = completion.weight_versions
        if completion.finish_reason in ENDED:
            raise ValueError(
                f"the output's finish_reason is {completion.finish_reason!r}, so nothing follows it. Resume outputs "
                "that a limit or an abort cut."
            )
    length = len(output.prompt_token_ids) + len(token_ids)
    if length >= max_model_len:
        raise ValueError(
            f"prompt and output have {length} tokens and fill max_model_len ({max_model_len}). Shorten the prompt, or "
            "raise max_model_len if the model allows."
        )
    if params.logprobs is not None and token_ids and logprobs is None:
        raise ValueError(f"logprobs is {params.logprobs}, but the output has none. Leave it out.")
    if params.max_tokens is not None:
        params = replace(params, max_tokens=len(token_ids) + params.max_tokens)
    sample = ResumedSample(token_ids, logprobs, weight_versions=versions)
    return params, Resumed([sample], RequestMetrics(0.0), output.prompt_logprobs)


class Resuming:
    """Mixin of `LLM`."""

    def resume(
        self: Any, output: RequestOutput, sampling_params: SamplingParams | None = None, **options: Any
    ) -> Iterator[RequestOutput]:
        """Continue an output that a limit cut short; yields the whole output so far.

        Args:
            output: output of this model; its full blocks come from the prefix cache.
            sampling_params, **options: arguments of `stream`; max_tokens counts new tokens.

        Raises ValueError for an output that ended at a stop or fills max_model_len, and with data_parallel_size > 1.
        """
        if self.config.data_parallel_size > 1:
            refuse("resume", REPLICAS)
        params = self.default_sampling_params if sampling_params is None else sampling_params
        params, progress = continuation(output, params, self.config.max_model_len)
        options = self._with_salt(**options)
        request = self._open_engine().input_processor.process_one(
            next(self._request_ids), output.prompt_token_ids, params, output_kind=OutputKind.CUMULATIVE, **options
        )
        stream: Iterator[RequestOutput] = self._stream(replace(request, resumed=progress, prompt=output.prompt))
        return stream
