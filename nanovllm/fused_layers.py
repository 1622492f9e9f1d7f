"""Decoder layers of the most common kind, in a few calls of C++ instead of sixty operations.

That kind is Llama's (Mistral, Qwen2, Qwen3, SmolLM2 are of it): RMS norms before attention and before a SiLU-gated
feed-forward block, rotary embedding, residual sums. A layer's modules are recognised by their names; that it computes
nothing else is not believed but tried, by comparing both on a batch. Any other layer runs as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.attention.cpp import CppPlan
from nanovllm.attention.operator import STEP_HANDLE, running_step
from nanovllm.kernels import LANES, Kernels
from nanovllm.model_probe import AttentionLayer
from nanovllm.packing import PackedProduct, ProductStruct, can_pack

# How far a fused layer's change of the hidden states may lie from the module's own, in relation to its size. Measured
# on SmolLM2: 2e-7 and 3e-3. What is not rounded in between makes the fused one the more precise.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class NotFusedError(ValueError):
    """The layer is of another kind; the message says in what."""


class _Norm(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("epsilon", c_float)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Norm) for name in ("input_norm", "post_attention_norm", "query_norm", "key_norm")),
        *((name, ProductStruct) for name in ("qkv", "attention_output", "gate_up", "down")),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
    ]


@dataclass(slots=True)
class Workspace:
    """Memory that all layers of an engine use in turn, for steps of up to `max_rows` rows."""

    scratch: Tensor
    queries: Tensor  # [max_rows, num_heads, head_dim]
    attended: Tensor  # as queries
    hidden: tuple[Tensor, Tensor]  # [max_rows, hidden_size]; a layer reads one and writes the other


class FusedLayer:
    """One decoder layer; called in its module's place.

    Raises NotFusedError if the module's parts are of another kind.
    """

    def __init__(self, module: nn.Module, layer: AttentionLayer, kernels: Kernels) -> None:
        self._kernels = kernels
        self._scaling, self.head_dim = layer.scaling, layer.head_dim
        self._caches: tuple[Tensor, Tensor] | None = None
        self.linears: list[nn.Linear] = []  # whose weights are packed here
        kind, parts = type(module).__name__, dict(module.named_modules())

        def product(*names: str, interleave: bool = False) -> PackedProduct:
            linears = [parts.get(name) for name in names]
            if None in linears or not can_pack(linears, layer.dtype):  # type: ignore[arg-type]
                raise NotFusedError(f"{kind} has no linear layers {', '.join(names)} that can be packed")
            self.linears += linears  # type: ignore[arg-type]
            return PackedProduct(linears, interleave=interleave)  # type: ignore[arg-type]

        def norm(name: str, size: int, *, optional: bool = False) -> _Norm:
            found = parts.get(name)
            if found is None and optional:
                return _Norm(None, 0.0)
            weight = getattr(found, "weight", None)
            epsilon = getattr(found, "variance_epsilon", getattr(found, "eps", None))
            if weight is None or epsilon is None or weight.dtype != layer.dtype or weight.shape != (size,):
                raise NotFusedError(f"{kind} has no RMS norm {name} over {size} elements")
            return _Norm(weight.data_ptr(), epsilon)

        heads = layer.num_heads * layer.head_dim
        qkv = product("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        output = product("self_attn.o_proj")
        gate_up = product("mlp.gate_proj", "mlp.up_proj", interleave=True)
        down = product("mlp.down_proj")
        sizes = (qkv.num_outputs, output.struct.depth, gate_up.num_outputs, down.num_outputs)
        self.hidden_size, self.inner_size, self.qkv_size = qkv.struct.depth, down.struct.depth, qkv.num_outputs
        kv_heads = 2 * layer.num_kv_heads * layer.head_dim
        if sizes != (heads + kv_heads, heads, 2 * self.inner_size, self.hidden_size) or self.inner_size % LANES:
            raise NotFusedError(f"{kind} has projections of other sizes: {sizes}")
        self._keep = (module, qkv, output, gate_up, down)  # alive as long as the pointers to them
        self._struct = _Layer(
            norm("input_layernorm", self.hidden_size),
            norm("post_attention_layernorm", self.hidden_size),
            norm("self_attn.q_norm", layer.head_dim, optional=True),
            norm("self_attn.k_norm", layer.head_dim, optional=True),
            qkv.struct, output.struct, gate_up.struct, down.struct, layer.num_heads, layer.num_kv_heads,
        )  # fmt: skip

    def bind(self, caches: tuple[Tensor, Tensor], workspace: Workspace, index: int) -> None:
        """Set what the layer works on.

        Args:
            caches: its own K and V.
            index: its place among the layers.
        """
        self._caches, self._workspace, self._output = caches, workspace, workspace.hidden[index % 2]

    def __call__(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Tensor:
        """hidden_states [1, num_rows, hidden_size], cosines and sines [1, num_rows, head_dim].

        Returns [1, num_rows, hidden_size], valid until the next layer but one has run.
        """
        step, space, num_rows = running_step(kwargs[STEP_HANDLE]), self._workspace, hidden_states.shape[1]
        plan, (keys, values) = step.plan, self._caches  # type: ignore[misc]
        assert isinstance(plan, CppPlan)  # what `fuse_layers` is asked for
        cosines, sines = (part.contiguous() for part in position_embeddings)
        hidden = hidden_states.contiguous()
        layer, threads = ctypes.byref(self._struct), torch.get_num_threads()
        self._kernels.attention_inputs(
            layer, hidden.data_ptr(), cosines.data_ptr(), sines.data_ptr(), step.slots.data_ptr(),
            keys.data_ptr(), values.data_ptr(), space.queries.data_ptr(), space.scratch.data_ptr(), num_rows, threads,
        )  # fmt: skip
        plan.attend_by_kernels(space.attended, space.queries, keys, values, self._scaling)
        self._kernels.attention_outputs(
            layer, space.attended.data_ptr(), hidden.data_ptr(), self._output.data_ptr(),
            space.scratch.data_ptr(), num_rows, threads,
        )  # fmt: skip
        return self._output[:num_rows][None]


def fuse_layers(
    modules: Sequence[nn.Module],
    layers: Sequence[AttentionLayer],
    caches: Sequence[tuple[Tensor, Tensor]],
    kernels: Kernels,
    max_rows: int,
) -> list[FusedLayer]:
    """A fused layer for each module, with packed copies of its weights. Raises NotFusedError."""
    if len(modules) != len(layers):
        raise NotFusedError("the attention modules are in no list of layers")
    fused = [FusedLayer(module, layer, kernels) for module, layer in zip(modules, layers, strict=True)]
    first = fused[0]
    sizes = (first.hidden_size, first.inner_size)
    if any((layer.hidden_size, layer.inner_size) != sizes for layer in fused):
        raise NotFusedError("the layers are of different sizes")

    def rows_of(*sizes: int) -> Tensor:
        return torch.empty(max_rows, *sizes, dtype=kernels.dtype, device="cpu")

    heads = (layers[0].num_heads, layers[0].head_dim)
    workspace = Workspace(
        scratch=rows_of(first.hidden_size + max(first.qkv_size, first.inner_size)),
        queries=rows_of(*heads),
        attended=rows_of(*heads),
        hidden=(rows_of(first.hidden_size), rows_of(first.hidden_size)),
    )
    for index, (layer, own_caches) in enumerate(zip(fused, caches, strict=True)):
        layer.bind(own_caches, workspace, index)
    return fused


def check_fused(
    modules: Sequence[nn.Module], fused: Sequence[FusedLayer], run_batch: Callable[[], Any], dtype: torch.dtype
) -> None:
    """Compare each layer with its module while `run_batch` runs the modules. Raises NotFusedError."""

    def compare(layer: FusedLayer) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            name = type(module).__name__
            if not isinstance(output, Tensor):
                raise NotFusedError(f"{name} returns {type(output).__name__}, not one tensor")
            before = args[0] if args else kwargs["hidden_states"]
            try:
                if any(part.shape != (*before.shape[:2], layer.head_dim) for part in kwargs["position_embeddings"]):
                    raise NotFusedError(f"{name} turns only a part of each head by its position")
                own = layer(*args, **kwargs)
            except (TypeError, KeyError, AttributeError) as error:
                raise NotFusedError(f"{name} is called in another way: {error!r}") from error
            change = (output - before).float()
            distance = ((own.float() - output.float()).norm() / change.norm()).item()
            if not distance <= TOLERANCE[dtype]:
                raise NotFusedError(f"{name} computes something else: the change differs by {distance:.1e} of its size")

        return hook

    handles = [
        module.register_forward_hook(compare(layer), with_kwargs=True)
        for module, layer in zip(modules, fused, strict=True)
    ]
    try:
        run_batch()
    finally:
        for handle in handles:
            handle.remove()
