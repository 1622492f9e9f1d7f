"""A forward pass of a model of Llama's kind without its modules' own Python, for steps on a CPU.

With few rows Python takes a quarter of a step, since the weights have driven it out of the processor's caches. What is
left: the embedding, the layers in one call (`fused_layers.py`), the last norm and the head of the sampled rows. It is
for models whose forward pass is `transformers`' own, whose parts are recognised by their names, and which give the same
bits in some batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nanovllm.model.fused_layers import FusedStack

logger = logging.getLogger("nanovllm")

# Rotary embeddings whose angles depend on a token's position alone.
_STATIC_ROPES = ("default", "linear", "llama3", "yarn")
_LEAST_POSITIONS, _MOST_POSITIONS = 512, 2**15  # whose angles are computed at once, and kept: 16 MiB


class DirectPass:
    """Stands for `ForwardPasses.logits`."""

    def __init__(self, model: Any, stack: FusedStack) -> None:
        base = model.base_model
        self._stack, self._embed, self._norm, self._rotary = stack, base.embed_tokens, base.norm, base.rotary_emb
        self._head = model.get_output_embeddings()
        self._cosines = self._sines = torch.empty(0, device="cpu")

    @staticmethod
    def suits(model: Any) -> bool:
        """Whether the model has the parts and no others, and no forward pass of its owner's."""
        base = model.base_model
        parts = {name for name, _ in base.named_children()}
        return (
            all(type(part).forward.__module__.startswith("transformers.") for part in (model, base))
            and not any("forward" in vars(part) for part in (model, base))
            and parts == {"embed_tokens", "layers", "norm", "rotary_emb"}
            and [child for child in model.children() if child is not base] == [model.get_output_embeddings()]
            and getattr(base.rotary_emb, "rope_type", None) in _STATIC_ROPES
        )

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
        last = int(positions.max())
        if last >= _MOST_POSITIONS:
            cosines, sines = self._rotary(hidden, positions[None])
            return cosines, sines
        if last >= len(self._cosines):
            count = min(max(_LEAST_POSITIONS, 2 * last), _MOST_POSITIONS)
            with torch.inference_mode(False), torch.no_grad():
                tables = self._rotary(hidden.detach(), torch.arange(count, device="cpu")[None])
                self._cosines, self._sines = (table[0].contiguous() for table in tables)
        return self._cosines[positions][None], self._sines[positions][None]


class Trial:
    """Gives the logits of layers called one by one, and finds whether a stack and a direct pass give the same bits."""

    is_ready = True

    def __init__(self, own: Callable[..., Tensor], stack: FusedStack, direct: DirectPass | None) -> None:
        self._own, self._stack, self._direct = own, stack, direct
        self._num_batches = 0
        self._stack_is_right, self._direct_is_right = True, direct is not None

    def __call__(self, *inputs: Any, **kwargs: Any) -> Tensor:
        self._num_batches += 1
        self._stack.is_on = False
        expected = self._own(*inputs, **kwargs).clone()  # a packed head writes all its logits to the same memory
        self._stack.is_on = True

        def gives_the_same(call: Callable[..., Tensor]) -> bool:
            try:
                return torch.equal(call(*inputs, **kwargs), expected)
            except Exception as error:  # whatever a model's own code raises
                logger.info("a faster pass through the model fails: %r", error)
                return False

        if self._direct_is_right and self._direct is not None:
            self._direct_is_right = gives_the_same(self._direct)
        if not self._direct_is_right and self._stack_is_right:
            self._stack_is_right = gives_the_same(self._own)
        return expected

    def outcome(self) -> tuple[bool, DirectPass | None]:
        """Whether the stack may be used, and the direct pass if that may be."""
        was_tried = self._num_batches > 0
        return was_tried and self._stack_is_right, self._direct if was_tried and self._direct_is_right else None
