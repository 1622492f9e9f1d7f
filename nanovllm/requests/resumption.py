"""Restores the progress of a sequence moved from another engine."""

from __future__ import annotations

from nanovllm.core.sequence import Resumed, Sequence


def restore(sequence: Sequence, resumed: Resumed) -> None:
    """Restore a new sequence's progress, as after a preemption: all tokens known, none computed."""
    sample, before = resumed.samples[sequence.index], resumed.metrics
    sequence.token_ids.extend(sample.token_ids)
    sequence.num_known_tokens = sequence.num_counted_tokens = len(sequence.token_ids)
    if sample.logprobs is not None:
        sequence.logprobs = list(sample.logprobs)
    if sequence.prompt_logprobs is not None and resumed.prompt_logprobs is not None:
        sequence.prompt_logprobs = list(resumed.prompt_logprobs)
    sequence.finish_reason, sequence.stop_reason = sample.finish_reason, sample.stop_reason
    sequence.is_finished = sample.finish_reason is not None
    if sample.finish_reason == "error":
        sequence.error, sequence.error_kind = resumed.error, resumed.error_kind
    sequence.scheduled_time, sequence.num_cached_tokens = before.scheduled_time, before.num_cached_tokens
    sequence.num_preemptions = 0 if sequence.index else before.num_preemptions  # outputs sum over samples
