"""Decoder layers of the most common kind, in a few calls of C++ instead of sixty operations.

That kind is Llama's; `decoder_block.py` recognises it. Both are then compared on batches: a layer that computes
anything else runs unchanged.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from nanovllm.attention.cpp import CppPlan
from nanovllm.attention.operator import STEP_HANDLE, STEP_SLOT_MAPPING, AttentionLayer, running_step
from nanovllm.core.errors import NotFusedError
from nanovllm.model.fast.decoder_block import Parts, describe_blocks
from nanovllm.model.fast.distances import check_change
from nanovllm.model.fast.layer_equations import LayerEquations
from nanovllm.model.fast.packed_linears import AnyLinear

if TYPE_CHECKING:
    from nanovllm.kernels.cpp import Kernels
    from nanovllm.kernels.huge_pages import HugePages
    from nanovllm.kernels.packed_product import NormStruct, PackedProduct, StackedLayerStruct


@dataclass(slots=True)
class Workspace:
    """Memory that all layers of an engine use in turn, for steps of up to `max_rows` rows."""

    scratch: Tensor  # for whole tiles of rows
    queries: Tensor  # [max_rows, num_heads, head_dim]
    attended: Tensor  # as queries


class FusedLayer:
    """One decoder layer; called in its module's place.

    Raises NotFusedError if its projections cannot be packed.
    """

    stack: FusedStack | None = None  # that computes it, with all others
    _is_first = False

    def __init__(self, block: Parts, layer: AttentionLayer, kernels: Kernels, memory: HugePages | None) -> None:
        from nanovllm.kernels.packed_product import LayerStruct, NormStruct, PackedProduct, can_pack

        self._kernels = kernels
        traits = layer.traits
        self._scaling = layer.scaling
        self._caches: tuple[Tensor, Tensor] | None = None
        self.linears: list[AnyLinear] = list(block.linears.values())  # whose weights are packed here

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
        self._keep = (block, products)  # alive as long as the pointers to them
        self._struct = LayerStruct(
            norm("input"), norm("post"), norm("q"), norm("k"), *(product.struct for product in products),
            traits.num_heads, traits.num_kv_heads,
        )  # fmt: skip

    def bind(self, caches: tuple[Tensor, Tensor], workspace: Workspace) -> None:
        """Set what the layer works on: its own K and V, and memory."""
        self._caches, self._workspace = caches, workspace

    def stacked(self) -> StackedLayerStruct:
        """Valid as long as the layer."""
        from nanovllm.kernels.packed_product import StackedLayerStruct

        keys, values = (cache.data_ptr() for cache in self._caches)  # type: ignore[union-attr]
        return StackedLayerStruct(ctypes.addressof(self._struct), keys, values, self._scaling)

    def call_in(self, stack: FusedStack, *, is_first: bool) -> None:
        """Let a stack compute the layer from now on, as long as that is on."""
        self.stack, self._is_first = stack, is_first

    def __call__(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Tensor:
        """hidden_states [1, num_rows, hidden_size], cosines and sines [1, num_rows, head_dim].

        Returns [1, num_rows, hidden_size], memory of its own: a model may read it behind the last layer.
        In a stack the first layer returns what the last one computes, and the others what they get.
        """
        if self.stack is not None and self.stack.runs_pass(begins=self._is_first):
            return self.stack(hidden_states, position_embeddings, kwargs) if self._is_first else hidden_states
        step, space, num_rows = running_step(kwargs[STEP_HANDLE]), self._workspace, hidden_states.shape[1]
        plan, (keys, values) = step.plan, self._caches  # type: ignore[misc]
        assert isinstance(plan, CppPlan)  # what `fuse_layers` is asked for
        cosines, sines = (part.contiguous() for part in position_embeddings)
        hidden, output = (
            hidden_states.contiguous(),
            torch.empty_like(hidden_states, memory_format=torch.contiguous_format),
        )
        layer, threads = ctypes.byref(self._struct), torch.get_num_threads()
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
    """All layers of a model in one call: the first layer runs all, the others pass its answer on.

    Python's own work between layers takes three times as long as it would alone, since each layer's weights go through
    the caches. Its output is valid until the next call.
    """

    is_used = True  # of all engines: not while a profile times attention

    def __init__(self, layers: Sequence[FusedLayer], workspace: Workspace, kernels: Kernels) -> None:
        self.is_on = True
        self._runs_pass = False
        from nanovllm.kernels.packed_product import StackedLayerStruct, WorkspaceStruct

        with torch.inference_mode(False):  # as for the caches
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
        """Whether it computes the forward pass that a layer is called in; what is so at the first layer stays so."""
        if begins:
            self._runs_pass = self.is_ready
        return self._runs_pass

    def __call__(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], kwargs: Any) -> Tensor:
        plan, num_rows = running_step(kwargs[STEP_HANDLE]).plan, hidden_states.shape[1]
        assert isinstance(plan, CppPlan)
        rows = plan.rows_of_full_attention()
        inputs = [part.contiguous() for part in (hidden_states, *position_embeddings, kwargs[STEP_SLOT_MAPPING])]
        self._run(
            self._layers, len(self._layers), ctypes.byref(rows), ctypes.byref(self._workspace),
            *(part.data_ptr() for part in inputs), num_rows, torch.get_num_threads(),
        )  # fmt: skip
        return self._output[:num_rows][None]


class _Chain:
    """Whether each layer of a forward pass gets the very object that the last one returned."""

    def __init__(self) -> None:
        self._last: tuple[int, Any, Any] | None = None
        self._is_whole = True

    def note(self, index: int, args: Any, kwargs: Any, output: Any) -> None:
        before, embeddings = args[0] if args else kwargs["hidden_states"], kwargs["position_embeddings"]
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
    memory: HugePages | None = None,
) -> list[FusedLayer]:
    """A fused layer for each module, which were found to compute the same.

    Args:
        caches, max_rows: K and V of each layer; the rows of any step, at most.
        run_batches: runs batches through the modules, beside which the fused layers are tried.
        on_fused: called with each fused layer once it is sure to be used: its module's plain weights may be freed.
        memory: for all packed weights beside the plain ones; without it each layer is packed twice.

    Raises NotFusedError, before the first call of `on_fused`, if a layer is of another kind.
    """
    blocks = describe_blocks(modules, layers)
    workspaces: list[Workspace] = []
    kept, passed_on = cast("list[FusedLayer | None]", [None] * len(modules)), _Chain()
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
        passed_on.note(index, args, kwargs, output)

    with equations.watching(compare):
        run_batches()
    result = []
    for index, kept_one in enumerate(kept):
        result.append(kept_one or make(index))
        on_fused(result[-1])
    passed_on.stack_if_whole(result, workspaces[0], kernels)
    return result


def _workspace(fused: FusedLayer, layer: AttentionLayer, dtype: torch.dtype, max_rows: int) -> Workspace:
    from nanovllm.kernels.packed_product import TILE_ROWS

    def rows_of(*sizes: int, num_rows: int = max_rows) -> Tensor:
        return torch.empty(num_rows, *sizes, dtype=dtype, device="cpu")

    heads = (layer.traits.num_heads, layer.traits.head_dim)
    with torch.inference_mode(False):  # as for the caches
        return Workspace(
            scratch=rows_of(
                fused.hidden_size + max(fused.qkv_size, fused.inner_size), num_rows=max_rows + -max_rows % TILE_ROWS
            ),
            queries=rows_of(*heads),
            attended=rows_of(*heads),
        )


def _compare(index: int, fused: FusedLayer, equations: LayerEquations, args: Any, kwargs: Any, output: Any) -> None:
    """Try a fused layer on what its module was called with, each sequence by itself. Raises NotFusedError."""
    kind = equations.blocks[index].kind
    if not isinstance(output, Tensor):
        raise NotFusedError(f"{kind} returns {type(output).__name__}, not one tensor")
    try:
        before = args[0] if args else kwargs["hidden_states"]
        num_rows = cast("CppPlan", running_step(kwargs[STEP_HANDLE]).plan).rows_of_sequences()
        equations.check(index, kwargs, output, num_rows)
        own = fused(*args, **kwargs)
    except (TypeError, KeyError, AttributeError) as error:
        raise NotFusedError(f"{kind} is called in another way: {error!r}") from error
    for parts in zip(*(states[0].split(num_rows) for states in (before, output, own)), strict=True):
        check_change(kind, *parts)
