"""Llama-style attention modules with norms of q and k, rotary embedding and KV write fused into one kernel.

Llama-style means one product for q, k and v, optional RMS norms of q's and k's heads, and rotary embedding of whole
heads by halves. `describe_attention` recognises the modules; each is then compared with its fused form on a few rows,
and if any differs, all run unfused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.attention import LAYER_CACHE, LAYER_KIND, AttentionLayer, paged_attention, step_tensors
from nanovllm.errors import NotFusedError
from nanovllm.fast.layers.decoder_block import check_attention, describe_attention
from nanovllm.fast.layers.distances import difference_of_rows, in_another_way
from nanovllm.fast.layers.merged_linears import FirstPart, MergedPart

# Allowed operators: a module with others could depend on its rows, and differ on rows that are not compared.
OPERATORS = {
    "_fused_rms_norm", "_to_copy", "_unsafe_view", "add", "addmm", "alias", "all_reduce", "bmm", "cat", "clone",
    "detach", "expand", "linear", "mean", "mm", "mul", "neg", "pow", "rms_norm", "rsqrt", "slice", "split", "t",
    "transpose", "unsqueeze", "view",
}  # fmt: skip
_SERVED = ("window", "chunk", "softcap")  # traits of attention itself, which is not changed
MANY_ROWS = 2048  # second size that the kernel is compiled for
POSITIONS = (0, 3, 17, 100)  # positions of the compared rows


class RotaryAttention(nn.Module):
    """Replaces an attention module; uses the module's weights.

    Args:
        rotate: `fast.kernels.rotary.rotate_and_store` or a function with its arguments.

    Raises NotFusedError if the module's parts are of another kind.
    """

    def __init__(self, layer: AttentionLayer, rotate: Callable[..., Tensor]) -> None:
        super().__init__()
        self.scaling = layer.scaling
        self.rotate = rotate
        self._layer = layer
        parts = describe_attention(layer)
        q, k, v = (parts.linears[name] for name in ("q", "k", "v"))
        if not _are_one_product([q, k, v], layer):
            raise NotFusedError(f"{parts.kind} has no product of q, k and v alone")
        epsilons = {norm.epsilon for norm in parts.norms.values()}
        if len(epsilons) > 1:
            raise NotFusedError(f"{parts.kind} has norms of q and k with different epsilons: {sorted(epsilons)}")
        self.epsilon = max(epsilons, default=0.0)
        # Compiled code reads these attributes from this module.
        self.attention: Any = layer.module
        self.qkv = q
        self.output = parts.linears["o"]
        self.norms: Any = nn.ModuleList(norm.module for norm in parts.norms.values())

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Compute attention as the module does.

        Args:
            hidden_states: [1, num_rows, hidden_size].
            position_embeddings: cosines and sines [1, num_rows, head_dim].

        Returns hidden states [1, num_rows, hidden_size] and None for the weights.
        """
        return self.projected(self.attended(hidden_states, position_embeddings, paged_attention, kwargs)), None

    def attended(
        self, hidden_states: Tensor, position_embeddings: Any, attend: Callable[..., Tensor], kwargs: dict[str, Any]
    ) -> Tensor:
        """The module's attention [1, num_rows, num_heads, head_dim], by `attend_in_step` or its operator."""
        return self.attended_by(self.qkv.product(hidden_states), position_embeddings, attend, kwargs)

    def attended_by(
        self, products: Tensor, position_embeddings: Any, attend: Callable[..., Tensor], kwargs: dict[str, Any]
    ) -> Tensor:
        """The same of products of q, k and v, [1, num_rows, width]."""
        attention = self.attention
        cache = getattr(self.attention, LAYER_CACHE)
        handle, slot_mapping = step_tensors(attention, kwargs)
        kind = getattr(attention, LAYER_KIND)
        if slot_mapping.dim() == 2:  # several cache groups: one row per kind of layer
            slot_mapping = slot_mapping[kind]
        norms = self._norms()
        query = self.rotate(products, *position_embeddings, norms, self.epsilon, cache, slot_mapping)
        query = query.transpose(0, 1)[None]
        return attend(query, cache[0], cache[1], handle, self.scaling, kind)

    def rotated(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        """Write K and V to `cache`; returns queries [num_rows, num_heads, head_dim]."""
        products = self.qkv.product(hidden_states)
        return self.rotate(products, *position_embeddings, self._norms(), self.epsilon, cache, slot_mapping)

    def _norms(self) -> list[Tensor]:
        return [norm.weight for norm in self.norms]

    def kernel_call(self, num_rows: int) -> Callable[[], Tensor]:
        """A call of the kernel alone, on zeros, for compilation."""
        traits = self._layer.traits
        device = _device_of(self.qkv)
        zeros = partial(torch.zeros, dtype=self._layer.dtype, device=device)
        products = zeros(1, num_rows, self.qkv.num_outputs)
        turns = zeros(1, num_rows, traits.head_dim)
        layer = self._layer  # block sizes are multiples of 16, the fewest slots of a cache
        dtype = layer.cache_dtype or layer.dtype
        cache = zeros(2, 16, traits.num_kv_heads, layer.row_widths[0], dtype=dtype)
        slots = torch.zeros(num_rows, dtype=torch.int64, device=device)
        return partial(self.rotate, products, turns, turns, self._norms(), self.epsilon, cache, slots)

    def projected(self, attended: Tensor) -> Tensor:
        """Output projection of attended [1, num_rows, num_heads, head_dim]: [1, num_rows, hidden_size]."""
        result: Tensor = self.output(attended.flatten(2))
        return result


def _device_of(module: nn.Module) -> torch.device:
    """Device of a module; quantised weights are buffers, not parameters."""
    return next(chain(module.parameters(), module.buffers())).device


def _are_one_product(linears: Sequence[Any], layer: AttentionLayer) -> bool:
    first, *parts = linears
    if not isinstance(first, FirstPart) or not all(isinstance(part, MergedPart) for part in parts):
        return False
    traits = layer.traits
    sizes = [heads * traits.head_dim for heads in (traits.num_heads, traits.num_kv_heads, traits.num_kv_heads)]
    ranges = [(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(3)]
    is_whole = first.num_outputs == sum(sizes) and all(part.shares_with(first) for part in parts)
    return is_whole and [(linear.start, linear.end) for linear in linears] == ranges


class _Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().partition("::")[2].partition(".")[0])
        return func(*args, **(kwargs or {}))


class RotaryProbe:
    """Compares fused modules with the original ones in a forward pass with attention replaced by each row's value."""

    def __init__(self, layers: Sequence[AttentionLayer], rotate: Callable[..., Tensor]) -> None:
        self._layers = layers
        self.fused = {layer.module: RotaryAttention(layer, rotate) for layer in layers}
        self._states: tuple[Tensor, Tensor, Tensor] | None = None
        self.operators = _Operators()
        self.difference: str | None = None  # the first one found

    def begin(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of an attention module."""
        self.operators.names.clear()

    def record(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> None:
        self._states = query, key, value

    def compare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook of an attention module; raises NotFusedError for a module of another kind.

        Differences in values are recorded, not raised: only one rank may see them, and all must reach the next
        all-reduce.
        """
        name = type(module).__name__
        fused = self.fused[module]
        states = self._states
        of_quantised: list[set[str]] = [getattr(part, "operators", set()) for part in module.modules()]
        unexpected = self.operators.names - OPERATORS.union(*of_quantised)
        if unexpected:
            raise NotFusedError(f"{name} computes with {min(unexpected)!r} too")
        if not isinstance(output, tuple) or len(output) != 2 or output[1] is not None:
            raise NotFusedError(f"{name} returns something else than a tensor and no weights")
        with in_another_way(f"{name} is called"):
            hidden = args[0] if args else kwargs["hidden_states"]
            turns = args[1] if len(args) > 1 else kwargs["position_embeddings"]
            assert states is not None
            query, key, value = (part[0].transpose(0, 1) for part in states)  # [num_rows, heads, head_dim]
            if any(part.shape != (1, *key.shape[::2]) for part in turns):
                raise NotFusedError(f"{name} turns only a part of each head by its position")
            cache = key.new_zeros(2, *key.shape)
            slots = torch.arange(len(key), device=key.device)
            own_query = fused.rotated(hidden, turns, cache, slots)
            attended = cache[1].repeat_interleave(query.shape[1] // key.shape[1], dim=1)[None]
            pairs = {"query": (own_query, query), "key": (cache[0], key), "value": (cache[1], value),
                     "output": (fused.projected(attended), output[0])}  # fmt: skip
        for what, (ours, theirs) in pairs.items():
            if ours.shape != theirs.shape:
                raise NotFusedError(f"{name} has a {what} of shape {[*theirs.shape]}")
            differs = difference_of_rows(ours, theirs)
            if differs is not None and self.difference is None:
                self.difference = f"{name} computes something else: its {what} differs {differs}"


def fuse_rotary(
    layers: Sequence[AttentionLayer],
    rotate: Callable[..., Tensor],
    probing: Callable[[Any], AbstractContextManager[None]],
    run: Callable[[Tensor, Tensor], Any],
) -> dict[nn.Module, RotaryAttention]:
    """Fused modules by attention module, each compared with the original.

    Args:
        probing: replaces attention by a probe.
        run: runs the model on token ids and positions [1, num_rows].

    Raises NotFusedError if a module is of another kind.
    """
    check_attention(layers, *_SERVED)
    probe = RotaryProbe(layers, rotate)
    device = _device_of(layers[0].module)
    with probing(probe), probe.operators, ExitStack() as hooks:
        for module in probe.fused:
            hooks.callback(module.register_forward_pre_hook(probe.begin).remove)
            hooks.callback(module.register_forward_hook(probe.compare, with_kwargs=True).remove)
        positions = torch.tensor([POSITIONS], device=device)
        run(torch.arange(len(POSITIONS), device=device)[None], positions)
    if probe.difference is not None:
        raise NotFusedError(probe.difference)
    return probe.fused


def rotary_calls(layer: AttentionLayer, rotate: Any, num_rows: int) -> list[Callable[[], Any]]:
    """Calls that compile the kernel for few and for many rows; empty if the layer does not use it."""
    if rotate is None:
        return []
    try:
        check_attention([layer], *_SERVED)
        fused = RotaryAttention(layer, rotate)
    except NotFusedError:
        return []
    return [fused.kernel_call(count) for count in (num_rows, MANY_ROWS)]
