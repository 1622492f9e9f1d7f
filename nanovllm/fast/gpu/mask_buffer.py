"""Masks of structured outputs for captured heads: filled on the host during the forward pass, at a fixed address."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceABC
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.device import find_kernel
from nanovllm.features.token_masks import BegunMasks, begin_masks, num_mask_words
from nanovllm.sequence import Sequence


class MaskBuffer:
    """One engine's buffer, allocated when a step first needs it.

    64 masks of a vocabulary of 151,936 are 1.2 MB: 25 to 50 µs of the device between the forward pass and the draw. A
    second stream would hide them, and costs the host more. Two buffers on the host take turns, so that one is filled
    while the copy from the other may run.

    Args:
        token_masks: `fast.kernels.bit_masks.TokenMasks`.
    """

    def __init__(self, max_samples: int, device: torch.device, token_masks: Any) -> None:
        self._max_samples = max_samples
        self._device = device
        self._token_masks = token_masks
        self._buffer: Tensor | None = None  # int32: the mask of each sample, or -1; then the masks
        self._num_words = 0  # words of a mask
        # Pinned buffers, their arrays, and the ends of the copies from them.
        self._hosts: deque[tuple[Tensor, NDArray[np.int32], torch.cuda.Event]] = deque()
        self._threads: Any = None
        self._begun: BegunMasks | None = None

    def begin(self, sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> bool:
        """Start to fill a step's masks; returns whether threads still fill them."""
        rows = [row for row, sequence in enumerate(sequences) if sequence.matcher is not None]
        own = [sequences[row] for row in rows]
        if self._buffer is None:
            self._allocate(num_mask_words(own))
        self.wait()
        self._hosts.rotate()
        _, words, is_copied = self._hosts[0]
        is_copied.synchronize()  # the copy of two steps before reads this array
        words[: self._max_samples] = -1
        words[rows] = range(len(rows))
        masks = words[self._max_samples :][: len(rows) * self._num_words].reshape(len(rows), -1)
        self._begun = begin_masks(own, [positions[row] for row in rows], masks, self._threads)
        return self._begun.wait is not None

    def upload(
        self, sequences: SequenceABC[Sequence], positions: SequenceABC[int], errors: dict[Sequence, str]
    ) -> None:
        """Fill a step's masks, unless they are begun, and send them after its forward pass; see `write_masks`."""
        if self._begun is None:
            self.begin(sequences, positions)
        assert self._buffer is not None and self._begun is not None
        begun = self._begun
        self._begun = None
        begun.finish(errors)
        size = self._max_samples + begun.masks.size
        host, _, is_copied = self._hosts[0]
        self._buffer[:size].copy_(host[:size], non_blocking=True)
        is_copied.record(torch.cuda.current_stream(self._device))

    def clear(self) -> None:
        """Leave no sample a mask on the device."""
        if self._buffer is not None:
            self._buffer[: self._max_samples].fill_(-1)

    def wait(self) -> None:
        """Wait for the threads of a step that will not be drawn."""
        begun = self._begun
        self._begun = None
        if begun is not None:
            begun.finish({})

    def _allocate(self, num_words: int) -> None:
        from nanovllm.features.grammar.mask_threads import MaskThreads

        self._threads = MaskThreads()
        self._num_words = num_words
        size = self._max_samples * (1 + num_words)
        with torch.inference_mode(False):
            self._buffer = torch.full((size,), -1, dtype=torch.int32, device=self._device)
            for _ in range(2):
                host = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=True)
                self._hosts.append((host, host.numpy(), torch.cuda.Event()))

    def views(self, num_samples: int) -> Any:
        """`TokenMasks` of the first `num_samples` samples."""
        assert self._buffer is not None
        words = self._buffer[self._max_samples :].view(self._max_samples, self._num_words)
        return self._token_masks(self._buffer[:num_samples], words)


def build_mask_buffer(max_samples: int, device: torch.device) -> MaskBuffer | None:
    """None if the kernels that read it are missing."""
    token_masks = find_kernel("bit_masks", "TokenMasks")
    return None if token_masks is None else MaskBuffer(max_samples, device, token_masks)
