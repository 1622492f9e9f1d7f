"""Recognises Llama-style decoder layers: returns their parts, or the reason why a layer is of another kind.

A Llama-style layer (Llama, Mistral, Qwen2, Qwen3, SmolLM2) has RMS norms before attention and before a SiLU-gated MLP,
optional RMS norms of q's and k's heads, rotary embedding and residual sums. Only this file recognises modules, by
names, shapes and outputs; fused and stacked layers, fused attention, the direct pass and `LayerEquations` read its
descriptions. To add a family that names the same parts differently, change this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from nanovllm.attention import AttentionLayer
from nanovllm.errors import NotFusedError
from nanovllm.fast.attention.layer_traits import first_beyond
from nanovllm.fast.layers.distances import ROW_TOLERANCE, row_distances

# Rotary embeddings with angles that depend only on the position.
_STATIC_ROPES = ("default", "linear", "llama3", "yarn")


class Norm(NamedTuple):
    module: Any
    epsilon: float


class Parts(NamedTuple):
    """Parts of an attention module or of a decoder layer.

    kind: the module's class name.
    attention: the attention module.
    linears: modules of any class: "q", "k", "v", "o"; for a layer also "gate", "up", "down".
    norms: "q" and "k", if the heads have norms; for a layer also "input" and "post".
    """

    kind: str
    attention: nn.Module
    linears: dict[str, Any]
    norms: dict[str, Norm]

    @property
    def sizes(self) -> tuple[int, int]:
        """(hidden_size, intermediate_size) of a layer."""
        return self.linears["down"].out_features, self.linears["down"].in_features


class ModelParts(NamedTuple):
    """Modules of a Llama-style causal language model besides its layers."""

    embed: Any
    rotary: Any
    norm: Any
    head: Any


def describe_blocks(modules: Sequence[nn.Module], layers: Sequence[AttentionLayer]) -> list[Parts]:
    """Describe the decoder layers of these attention layers; raises NotFusedError for a layer of another kind."""
    if not modules or len(modules) != len(layers):
        raise NotFusedError("the attention modules are in no list of layers")
    check_attention(layers)
    return [_describe_block(module, layer) for module, layer in zip(modules, layers, strict=True)]


def _describe_block(module: nn.Module, layer: AttentionLayer) -> Parts:
    kind = type(module).__name__
    mlp = getattr(module, "mlp", None)
    linears = {name: _linear(mlp, f"{name}_proj", kind) for name in ("gate", "up", "down")}
    names = {"input": "input_layernorm", "post": "post_attention_layernorm"}
    norms = {place: find_norm(module, name, linears["gate"].in_features, kind) for place, name in names.items()}
    own = describe_attention(layer)
    block = Parts(kind, own.attention, own.linears | linears, norms | own.norms)
    _check_sizes(block, layer)
    for place, norm in block.norms.items():
        if not is_rms_norm(norm, layer.dtype):
            raise NotFusedError(f"{kind} has no RMS norm over {len(norm.module.weight)} elements as its {place} norm")
    if not _is_silu(getattr(mlp, "act_fn", None)):
        raise NotFusedError(f"{kind} has no SiLU between its gate and what that gates")
    parts = (*block.linears.values(), *(norm.module for norm in block.norms.values()))
    known = {id(parameter) for part in parts for parameter in part.parameters()}
    if others := [name for name, parameter in module.named_parameters() if id(parameter) not in known]:
        raise NotFusedError(f"{kind} has more parameters: {', '.join(others)}")
    return block


def describe_attention(layer: AttentionLayer) -> Parts:
    """Describe an attention module; raises NotFusedError if a part is missing. Does not test norms for being RMS."""
    module = layer.module
    kind = type(layer.module).__name__
    linears = {name: _linear(module, f"{name}_proj", kind) for name in ("q", "k", "v", "o")}
    normed = [name for name in ("q", "k") if getattr(module, f"{name}_norm", None) is not None]
    if len(normed) == 1:
        raise NotFusedError(f"{kind} has a {normed[0]}_norm alone")
    norms = {name: find_norm(module, f"{name}_norm", layer.traits.head_dim, kind) for name in normed}
    return Parts(kind, module, linears, norms)


def model_parts(model: Any) -> ModelParts | None:
    """The modules outside of the layers; None for a model with other parts or with a custom forward."""
    base = model.base_model
    head = model.get_output_embeddings()
    is_known = (
        all(type(part).forward.__module__.startswith("transformers.") for part in (model, base))
        and not any("forward" in vars(part) for part in (model, base))
        and {name for name, _ in base.named_children()} == {"embed_tokens", "layers", "norm", "rotary_emb"}
        and [child for child in model.children() if child is not base] == [head]
        and getattr(base.rotary_emb, "rope_type", None) in _STATIC_ROPES
    )
    return ModelParts(base.embed_tokens, base.rotary_emb, base.norm, head) if is_known else None


def check_attention(layers: Sequence[AttentionLayer], *served: str) -> None:
    """Raise NotFusedError if layers differ in head sizes, share K and V, or have traits beyond plain causal attention.

    Args:
        served: traits to allow, as in `first_beyond`.
    """
    sizes = {(traits.num_heads, traits.num_kv_heads, traits.head_dim) for traits in (layer.traits for layer in layers)}
    if len(sizes) > 1:
        raise NotFusedError(f"the layers have heads of different sizes: {sorted(sizes)}")
    for index, layer in enumerate(layers):
        beyond = first_beyond(layer.traits, *served)
        if beyond is None and layer.traits.shares is not None:
            beyond = f"the K and V of layer {layer.traits.shares}"
        if beyond is not None:
            raise NotFusedError(f"layer {index} has {beyond}")


def check_plain_cache(layer: AttentionLayer) -> None:
    """Raise NotFusedError if a layer's K and V are not kept in its own dtype."""
    if layer.cache_dtype is not None:
        raise NotFusedError("K and V are kept in 8-bit floats")


