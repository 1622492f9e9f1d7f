"""A forward pass of a Llama-style model without its modules' Python code, for steps on a CPU.

With few rows Python takes a quarter of a step, since weights evict its code from the processor's caches. The pass runs
the embedding, all layers in one call (`fused_layers.py`), the final norm, and the head for sampled rows. It requires
`transformers`' own forward, parts that `model_parts` recognises, and the same bits in trial batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nanovllm.fast.layers.decoder_block import ModelParts
    from nanovllm.fast.layers.fused_layers import FusedStack

logger = logging.getLogger("nanovllm")

# positions per computation of angles, and number of such pieces kept: 16 MiB
_PIECE = 512
_MOST_PIECES = 64


class DirectPass:
    """Replaces `ForwardPasses.logits`."""

    def __init__(self, parts: ModelParts, stack: FusedStack) -> None:
        self._stack = stack
        self._embed = parts.embed
        self._norm = parts.norm
        self._rotary = parts.rotary
        self._head = parts.head
        self._tables: tuple[Tensor, Tensor] | None = None  # cosines and sines [positions, head_dim], filled in pieces
        self._filled: set[int] = set()

    @property
    def is_ready(self) -> bool:
        return self._stack.is_ready

    def __call__(self, token_ids: Tensor, positions: Tensor, sample_rows: Tensor | int, **kwargs: Any) -> Tensor:
        """Logits [num_samples, vocab_size]; the arguments are those of `ForwardPasses.logits`."""
        hidden = self._embed(token_ids)
        hidden = self._stack(hidden, self._angles(hidden, positions[0]), kwargs)[0]
        return self._head(self._norm(hidden if isinstance(sample_rows, int) else hidden[sample_rows]))

    def _angles(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, num_rows, head_dim]."""
        pieces = set((positions // _PIECE).tolist())
        if max(pieces) >= _MOST_PIECES:
            cosines, sines = self._rotary(hidden, positions[None])
            return cosines, sines
        for piece in pieces - self._filled:
            self._fill(hidden, piece)
        cosines, sines = self._tables  # type: ignore[misc]
        return cosines[positions][None], sines[positions][None]

    def _fill(self, hidden: Tensor, piece: int) -> None:
        begin = piece * _PIECE
        end = (piece + 1) * _PIECE
        with torch.inference_mode(False), torch.no_grad():
            parts = self._rotary(hidden.detach(), torch.arange(begin, end, device="cpu")[None])
            if self._tables is None:  # pages are allocated when a piece is filled
                cosines, sines = (part.new_empty(_MOST_PIECES * _PIECE, part.shape[-1]) for part in parts)
                self._tables = cosines, sines
            for table, part in zip(self._tables, parts, strict=True):
                table[begin:end] = part[0]
        self._filled.add(piece)


class Trial:
    """Returns logits of layers called one by one, and compares a stack and a direct pass with them, bit for bit."""

    is_ready = True

    def __init__(self, own: Callable[..., Tensor], stack: FusedStack, direct: DirectPass | None) -> None:
        self._own = own
        self._stack = stack
        self._direct = direct
        self._num_batches = 0
        self._stack_is_right = True
        self._direct_is_right = direct is not None

    def __call__(self, *inputs: Any, **kwargs: Any) -> Tensor:
        self._num_batches += 1
        self._stack.is_on = False
        expected = self._own(*inputs, **kwargs).clone()  # a packed head reuses one buffer for its logits
        self._stack.is_on = True

        def gives_the_same(call: Callable[..., Tensor]) -> bool:
            try:
                return torch.equal(call(*inputs, **kwargs), expected)
            except Exception as error:  # any error of the model's code
                logger.info("a faster pass through the model fails: %r", error)
                return False

        if self._direct_is_right and self._direct is not None:
            self._direct_is_right = gives_the_same(self._direct)
        if not self._direct_is_right and self._stack_is_right:
            self._stack_is_right = gives_the_same(self._own)
        return expected

    def outcome(self) -> tuple[bool, DirectPass | None]:
        """(whether the stack may be used, the direct pass if it may be used)."""
        was_tried = self._num_batches > 0
        return was_tried and self._stack_is_right, self._direct if was_tried and self._direct_is_right else None
