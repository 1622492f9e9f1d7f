"""Structured outputs in a step: each row's matcher follows its tokens, and what it forbids is masked in the logits."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.device import find_kernel, to_device
from nanovllm.sequence import Sequence
from nanovllm.structured_output import GrammarError, Matcher


def token_masks(
    sequences: SequenceABC[Sequence], positions: SequenceABC[int], errors: dict[Sequence, str]
) -> NDArray[np.int32]:
    """Masks [num_rows, num_words] of the tokens that may stand at these positions; bits as in `Matcher.fill`.

    The matchers consume what the host has read since they were asked last, so preempted, repeated and undone steps need
    no care.

    Args:
        errors: takes what went wrong in following a grammar; the row's mask is then empty.
    """
    matchers = [matcher for sequence in sequences if (matcher := sequence.matcher) is not None]
    masks = np.full((len(sequences), matchers[0].num_words), -1, np.int32)
    for sequence, matcher, position, mask in zip(sequences, matchers, positions, masks, strict=True):
        if sequence.is_finished:  # since the step was launched: nobody reads what it draws
            continue
        try:
            _follow(sequence, matcher, position)
            matcher.fill(mask)
        except GrammarError as error:  # the request's own, and its neighbours go on
            mask.fill(0)
            errors[sequence] = f"request {sequence.request_id!r}: {error}"
    return masks


def _follow(sequence: Sequence, matcher: Matcher, position: int) -> None:
    for token_id in sequence.token_ids[sequence.num_prompt_tokens + matcher.num_tokens : position]:
        matcher.consume(token_id)


def keep_bits(logits: Tensor, rows: list[int], masks: NDArray[np.int32]) -> None:
    """Take the tokens whose bits are 0 out of some rows, by adding -inf, so that NaN stays NaN.

    Args:
        logits: [num_rows, vocab_size] float32, overwritten.
        rows: those that have masks.
        masks: [len(rows), num_words]; words beyond vocab_size are not read.
    """
    if not logits.is_cuda:
        table = _table()
        for row, mask in zip(rows, masks, strict=True):
            logits[row] += table.index_select(0, torch.from_numpy(mask.view(np.uint8)).int()).view(-1)[
                : logits.shape[1]
            ]
        return
    words, indices = to_device(masks, logits.device), to_device(rows, logits.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_allowed = (words[:, :, None] >> shifts & 1).to(torch.int8).flatten(1)[:, : logits.shape[1]].contiguous()
    if (kernel := _kernel()) is not None:
        kernel(logits, indices, is_allowed)
    else:
        logits[indices] += logits.new_zeros(()).expand(is_allowed.shape).masked_fill(is_allowed == 0, -torch.inf)


@cache
def _kernel() -> Callable[..., None] | None:
    return find_kernel("penalties", "keep_allowed")


@cache
def _table() -> Tensor:
    """[256, 8] float32: what each of a byte's bits adds to a logit."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits == 1, np.float32(0), np.float32(-np.inf)))
