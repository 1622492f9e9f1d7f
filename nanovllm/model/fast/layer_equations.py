"""Whether decoder layers compute, between their parts, what layers of Llama's kind do.

In bfloat16 rounding moves a layer's output by as much as a factor of 0.98 does, so outputs do not tell two layers
apart. Between the parts of a layer there is little rounding or none: what each part gets in a forward pass is computed
here from what the other parts returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from nanovllm.attention.operator import attention_function
from nanovllm.core.errors import NotFusedError
from nanovllm.model.fast.llama_parts import ROW_TOLERANCE, SCALE_TOLERANCE, row_distances, scale_error

RECORDING_NAME = "nanovllm-recording"  # of the attention that watched layers have to be redirected to
_PARTS = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm",
          "self_attn.k_norm", "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
          "mlp.down_proj")  # fmt: skip


class LayerEquations:
    """Notes what the parts of each decoder layer get and return, for `check` behind the layer's call.

    Args:
        modules: the decoder layers.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._notes = False
        self._hidden: Tensor | None = None  # what the running layer got
        self._got: dict[str, Tensor] = {}
        self._gave: dict[str, Tensor] = {}
        self._states: tuple[Tensor, ...] = ()  # query, key, value and result of attention

    @contextmanager
    def watching(self, behind: Callable[[int, nn.Module, Any, Any, Any], None]) -> Iterator[None]:
        """Hook the layers and their parts.

        Args:
            behind: called behind each layer with its index, and what a forward hook with keyword arguments gets.
        """
        with ExitStack() as hooks:
            for index, module in enumerate(self._modules):
                parts = dict(module.named_modules())
                hooks.callback(module.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(self._end).remove)
                for name in _PARTS:
                    if (part := parts.get(name)) is not None:
                        hooks.callback(part.register_forward_hook(partial(self._note, name), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(partial(behind, index), with_kwargs=True).remove)
                attention = parts.get("self_attn")
                if attention is not None:
                    _watchers[attention] = self
                    hooks.callback(_watchers.pop, attention)
            yield

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        self._hidden = hidden.clone() if isinstance(hidden, Tensor) else None
        self._got, self._gave, self._states, self._notes = {}, {}, (), True

    def _end(self, *_: Any) -> None:
        self._notes = False

    def _note(self, name: str, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = args[0] if args else next(iter(kwargs.values()), None)
        if self._notes and isinstance(given, Tensor) and isinstance(output, Tensor):
            # Copies, since a layer may go on to change them in place.
            self._got[name], self._gave[name] = given.clone(), output.clone()

    def note_attention(self, *states: Tensor) -> None:
        self._states = tuple(part.clone() for part in states)

    def check(self, module: nn.Module, kwargs: Any, output: Tensor, num_rows: Sequence[int]) -> None:
        """Check the last call of a layer; raises NotFusedError for one of another kind.

        Args:
            num_rows: of each sequence.
        """
        kind = type(module).__name__
        try:
            exact, rounded = self._equations(kwargs["position_embeddings"], output, kind)
        except (TypeError, KeyError, AttributeError, ValueError, RuntimeError) as error:
            raise NotFusedError(f"{kind} is called in another way: {error!r}") from error
        for place, (seen, expected) in exact.items():
            if seen.dtype != expected.dtype or not torch.equal(seen, expected):
                raise NotFusedError(f"{kind} computes something else {place}")
        for place, (seen, expected) in rounded.items():
            for part, expected_part in zip(seen[0].split(num_rows), expected[0].split(num_rows), strict=True):
                worst = row_distances(part, expected_part).max().item()
                scale = scale_error(part, expected_part)
                if not (worst <= ROW_TOLERANCE[seen.dtype] and abs(scale) <= SCALE_TOLERANCE[seen.dtype]):
                    differs = f"rows differ by up to {worst:.1e}, by {scale:.1e} in scale"
                    raise NotFusedError(f"{kind} computes something else {place}: {differs}")

    def _equations(self, turns: Any, output: Tensor, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """By the place in the layer, what was seen there and what is expected, [1, num_rows, ...].

        Returns those that hold to the last bit, since both sides round alike, and those that rounding changes.
        """
        got, gave, hidden = self._got, self._gave, self._hidden
        assert hidden is not None
        *heads, attended = self._states
        query, key, value = (states.transpose(1, 2) for states in heads)  # [1, num_rows, heads, head_dim]
        if any(part.shape != (*query.shape[:2], query.shape[3]) for part in turns):
            raise NotFusedError(f"{kind} turns only a part of each head by its position")
        residual = hidden + gave["self_attn.o_proj"]
        exact = {
            "before its first norm": (got["input_layernorm"], hidden),
            "before its values": (value.flatten(2), gave["self_attn.v_proj"]),
            "behind attention": (got["self_attn.o_proj"], attended.flatten(2)),
            "between attention and its second norm": (got["post_attention_layernorm"], residual),
            "behind its MLP": (output, residual + gave["mlp.down_proj"]),
        }
        for name in ("q", "k", "v"):
            exact[f"before {name}_proj"] = got[f"self_attn.{name}_proj"], gave["input_layernorm"]
        for name in ("gate", "up"):
            exact[f"before {name}_proj"] = got[f"mlp.{name}_proj"], gave["post_attention_layernorm"]
        rounded = {
            "within its MLP": (got["mlp.down_proj"], F.silu(gave["mlp.gate_proj"].float()) * gave["mlp.up_proj"])
        }
        for name, states, what in (("q", query, "queries"), ("k", key, "keys")):
            product = gave[f"self_attn.{name}_proj"].view(states.shape)
            if (normed := gave.get(f"self_attn.{name}_norm")) is not None:
                exact[f"before {name}_norm"] = got[f"self_attn.{name}_norm"], product
                product = normed
            rounded[f"before its {what}"] = states.flatten(2), _turned(product.float(), *turns).flatten(2)
        return exact, rounded


def _turned(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding by halves of states [1, num_rows, heads, head_dim]."""
    first, second = states.chunk(2, dim=-1)
    return states * cosines[:, :, None] + torch.cat([-second, first], dim=-1) * sines[:, :, None]


_watchers: dict[nn.Module, LayerEquations] = {}


def recording_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`attention_function`, for layers that are watched."""
    output, weights = attention_function(module, query, key, value, *args, **kwargs)
    if (watcher := _watchers.get(module)) is not None:
        watcher.note_attention(query, key, value, output)
    return output, weights


AttentionInterface.register(RECORDING_NAME, recording_attention)
