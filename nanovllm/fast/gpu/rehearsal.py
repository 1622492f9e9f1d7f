"""Rehearsals: steps without requests, run while a GPU's engine is idle, that use each option once.

The first use of an option loads GPU code and allocates buffers: 2 to 60 ms, and none on a CPU. Where a rehearsal's head
has no graph, idle time captures it next. All rows are in the null block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from nanovllm.batch import NULL_BLOCK, Copy, ScheduledBatch, ScheduledSequence
from nanovllm.errors import DeviceError
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.logprobs.logprobs import MOST_BY_KERNEL
from nanovllm.features.sampling_params import EmbeddingParams, SamplingParams
from nanovllm.model import ModelBinding
from nanovllm.sequence import NewRequest, Sequence

logger = logging.getLogger("nanovllm")

_PENALTY: dict[str, Any] = {"repetition_penalty": 1.1}
_FILTERS: dict[str, Any] = {"top_k": 40, "top_p": 0.9, "min_p": 0.02}
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {}, _FILTERS,
    _PENALTY, {"frequency_penalty": 0.1, "presence_penalty": 0.1, **_FILTERS},
    {"logprobs": 0}, {"logprobs": 5}, {"logprobs": 20}, {"logprobs": MOST_BY_KERNEL + 1},
    {"logprobs": 5, **_FILTERS}, {"logprobs": 5, **_PENALTY}, {"logprobs": 5, **_PENALTY, **_FILTERS},
    {"logit_bias": {0: 1.0}}, {"logit_bias": {0: 1.0}, "logprobs": 5, **_PENALTY, **_FILTERS},
    {"allowed_token_ids": (0, 1, 2)}, {"bad_words": ("the",)}, {"min_tokens": 8},
    {"logits_processors": (lambda token_ids, logits: logits,)},
    {"prompt_logprobs": 0}, {"prompt_logprobs": 5},
)  # fmt: skip
_PENALTIES = {"repetition_penalty", "frequency_penalty"}
_PROMPT_TOKENS = 3
DEVICES = {"cuda"}


class _Rehearsal(NamedTuple):
    """A step to run before requests need it; it draws `num_samples` tokens, 2 as a step with drafts does."""

    params: SamplingParams
    num_samples: int = 1
    copies: tuple[Copy, ...] = ()


@cache
def _rehearsals(*, embeds: bool, drafts: bool) -> list[_Rehearsal]:
    found = [_Rehearsal(SamplingParams(**options)) for options in _OPTIONS]
    found.append(_Rehearsal(SamplingParams(), copies=(Copy(0, NULL_BLOCK, NULL_BLOCK),)))  # a sample's or fork's copy
    if embeds:
        found.append(_Rehearsal(EmbeddingParams()))
    if drafts:
        found += [_Rehearsal(SamplingParams(**options), 2) for options in ({"temperature": 0.0}, {}, _FILTERS)]
    return found


def rehearse(runner: Any, number: int) -> bool:
    """Run a rehearsal by a `ModelRunner`; False after the last. An error is logged, except of the device."""
    if (batch := rehearsal_batch(runner.binding, runner.config, number)) is None:
        return False
    try:
        runner.execute(batch).result()
    except DeviceError:
        raise
    except Exception:
        logger.info("a rehearsal failed: %s", batch.sampling[0].params, exc_info=True)
    return True


def rehearse_at_start(runner: Any, capture_head: Callable[[], bool]) -> None:
    """Rehearse a prompt and a decode with each option of the draw, and capture its head, before the first request."""
    for number, options in enumerate(_OPTIONS):
        if "logprobs" in options or options.keys() & _PENALTIES:
            for form in (0, 1):
                if not rehearse(runner, 3 * number + form):
                    return
    try:
        while capture_head():
            pass
    except Exception:  # an error of the device comes again
        logger.info("a head with rare options was not captured", exc_info=True)


def rehearsal_batch(binding: ModelBinding, config: EngineConfig, number: int) -> ScheduledBatch | None:
    """The batch of a rehearsal; None after the last, on a CPU, and for ranks, which would have to rehearse together.

    Each rehearsal has a chunk of a prompt, then a decode, and a decode together with a plain one.
    """
    longest = min(config.max_model_len - 1, config.max_num_batched_tokens)
    if binding.device.type not in DEVICES or binding.ranks is not None or longest < _PROMPT_TOKENS:
        return None
    found = _rehearsals(embeds=binding.passes.has_base_model, drafts=bool(config.speculation) and not binding.mixers)
    if number >= 3 * len(found):
        return None
    (params, num_samples, copies), form = found[number // 3], number % 3
    start = 0 if form == 0 and num_samples == 1 else _PROMPT_TOKENS - num_samples
    entries = [_entry(config, params, start, num_samples)]
    if form == 2 and config.max_num_seqs > 1 and longest > _PROMPT_TOKENS:
        entries.append(_entry(config, SamplingParams(), _PROMPT_TOKENS - 1, 1))
    return ScheduledBatch(0, tuple(entries), copies=copies)


def _entry(config: EngineConfig, params: SamplingParams, start: int, num_samples: int) -> ScheduledSequence:
    tokens = [position % 2 for position in range(_PROMPT_TOKENS)]
    words = ((0,), (1, 0)) if params.bad_words else ()
    request = NewRequest("rehearsal", tokens, params, bad_words=words)
    sequence = Sequence(request, arrival=0, max_model_len=_PROMPT_TOKENS + 1, eos_token_ids=(0,))
    blocks = [NULL_BLOCK] * -(-_PROMPT_TOKENS // config.block_size)
    return ScheduledSequence(sequence, start, _PROMPT_TOKENS - start, num_samples, blocks, 0)
