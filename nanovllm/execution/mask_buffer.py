"""Masks of structured outputs for captured heads: filled on the host during the forward pass, at a fixed address."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import Any

import torch
from torch import Tensor

from nanovllm.core.sequence import Sequence
from nanovllm.process.device import find_kernel
from nanovllm.sampling.structured import num_mask_words, write_masks


class MaskBuffer:
    """One engine's buffer, allocated when a step first needs it.

    Copies run on a second stream, parallel to the forward pass: 64 masks of a vocabulary of 151,936 are 1.2 MB.

    Args:
        token_masks: `kernels.bit_masks.TokenMasks`.
    """

    def __init__(self, max_samples: int, device: torch.device, token_masks: Any) -> None:
        self._max_samples = max_samples
        self._device = device
        self._token_masks = token_masks
        self._buffer: Tensor | None = None  # int32: the mask of each sample, or -1; then the masks
        self._num_words = 0  # of a mask
        self._threads: Any = None
        self._copies: torch.cuda.Stream | None = None
        self._is_read: torch.cuda.Event | None = None

    def begin_step(self) -> None:
        """Record, before a forward pass is launched, that all earlier launches have read the current masks."""
        if self._is_read is None:
            self._copies, self._is_read = torch.cuda.Stream(self._device), torch.cuda.Event()
        self._is_read.record(torch.cuda.current_stream(self._device))

    def upload(
        self, sequences: SequenceABC[Sequence], positions: SequenceABC[int], errors: dict[Sequence, str]
    ) -> None:
        """Fill and send a step's masks, after `begin_step`; see `write_masks`."""
        assert self._copies is not None and self._is_read is not None
        current = torch.cuda.current_stream(self._device)
        rows = [row for row, sequence in enumerate(sequences) if sequence.matcher is not None]
        own = [sequences[row] for row in rows]
        first = self._max_samples
        if self._buffer is None:
            from nanovllm.requests.grammar.mask_threads import MaskThreads

            self._threads = MaskThreads()
            self._num_words = num_mask_words(own)
            with torch.inference_mode(False):
                self._buffer = torch.full((first * (1 + self._num_words),), -1, dtype=torch.int32, device=self._device)
            self._is_read.record(current)  # not before it is filled
        # Pinned memory that PyTorch's allocator gives again only when the copy from it is done.
        size = first + len(rows) * self._num_words
        host = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=True)
        of_rows, masks = host.numpy()[:first], host.numpy()[first:].reshape(len(rows), -1)
        of_rows[:] = -1
        of_rows[rows] = range(len(rows))
        write_masks(own, [positions[row] for row in rows], masks, errors, self._threads)
        self._copies.wait_event(self._is_read)
        with torch.cuda.stream(self._copies):
            self._buffer[:size].copy_(host, non_blocking=True)
        current.wait_stream(self._copies)

    def views(self, num_samples: int) -> Any:
        """`TokenMasks` of so many samples."""
        assert self._buffer is not None
        words = self._buffer[self._max_samples :].view(self._max_samples, self._num_words)
        return self._token_masks(self._buffer[:num_samples], words)


def build_mask_buffer(max_samples: int, device: torch.device) -> MaskBuffer | None:
    """None if the kernels that read it are missing."""
    token_masks = find_kernel("bit_masks", "TokenMasks")
    return None if token_masks is None else MaskBuffer(max_samples, device, token_masks)
