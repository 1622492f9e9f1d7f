"""Llama-style decoder layers in a few C++ calls instead of sixty operations.

`decoder_block.py` recognises the layers. Each is then compared with its module on trial batches; if any differs, all
layers run unfused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from nanovllm.attention import STEP_HANDLE, STEP_SLOT_MAPPING, AttentionLayer, running_step
from nanovllm.errors import NotFusedError
from nanovllm.fast.attention.cpp import CppPlan
from nanovllm.fast.layers.decoder_block import Parts, describe_blocks
from nanovllm.fast.layers.distances import check_change, in_another_way
from nanovllm.fast.layers.layer_equations import LayerEquations
from nanovllm.models.packed_linears import AnyLinear
from nanovllm.models.quantised.blocks import QuantisedLinear

if TYPE_CHECKING:
    from nanovllm.fast.host.memory import HugePages
    from nanovllm.fast.kernels.cpp import Kernels
    from nanovllm.fast.kernels.packed_product import NormStruct, PackedProduct, StackedLayerStruct


@dataclass(slots=True)
class Workspace:
    """Buffers that all layers of an engine share, for steps of up to `max_rows` rows."""

    scratch: Tensor  # rows padded to whole tiles
    queries: Tensor  # [max_rows, num_heads, head_dim]
    attended: Tensor  # same shape as queries


class FusedLayer:
    """One decoder layer; replaces its module's call.

    Raises NotFusedError if its projections cannot be packed.
    """

    stack: FusedStack | None = None  # all layers in one call, this one among them
    _is_first = False

    def __init__(self, block: Parts, layer: AttentionLayer, kernels: Kernels, memory: HugePages | None) -> None:
        from nanovllm.fast.kernels.packed_product import LayerStruct, NormStruct, PackedProduct, can_pack

        self._kernels = kernels
        self.block = block
        self.dtype = layer.dtype
        traits = layer.traits
        self._scaling = layer.scaling
        self._caches: tuple[Tensor, Tensor] | None = None
        self.linears: list[AnyLinear] = list(block.linears.values())  # layers that this one packs
        is_quantised = any(isinstance(linear, QuantisedLinear) for linear in self.linears)
        self.has_byte_rows = is_quantised and kernels.least_byte_rows > 0  # activations of 8 bits

        def product(*names: str, interleave: bool = False) -> PackedProduct:
            linears = [block.linears[name] for name in names]
            if not can_pack(linears, layer.dtype, interleave=interleave):
                raise NotFusedError(f"{block.kind} has projections that cannot be packed: {', '.join(names)}")
            return PackedProduct(linears, interleave=interleave, memory=memory)

        def norm(place: str) -> NormStruct:
            module, epsilon = block.norms.get(place, (None, 0.0))
            return NormStruct(None if module is None else module.weight.data_ptr(), epsilon)

        products = product("q", "k", "v"), product("o"), product("gate", "up", interleave=True), product("down")
        (self.hidden_size, self.inner_size), self.qkv_size = block.sizes, products[0].num_outputs
        self._keep = products  # keeps the targets of the pointers alive
        self._struct = LayerStruct(
            norm("input"), norm("post"), norm("q"), norm("k"), *(product.struct for product in products),
            traits.num_heads, traits.num_kv_heads,
        )  # fmt: skip

    def bind(self, caches: tuple[Tensor, Tensor], workspace: Workspace) -> None:
        """Set the layer's K and V cache and its buffers."""
        self._caches = caches
        self._workspace = workspace

    def places(self) -> dict[AnyLinear, tuple[PackedProduct, int]]:
        """The product of each linear layer, and its number there."""
        names = ("q", "k", "v"), ("o",), ("gate", "up"), ("down",)
        return {
            self.block.linears[name]: (product, number)
            for product, of_product in zip(self._keep, names, strict=True)
            for number, name in enumerate(of_product)
        }

    def use_adapters(self, rows: int, of_products: Sequence[int]) -> None:
        """Set the addresses of a step's `AdapterRowsStruct` and of each product's `LowRankStruct`s."""
        self._struct.adapters = rows
        self._struct.low_rank = (ctypes.c_void_p * len(of_products))(*of_products)

    @staticmethod
    def with_adapters(layers: Sequence[FusedLayer], num_slots: int, max_rank: int, max_rows: int) -> Any:
        """The `LowRankLayers` of these layers."""
        from nanovllm.fast.layers.low_rank_layers import LowRankLayers

        return LowRankLayers(layers, num_slots, max_rank, max_rows)

    def stacked(self) -> StackedLayerStruct:
        """The layer as a struct of `FusedStack`; valid while the layer lives."""
        from nanovllm.fast.kernels.packed_product import StackedLayerStruct

        keys, values = (cache.data_ptr() for cache in self._caches)  # type: ignore[union-attr]
        return StackedLayerStruct(ctypes.addressof(self._struct), keys, values, self._scaling)

    def call_in(self, stack: FusedStack, *, is_first: bool) -> None:
        """Let a stack compute the layer from now on, while the stack is on."""
        self.stack = stack
        self._is_first = is_first

    def __call__(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Tensor:
        """Compute the layer, or all layers if it is the first of a stack.

        Args:
            hidden_states: [1, num_rows, hidden_size].
            position_embeddings: cosines and sines [1, num_rows, head_dim].

        Returns [1, num_rows, hidden_size], newly allocated, since a model may read it after the last layer. In a stack
        the first layer returns the last one's output, and the others return their input.
        """
        if self.stack is not None and self.stack.runs_pass(begins=self._is_first):
            return self.stack(hidden_states, position_embeddings, kwargs) if self._is_first else hidden_states
        step = running_step(kwargs[STEP_HANDLE])
        space = self._workspace
        num_rows = hidden_states.shape[1]
        plan, (keys, values) = step.plan, self._caches  # type: ignore[misc]
        assert isinstance(plan, CppPlan)  # layers are fused only for this backend
        cosines, sines = (part.contiguous() for part in position_embeddings)
        hidden = hidden_states.contiguous()
        output = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        layer = ctypes.byref(self._struct)
        threads = torch.get_num_threads()
        self._kernels.attention_inputs(
            layer, hidden.data_ptr(), cosines.data_ptr(), sines.data_ptr(), kwargs[STEP_SLOT_MAPPING].data_ptr(),
            keys.data_ptr(), values.data_ptr(), space.queries.data_ptr(), space.scratch.data_ptr(), num_rows, threads,
        )  # fmt: skip
        plan.attend_into(space.attended, space.queries, keys, values, self._scaling)
        self._kernels.attention_outputs(
            layer, space.attended.data_ptr(), hidden.data_ptr(), output.data_ptr(),
            space.scratch.data_ptr(), num_rows, threads,
        )  # fmt: skip
        return output


class FusedStack:
    """All layers of a model in one call: the first layer runs all, the others pass its output on.

    Between layers Python would take three times its usual time, since each layer's weights pass through the caches.
    The output is valid until the next call.
    """

    is_used = True  # one switch for all engines; off while a profile times attention

    def __init__(self, layers: Sequence[FusedLayer], workspace: Workspace, kernels: Kernels) -> None:
        self.is_on = True
        self._runs_pass = False
        from nanovllm.fast.kernels.packed_product import StackedLayerStruct, WorkspaceStruct

        with torch.inference_mode(False):  # inference tensors could not be written outside inference mode
            outputs = workspace.queries.new_empty(2, len(workspace.queries), layers[0].hidden_size)
        self._output = outputs[(len(layers) - 1) % 2]
        self._layers = (StackedLayerStruct * len(layers))(*(layer.stacked() for layer in layers))
        parts = workspace.queries, workspace.attended, workspace.scratch, *outputs
        self._workspace = WorkspaceStruct(*(part.data_ptr() for part in parts))
        self._run = kernels.decoder_layers

    @property
    def is_ready(self) -> bool:
        return self.is_on and FusedStack.is_used

    def runs_pass(self, *, begins: bool) -> bool:
        """Whether the stack computes the current forward pass; decided at the first layer (`begins`)."""
        if begins:
            self._runs_pass = self.is_ready
        return self._runs_pass

    def __call__(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], kwargs: Any) -> Tensor:
        plan = running_step(kwargs[STEP_HANDLE]).plan
        num_rows = hidden_states.shape[1]
        assert isinstance(plan, CppPlan)
        rows = plan.rows_of_full_attention()
        inputs = [part.contiguous() for part in (hidden_states, *position_embeddings, kwargs[STEP_SLOT_MAPPING])]
        self._run(
            self._layers, len(self._layers), ctypes.byref(rows), ctypes.byref(self._workspace),
            *(part.data_ptr() for part in inputs), num_rows, torch.get_num_threads(),
        )  # fmt: skip
        return self._output[:num_rows][None]


