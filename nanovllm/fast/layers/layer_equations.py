"""Checks the operations between the parts of decoder layers against the equations of a Llama-style layer.

In bfloat16 rounding changes a layer's output as much as a factor of 0.98 would, so outputs alone do not distinguish two
kinds of layer. Between the parts of a layer there is little or no rounding: each part's input in a forward pass is
recomputed here from the outputs of other parts.
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

from nanovllm.attention import attention_function
from nanovllm.errors import NotFusedError
from nanovllm.fast.layers.decoder_block import Parts
from nanovllm.fast.layers.distances import difference_of_rows, in_another_way
from nanovllm.fast.layers.rotary_attention import RotaryAttention

_Equations = dict[str, tuple[Tensor, Tensor]]  # (observed, expected), [1, num_rows, ...], by place in the layer
RECORDING_NAME = "nanovllm-recording"  # attention implementation for watched layers


class LayerEquations:
    """Records inputs and outputs of each decoder layer's parts, for `check` after the layer's call.

    Args:
        modules, blocks: the decoder layers and their parts.
    """

    def __init__(self, modules: Sequence[nn.Module], blocks: Sequence[Parts]) -> None:
        self._modules = modules
        self.blocks = blocks
        self._notes = False
        self._got: dict[str, Tensor] = {}  # inputs by part of the running layer; "layer": of the layer itself
        self._gave: dict[str, Tensor] = {}  # outputs
        self._states: tuple[Tensor, ...] = ()  # query, key, value and output of attention
        self._fused_attention: set[int] = set()  # layers with RotaryAttention, which is compared elsewhere

    @contextmanager
    def watching(self, on_layer: Callable[[int, nn.Module, Any, Any, Any], None] | None = None) -> Iterator[None]:
        """Hook the layers and their parts; enter it after replacements of modules are installed.

        Args:
            on_layer: callback after each layer, with its index and a forward hook's arguments (with keyword arguments).
        """
        self._fused_attention.clear()
        with ExitStack() as hooks:
            for index, (module, block) in enumerate(zip(self._modules, self.blocks, strict=True)):
                hooks.callback(module.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(self._end).remove)
                parts = block.linears | {f"{name} norm": norm.module for name, norm in block.norms.items()}
                for name, part in parts.items():
                    hooks.callback(part.register_forward_hook(partial(self._note, name), with_kwargs=True).remove)
                for fused in (part for part in module.modules() if isinstance(part, RotaryAttention)):
                    self._fused_attention.add(index)
                    hooks.callback(fused.register_forward_pre_hook(self._note_attention_input, with_kwargs=True).remove)
                if on_layer is not None:
                    hooks.callback(module.register_forward_hook(partial(on_layer, index), with_kwargs=True).remove)
                _watchers[block.attention] = self
                hooks.callback(_watchers.pop, block.attention)
            yield

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._got = {}
        self._gave = {}
        self._states = ()
        self._notes = True
        self._note_input("layer", args, kwargs)

    def _end(self, *_: Any) -> None:
        self._notes = False

    def _note(self, name: str, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._notes and isinstance(output, Tensor):
            self._note_input(name, args, kwargs)
            self._gave[name] = output.clone()

    def _note_attention_input(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        self._note_input("attention", args, kwargs)

    def _note_input(self, name: str, args: Any, kwargs: Any) -> None:
        given = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
        if isinstance(given, Tensor):
            self._got[name] = given.clone()  # a layer may change it in place later

    def note_attention(self, *states: Tensor) -> None:
        self._states = tuple(part.clone() for part in states)

    def check(self, index: int, kwargs: Any, output: Tensor, num_rows: Sequence[int]) -> None:
        """Check the last call of a layer; raises NotFusedError for a layer of another kind.

        Args:
            num_rows: rows of each sequence; later rows are padding.
        """
        kind = self.blocks[index].kind
        total = sum(num_rows)
        with in_another_way(f"{kind} is called", ValueError, RuntimeError):
            exact, rounded = self._block_equations(output)
            if index in self._fused_attention:
                exact["before attention"] = self._got["attention"], self._gave["input norm"]
            else:
                exact_heads, rounded_heads = self._attention_equations(kwargs["position_embeddings"], kind)
                exact = exact | exact_heads
                rounded = rounded | rounded_heads
        for place, (seen, expected) in exact.items():
            if seen.dtype != expected.dtype or not torch.equal(seen[:, :total], expected[:, :total]):
                raise NotFusedError(f"{kind} computes something else {place}")
        for place, pair in rounded.items():
            for seen, expected in zip(*(states[0, :total].split(num_rows) for states in pair), strict=True):
                if (differs := difference_of_rows(seen, expected)) is not None:
                    raise NotFusedError(f"{kind} computes something else {place}: rows differ {differs}")

    def _block_equations(self, output: Tensor) -> tuple[_Equations, _Equations]:
        """(exact, rounded) equations around attention and in the MLP; exact ones hold bit for bit."""
        got = self._got
        gave = self._gave
        residual = got["layer"] + gave["o"]
        exact = {
            "before its first norm": (got["input norm"], got["layer"]),
            "between attention and its second norm": (got["post norm"], residual),
            "before gate_proj": (got["gate"], gave["post norm"]),
            "before up_proj": (got["up"], gave["post norm"]),
            "behind its MLP": (output, residual + gave["down"]),
        }
        return exact, {"within its MLP": (got["down"], F.silu(gave["gate"].float()) * gave["up"])}

    def _attention_equations(self, turns: Any, kind: str) -> tuple[_Equations, _Equations]:
        """(exact, rounded) equations from the first norm to the output projection."""
        got = self._got
        gave = self._gave
        *heads, attended = self._states
        query, key, value = (states.transpose(1, 2) for states in heads)  # [1, num_rows, heads, head_dim]
        if any(part.shape != (*query.shape[:2], query.shape[3]) for part in turns):
            raise NotFusedError(f"{kind} turns only a part of each head by its position")
        exact = {f"before {name}_proj": (got[name], gave["input norm"]) for name in ("q", "k", "v")}
        exact["before its values"] = value.flatten(2), gave["v"]
        exact["behind attention"] = got["o"], attended.flatten(2)
        rounded = {}
        for name, states, what in (("q", query, "queries"), ("k", key, "keys")):
            product = gave[name].view(states.shape)
            if (normed := gave.get(f"{name} norm")) is not None:
                exact[f"before {name}_norm"] = got[f"{name} norm"], product
                product = normed
            rounded[f"before its {what}"] = states.flatten(2), _turned(product.float(), *turns).flatten(2)
        return exact, rounded


def _turned(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding (rotated halves) of states [1, num_rows, heads, head_dim]."""
    first, second = states.chunk(2, dim=-1)
    return states * cosines[:, :, None] + torch.cat([-second, first], dim=-1) * sines[:, :, None]


_watchers: dict[nn.Module, LayerEquations] = {}


def recording_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`attention_function` that records its tensors for watched layers."""
    output, weights = attention_function(module, query, key, value, *args, **kwargs)
    if (watcher := _watchers.get(module)) is not None:
        watcher.note_attention(query, key, value, output)
    return output, weights


AttentionInterface.register(RECORDING_NAME, recording_attention)