def _linear(parent: Any, name: str, kind: str) -> Any:
    found = getattr(parent, name, None)
    if not isinstance(found, nn.Module) or not hasattr(found, "in_features"):
        raise NotFusedError(f"{kind} has no linear layer {name}")
    return found


def find_norm(parent: nn.Module, name: str, size: int, kind: str) -> Norm:
    found = getattr(parent, name, None)
    epsilon = getattr(found, "variance_epsilon", getattr(found, "eps", None))
    if epsilon is None or getattr(getattr(found, "weight", None), "shape", None) != (size,):
        raise NotFusedError(f"{kind} has no RMS norm {name} over {size} elements")
    return Norm(found, float(epsilon))


def _check_sizes(block: Parts, layer: AttentionLayer) -> None:
    traits, (hidden, inner) = layer.traits, block.sizes
    heads = traits.num_heads * traits.head_dim
    kv = traits.num_kv_heads * traits.head_dim
    expected = {"q": (heads, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, heads),
                "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}  # fmt: skip
    sizes = {name: (linear.out_features, linear.in_features) for name, linear in block.linears.items()}
    if sizes != expected:
        raise NotFusedError(f"{block.kind} has projections of other sizes: {sizes}")


def is_rms_norm(norm: Norm, dtype: torch.dtype) -> bool:
    """Tests the norm in float32 on rows with a mean, which a layer norm would subtract.

    One row is so small that its output depends on the epsilon.
    """
    module, epsilon = norm
    if module.weight.dtype != dtype:
        return False
    row = torch.linspace(-1.0, 3.0, len(module.weight), device="cpu").to(module.weight.device)
    rows = torch.stack([row, row * epsilon**0.5])
    exact = rows * (rows.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt() * module.weight.float()
    own = functional_call(module, {name: p.detach().float() for name, p in module.named_parameters()}, rows[None])[0]
    return own.dtype == torch.float32 and bool((row_distances(own, exact) <= ROW_TOLERANCE[torch.float32]).all())


def _is_silu(function: Any) -> bool:
    """Tests the function in float32."""
    if not callable(function):
        return False
    values = torch.linspace(-8.0, 8.0, 65, device="cpu")
    return bool((function(values) - F.silu(values)).abs().max() <= ROW_TOLERANCE[torch.float32])
