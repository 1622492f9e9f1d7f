"""A forward pass of a model of Llama's kind without its modules' own Python, for steps on a CPU.

With few rows Python takes a quarter of a step, since the weights have driven it out of the processor's caches. What is
left: the embedding, the layers in one call (`fused_layers.py`), the last norm and the head of the sampled rows. The
model's parts are recognised by their names, then both passes are compared bit by bit: a model that computes anything
else runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nanovllm.model.fused_layers import FusedLayer

# Rotary embeddings whose angles depend on a token's position alone.
_STATIC_ROPES = ("default", "linear", "llama3", "yarn")
_LEAST_POSITIONS = 512  # that are computed at once


class DirectPass:
    """Stands for `ForwardPasses.logits`.

    Args:
        stack: the first layer, which computes all.
    """

    def __init__(self, model: Any, stack: FusedLayer) -> None:
        base = model.base_model
        self._stack, self._embed, self._norm, self._rotary = stack, base.embed_tokens, base.norm, base.rotary_emb
        self._head = model.get_output_embeddings()
        self._cosines = self._sines = torch.empty(0, device="cpu")

    @staticmethod
    def suits(model: Any, layers: list[FusedLayer]) -> bool:
        """Whether the model has the parts and no others."""
        base = model.base_model
        parts = {name for name, _ in base.named_children()}
        return (
            bool(layers)
            and layers[0].runs_all
            and parts == {"embed_tokens", "layers", "norm", "rotary_emb"}
            and [child for child in model.children() if child is not base] == [model.get_output_embeddings()]
            and getattr(base.rotary_emb, "rope_type", None) in _STATIC_ROPES
        )

    @property
    def is_ready(self) -> bool:
        return self._stack.runs_all

    def __call__(self, token_ids: Tensor, positions: Tensor, sample_rows: Tensor | int, **kwargs: Any) -> Tensor:
        """Logits [num_samples, vocab_size]; the arguments are those of `ForwardPasses.logits`."""
        hidden = self._embed(token_ids)
        hidden = self._stack(hidden, position_embeddings=self._angles(hidden, positions[0]), **kwargs)[0]
        return self._head(self._norm(hidden if isinstance(sample_rows, int) else hidden[sample_rows]))

    def _angles(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, num_rows, head_dim]."""
        last = int(positions.max())
        if last >= len(self._cosines):
            count = max(_LEAST_POSITIONS, 2 * last)
            with torch.inference_mode(False), torch.no_grad():
                tables = self._rotary(hidden.detach(), torch.arange(count, device="cpu")[None])
                self._cosines, self._sines = (table[0].contiguous() for table in tables)
        return self._cosines[positions][None], self._sines[positions][None]


class Comparison:
    """Gives the model's own logits, and finds whether a direct pass has the same bits."""

    is_ready = True

    def __init__(self, own: Callable[..., Tensor], direct: DirectPass) -> None:
        self._own, self._direct = own, direct
        self.num_equal = self.num_other = 0

    def __call__(self, *inputs: Any, **kwargs: Any) -> Tensor:
        expected = self._own(*inputs, **kwargs).clone()  # a packed head writes all its logits to the same memory
        try:
            is_equal = torch.equal(self._direct(*inputs, **kwargs), expected)
        except Exception:  # whatever a model's own code raises
            is_equal = False
        self.num_equal, self.num_other = self.num_equal + is_equal, self.num_other + (not is_equal)
        return expected