class _Chain:
    """Checks that each layer of a forward pass receives the very tensor that the previous layer returned."""

    def __init__(self) -> None:
        self._last: tuple[int, Any, Any] | None = None
        self._is_whole = True

    def note(self, index: int, args: Any, kwargs: Any, output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        embeddings = kwargs["position_embeddings"]
        if index > 0 and (
            self._last is None
            or self._last[0] != index - 1
            or self._last[1] is not before
            or self._last[2] is not embeddings
        ):
            self._is_whole = False
        self._last = index, output, embeddings

    def stack_if_whole(self, layers: Sequence[FusedLayer], workspace: Workspace, kernels: Kernels) -> None:
        if self._is_whole:
            stack = FusedStack(layers, workspace, kernels)
            for layer in layers:
                layer.call_in(stack, is_first=layer is layers[0])


def fuse_layers(
    modules: Sequence[nn.Module],
    layers: Sequence[AttentionLayer],
    caches: Sequence[tuple[Tensor, Tensor]],
    kernels: Kernels,
    *,
    max_rows: int,
    run_batches: Callable[[], Any],
    on_fused: Callable[[FusedLayer], None],
    memory: HugePages | None,
) -> list[FusedLayer]:
    """Fused layers, one per module, each compared with its module.

    Args:
        caches, max_rows: K and V of each layer; the most rows of a step.
        run_batches: runs trial batches through the modules.
        on_fused: callback with each fused layer once its use is certain: its module's plain weights may be freed.
        memory: holds all packed weights in addition to the plain ones; without it each layer is packed twice.

    Raises NotFusedError, before the first call of `on_fused`, if a layer is of another kind.
    """
    blocks = describe_blocks(modules, layers)
    workspaces: list[Workspace] = []
    kept = cast("list[FusedLayer | None]", [None] * len(modules))
    chain = _Chain()
    equations = LayerEquations(modules, blocks)

    def make(index: int) -> FusedLayer:
        fused = FusedLayer(blocks[index], layers[index], kernels, memory)
        if not workspaces:
            workspaces.append(_workspace(fused, layers[index], kernels.dtype, max_rows))
        fused.bind(caches[index], workspaces[0])
        return fused

    def compare(index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        fused = kept[index] or make(index)
        kept[index] = fused if memory is not None else None
        _compare(index, fused, equations, args, kwargs, output)
        chain.note(index, args, kwargs, output)

    with equations.watching(compare):
        run_batches()
    result = []
    for index, kept_one in enumerate(kept):
        result.append(kept_one or make(index))
        on_fused(result[-1])
    chain.stack_if_whole(result, workspaces[0], kernels)
    return result


def _workspace(fused: FusedLayer, layer: AttentionLayer, dtype: torch.dtype, max_rows: int) -> Workspace:
    from nanovllm.fast.kernels.packed_product import TILE_ROWS

    def rows_of(*sizes: int, num_rows: int = max_rows) -> Tensor:
        return torch.empty(num_rows, *sizes, dtype=dtype, device="cpu")

    heads = (layer.traits.num_heads, layer.traits.head_dim)
    with torch.inference_mode(False):  # inference tensors could not be written outside inference mode
        return Workspace(
            scratch=rows_of(
                fused.hidden_size + max(fused.qkv_size, fused.inner_size), num_rows=max_rows + -max_rows % TILE_ROWS
            ),
            queries=rows_of(*heads),
            attended=rows_of(*heads),
        )


def _compare(index: int, fused: FusedLayer, equations: LayerEquations, args: Any, kwargs: Any, output: Any) -> None:
    """Compare a fused layer with its module on the module's inputs, sequence by sequence; raises NotFusedError."""
    kind = equations.blocks[index].kind
    if not isinstance(output, Tensor):
        raise NotFusedError(f"{kind} returns {type(output).__name__}, not one tensor")
    with in_another_way(f"{kind} is called"):
        before = args[0] if args else kwargs["hidden_states"]
        num_rows = cast("CppPlan", running_step(kwargs[STEP_HANDLE]).plan).rows_of_sequences()
        equations.check(index, kwargs, output, num_rows)
        own = fused(*args, **kwargs)
    for parts in zip(*(states[0].split(num_rows) for states in (before, output, own)), strict=True):
        check_change(kind, *parts, has_byte_rows=fused.has_byte_rows)
