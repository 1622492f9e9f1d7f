"""Structured outputs in a step: matchers consume their rows' tokens, and masks forbid tokens in the logits."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.device import find_kernel, to_device
from nanovllm.features.structured_output import GrammarError
from nanovllm.sequence import Sequence


def token_masks(
    sequences: SequenceABC[Sequence], positions: SequenceABC[int], errors: dict[Sequence, str]
) -> NDArray[np.int32]:
    """Masks [num_rows, num_words] of the tokens allowed at these positions; see `write_masks`."""
    masks = np.empty((len(sequences), num_mask_words(sequences)), np.int32)
    write_masks(sequences, positions, masks, errors)
    return masks


def num_mask_words(sequences: SequenceABC[Sequence]) -> int:
    """Number of 32-bit words of a mask; at least one sequence must have a matcher."""
    return next(matcher.num_words for sequence in sequences if (matcher := sequence.matcher) is not None)


def write_masks(
    sequences: SequenceABC[Sequence],
    positions: SequenceABC[int],
    masks: NDArray[np.int32],
    errors: dict[Sequence, str],
) -> None:
    """Write masks [num_rows, num_words] of the tokens allowed at these positions; bits as in `Matcher.fill`.

    The matchers consume all tokens that the host has read since their last call, so preempted, repeated and undone
    steps need no special handling.

    Args:
        masks: overwritten; words of a row contiguous.
        errors: receives errors in following a grammar; the row's mask is then empty.
    """
    begin_masks(sequences, positions, masks, None).finish(errors)


def begin_masks(
    sequences: SequenceABC[Sequence], positions: SequenceABC[int], masks: NDArray[np.int32], threads: Any
) -> BegunMasks:
    """`write_masks` in two parts.

    Args:
        threads: `MaskThreads`; None fills all masks at once. All of masks must be contiguous.
    """
    # Addresses, since a view per row takes longer than its mask.
    address = masks.ctypes.data
    num_bytes = masks.strides[0]
    rows: list[tuple[int, Any, SequenceABC[int], int, int]] = []
    for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        matcher = sequence.matcher
        if matcher is None or sequence.is_finished:  # nobody reads the draw of one that ended after the launch
            masks[row] = -1
        elif sequence.draft:
            num_prompt = sequence.num_prompt_tokens
            rewind(sequence, position - num_prompt)
            rows.append((row, matcher, sequence.history(num_prompt, position), 0, position - num_prompt))
        else:
            rows.append((row, matcher, sequence.token_ids, sequence.num_prompt_tokens, position))
    failed: dict[int, GrammarError] = {}
    wait: Callable[[], dict[int, GrammarError]] | None = None
    if threads is not None:
        rows, wait = threads.begin(rows, address, len(masks))
    try:
        for row, matcher, token_ids, num_prompt_tokens, position in rows:
            try:
                matcher.follow(token_ids[num_prompt_tokens + matcher.num_tokens : position], address + row * num_bytes)
            except GrammarError as error:
                failed[row] = error
    except BaseException:
        if wait is not None:
            wait()  # no other call may use the matchers before
        raise
    return BegunMasks(sequences, masks, failed, wait)


def rewind(sequence: Sequence, num_tokens: int) -> None:
    """Take drafts that its matcher has consumed back, to this number of output tokens."""
    matcher = sequence.matcher
    if matcher is not None and matcher.num_tokens > num_tokens:
        with suppress(GrammarError):  # A matcher over its limits says so again at the next mask.
            matcher.rollback(matcher.num_tokens - num_tokens)


class BegunMasks(NamedTuple):
    """Masks that threads may still fill.

    failed: errors by row.
    wait: waits for the threads and returns further errors; None if they are not at work.
    """

    sequences: SequenceABC[Sequence]
    masks: NDArray[np.int32]
    failed: dict[int, GrammarError]
    wait: Callable[[], dict[int, GrammarError]] | None

    def finish(self, errors: dict[Sequence, str]) -> None:
        """Wait for all masks; see `write_masks`."""
        failed = self.failed if self.wait is None else self.failed | self.wait()
        for row, error in failed.items():  # fails only this request
            self.masks[row] = 0
            errors[self.sequences[row]] = f"request {self.sequences[row].request_id!r}: {error}"


def keep_bits(logits: Tensor, rows: list[int], masks: NDArray[np.int32]) -> None:
    """Forbid tokens with bit 0 in some rows, by adding -inf, so that NaN stays NaN.

    Args:
        logits: [num_rows, vocab_size] float32, overwritten.
        rows: the rows with masks.
        masks: [len(rows), num_words]; words beyond vocab_size are not read.
    """
    if not logits.is_cuda:
        table = _table()
        for row, mask in zip(rows, masks, strict=True):
            logits[row] += table.index_select(0, torch.from_numpy(mask.view(np.uint8)).int()).view(-1)[
                : logits.shape[1]
            ]
        return
    words = to_device(masks, logits.device)
    indices = to_device(rows, logits.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_forbidden = ((words[:, :, None] >> shifts & 1) == 0).flatten(1)[:, : logits.shape[1]]
    logits[indices] += logits.new_zeros(()).expand(is_forbidden.shape).masked_fill(is_forbidden, -torch.inf)


def keep_bits_by_kernel(logits: Tensor, rows: list[int], masks: NDArray[np.int32]) -> None:
    """`keep_bits` on a GPU, with a Triton kernel, compiled at its first call; needs `fast.kernels.bit_masks`."""
    own = np.full(len(logits), -1, np.int32)
    own[rows] = np.arange(len(rows))
    token_masks, mask_in_place = _kernels()
    mask_in_place(logits, token_masks(to_device(own, logits.device), to_device(masks, logits.device)))


@cache
def _kernels() -> tuple[Any, Any]:
    return find_kernel("bit_masks", "TokenMasks"), find_kernel("bit_masks", "mask_in_place")


def has_kernels() -> bool:
    return all(kernel is not None for kernel in _kernels())


@cache
def _table() -> Tensor:
    """Table [256, 8] float32: summand (0 or -inf) of each bit of each byte."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits == 1, np.float32(0), np.float32(-np.inf)))
