"""A step of few decodes from tokens to tokens in one launch: embedding, all layers, final norm, head and draw.

The layers are a stack (`stacked_layers.py`); the modules around them are the ones `decoder_block.model_parts`
recognises. Cosines and sines come from a table by position. An engine compares its logits with the model's at start.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.device import find_kernel
from nanovllm.errors import NotFusedError
from nanovllm.fast.layers.decoder_block import ModelParts, find_norm, is_rms_norm, model_parts
from nanovllm.fast.layers.distances import in_another_way
from nanovllm.fast.layers.merged_linears import is_plain_linear
from nanovllm.fast.layers.stacked_layers import StackedLayers

_MOST_TABLE_BYTES = 64 * 2**20  # most bytes of the tables of cosines and sines
_PIECE = 4096  # positions per computation of angles


class StackedStep:
    """Steps of one model from tokens to tokens.

    Raises NotFusedError if the model has other parts around its layers. The model must be uninstalled.

    Args:
        num_positions: most positions of a sequence.
        draw_options: non_finite and gamma, as in `gumbel_draw.draw_on_gpu`.
    """

    def __init__(
        self, model: Any, stacked: StackedLayers, vocab_size: int, num_positions: int, draw_options: dict[str, int]
    ) -> None:
        self.num_rows = stacked.num_rows
        self.caches = stacked.caches
        self._stack = stacked.stack
        self._vocab_size = vocab_size
        self._draw_options = draw_options
        self._input_names: Any = find_kernel("token_steps", "STEP_INPUTS")
        parts = model_parts(model)
        if parts is None:
            raise NotFusedError(f"{type(model).__name__} has other parts around its layers, or its own code")
        kind = type(model).__name__
        embedding = parts.embed
        head = parts.head
        if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
            raise NotFusedError(f"the embedding of {kind} is no plain one")
        if not is_plain_linear(head) or head.bias is not None:
            raise NotFusedError(f"the head of {kind} is no linear layer without a bias")
        norm = find_norm(model.base_model, "norm", embedding.embedding_dim, kind)
        weights = [part.weight.detach() for part in (embedding, norm.module, head)]
        if not all(part.dtype == torch.bfloat16 and part.is_contiguous() for part in weights):
            raise NotFusedError(f"{kind} has weights around its layers that are not contiguous bfloat16")
        if not is_rms_norm(norm, torch.bfloat16):
            raise NotFusedError(f"{kind} has no RMS norm after its layers")
        turns = _angles(parts.rotary, weights[0], num_positions)
        _check_equations(model, parts, stacked.modules, turns)
        make: Any = find_kernel("token_steps", "StepWeights")
        self._weights = make(*weights, *turns, norm.epsilon, vocab_size)

    def token_step(self, places: dict[str, int], num_rows: int, sampled: Tensor, logits: Tensor | None = None) -> Any:
        """A `TokenStep` of steps that are packed into its launch arguments.

        Args:
            places: offset of each input in bytes, by name.
            num_rows: padding included.
            sampled: [most samples] int64, tokens of the previous step, which this step replaces.
            logits: [num_rows, vocab_size], to be written.
        """
        inputs = {name: places[name] for name in self._input_names}
        return self._stack.token_step(self._weights, inputs, num_rows, sampled, logits=logits, **self._draw_options)


def _angles(rotary: Any, like: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [num_positions, head_dim]."""
    pieces: list[tuple[Tensor, Tensor]] = []
    with torch.inference_mode(False), torch.no_grad():
        for begin in range(0, num_positions, _PIECE):
            positions = torch.arange(begin, min(begin + _PIECE, num_positions), device=like.device)
            cosines, sines = rotary(like.new_zeros(1, 1, 1), positions[None])
            if cosines.dtype != torch.bfloat16 or cosines.shape[:2] != (1, len(positions)):
                raise NotFusedError("the rotary embedding gives angles of another shape or dtype")
            if 2 * num_positions * cosines[0, 0].nbytes > _MOST_TABLE_BYTES:
                raise NotFusedError(f"a table of angles for {num_positions} positions would be too large")
            pieces.append((cosines[0], sines[0]))
    cosines, sines = (torch.cat(parts).contiguous() for parts in zip(*pieces, strict=True))
    return cosines, sines


def _check_equations(model: Any, parts: ModelParts, layers: Sequence[nn.Module], turns: tuple[Tensor, Tensor]) -> None:
    """Raise NotFusedError if a pass of the model computes anything between these parts; they must agree to the bit."""
    seen: dict[nn.Module, tuple[Any, Any, Any]] = {}  # input, keyword arguments, output

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen[module] = args[0] if args else kwargs.get("hidden_states"), kwargs, output

    watched = parts.embed, layers[0], layers[-1], parts.norm, parts.head
    tokens = torch.arange(4, device=turns[0].device)[None]
    with ExitStack() as hooks, torch.no_grad():
        for module in watched:
            hooks.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        logits = model(input_ids=tokens, position_ids=tokens, use_cache=False, return_dict=True).logits
    with in_another_way(f"{type(model).__name__} calls its parts"):
        embed, first, last, norm, head = (seen[module] for module in watched)
        equations = {
            "of its embedding": (embed[2], parts.embed.weight[tokens]),
            "before its layers": (first[0], embed[2]),
            "before its final norm": (norm[0], last[2]),
            "before its head": (head[0], norm[2]),
            "with its logits": (logits, head[2]),
        } | {f"of its angles {at}": (first[1]["position_embeddings"][at], turns[at][:4][None]) for at in range(2)}
        differs = next((place for place, pair in equations.items() if not torch.equal(*pair)), None)
    if differs is not None:
        raise NotFusedError(f"{type(model).__name__} computes something else {differs}")
