"""The attention function of every layer, and `SdpaAttention`, which needs no compiler.

The function writes this step's K and V to their slots, then attends over the blocks.

Attention is one operator, opaque to the compiler: a layer compiles once for any backend, with only the token count
dynamic. All of a layer's writes come before its reads, so requests of one step may share a prefix computed in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from nanovllm.batch import NULL_BLOCK
from nanovllm.device import find_kernel
from nanovllm.layout import BatchLayout, LayerTraits, Sight

LayerCache = Tensor | tuple[Tensor, Tensor]  # K first


class KVFormat(Protocol):
    """Form of K and V in caches of another dtype than the model's.

    extra: elements by which a head's row is longer than its values.
    """

    extra: int

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
        """See `write_states`."""

    def read(self, cache: Tensor, dtype: torch.dtype, is_value: bool) -> Tensor:
        """Elements [num_slots, num_kv_heads, head_dim] of whole blocks of a cache of K, or of V."""
        ...


kv_formats: dict[torch.dtype, KVFormat] = {}  # key: dtype of caches; others hold the model's own numbers


def row_values(cache: Tensor) -> int:
    """Number of values in a head's row of a cache [num_slots, num_kv_heads, ...]."""
    form = kv_formats.get(cache.dtype)
    return cache.shape[2] - (form.extra if form else 0)


def write_states(key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write key and value [1, num_kv_heads, num_tokens, head_dim] to their slots.

    Args:
        cache: [2, num_slots, num_kv_heads, head_dim], K first; a tensor each where their widths differ.
        slot_mapping: [num_tokens] int64; padding goes to the null block.
    """
    if (form := kv_formats.get(cache[0].dtype)) is not None:
        return form.write(key, value, cache, slot_mapping)
    cache[0].index_copy_(0, slot_mapping, key[0].transpose(0, 1))
    cache[1].index_copy_(0, slot_mapping, value[0].transpose(0, 1))


_write_on_gpu: Callable[[Tensor, Tensor, Any, Tensor], None] = write_states


def write_states_compiled(key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """`write_states` within compiled code: on a GPU by the kernel, once `use_write_kernel` has found it."""
    write = _write_on_gpu if key.is_cuda and isinstance(cache, Tensor) and cache.dtype == key.dtype else write_states
    write(key, value, cache, slot_mapping)


def use_write_kernel() -> None:
    """Let compiled code on a GPU write K and V by the kernel, if it exists, in all engines of the process."""
    global _write_on_gpu
    _write_on_gpu = find_kernel("kv_writes", "store_states") or write_states


ATTENTION_NAME = "nanovllm"
# Attributes of an attention module (its cache, its engine's handle) and keyword arguments of the model (the step's
# handle and slot mapping). Where a model does not pass these down, they are found by the engine's handle.
LAYER_CACHE = "nanovllm_cache"
LAYER_ENGINE = "nanovllm_engine"
# Further attributes: the index of the layer's kind; True if it reads the K and V of another layer. Every layer has
# both, since a module takes two microseconds to find out that an attribute is missing.
LAYER_KIND = "nanovllm_kind"
LAYER_SHARES = "nanovllm_shares"
STEP_HANDLE = "nanovllm_step"
STEP_SLOT_MAPPING = "nanovllm_slot_mapping"
SINKS = "s_aux"  # keyword argument of attention in `transformers`


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention module with the sizes of its states."""

    module: nn.Module
    traits: LayerTraits
    dtype: torch.dtype
    scaling: float  # factor of the scores
    cache_dtype: torch.dtype | None = None  # a key of `kv_formats`; None for `dtype`

    @property
    def row_widths(self) -> tuple[int, int]:
        """Elements of a head's row of K, and of V, in the cache."""
        extra = kv_formats[self.cache_dtype].extra if self.cache_dtype else 0
        return self.traits.head_dim + extra, self.traits.value_dim + extra

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V."""
        return self.traits.num_kv_heads * sum(self.row_widths) * (self.cache_dtype or self.dtype).itemsize


class AttentionBackend(Protocol):
    """Attention of one engine's rows over the KV cache; one instance serves all layers.

    A backend that may refuse a layer has a static `supports(traits) -> str | None`: the trait that it lacks, in words.
    """

    reads_whole_blocks: bool  # True if it reads masked slots, too: they must hold finite values

    def plan(self, layout: BatchLayout) -> AttentionPlan:
        """The masks of one step, shared by all layers."""
        ...


class AttentionPlan(Protocol):
    """One step's attention by one backend."""

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scaling: float,
        kind: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of all rows over the caches, which hold this step's K and V already.

        Args:
            query: [num_tokens, num_heads, head_dim].
            key_cache, value_cache: [num_slots, num_kv_heads, head_dim] and [num_slots, num_kv_heads, value_dim], or in
                a `KVFormat`.
            kind: index of the layer's kind; the backend was built with the traits of each kind.
            sinks: [num_heads], the layer's own parameter; None for a kind without.

        Returns [num_tokens, num_heads, value_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """One step's attention, shared by all layers."""

    plan: AttentionPlan
    num_tokens: int  # rows of the plan; the dense layers may pad them at the end
    slots: Tensor | None = None  # slots of the rows' K and V for each kind of layers, 0 for padding; None if unknown


# An opaque operator takes tensors alone: a tensor with the engine's handle names the step that the engine runs.
steps_in_force: dict[int, AttentionStep] = {}
# Handle and slot mapping by engine. Compiled layers take tensors of a plain dictionary as inputs of any shape; a tensor
# attribute of a module would be compiled for its one shape.
_step_tensors: dict[int, tuple[Tensor, Tensor]] = {}


@contextmanager
def step_in_force(handle: int, step: AttentionStep, tensors: tuple[Tensor, Tensor] | None = None) -> Iterator[None]:
    """Make `step` the one that `handle` names; `tensors` (handle, slot mapping) if the model passes no keywords on."""
    steps_in_force[handle] = step
    if tensors is not None:
        _step_tensors[handle] = tensors
    try:
        yield
    finally:
        steps_in_force.pop(handle, None)
        _step_tensors.pop(handle, None)


def running_step(handle: Tensor) -> AttentionStep:
    return steps_in_force[int(handle)]


def attend_in_step(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    handle: Tensor,
    scaling: float,
    kind: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the step that `handle` [1] int64 names.

    Args:
        query: [1, num_heads, T, head_dim], T at least the step's `num_tokens`.
        key_cache, value_cache, kind, sinks: arguments of `AttentionPlan.attend`.

    Returns [1, T, num_heads, value_dim], zero in the padding rows.
    """
    step = running_step(handle)
    rows = query[0].transpose(0, 1)[: step.num_tokens].contiguous()
    attended = step.plan.attend(rows, key_cache, value_cache, scaling, kind, sinks)
    if len(rows) == query.shape[2]:
        return attended[None]
    output = query.new_zeros(1, query.shape[2], *attended.shape[1:])
    output[0, : len(rows)] = attended
    return output


# Caches of compiled code know an operator only by its name, and an older version's code passes the older arguments: a
# new schema needs a new name, so the number goes up with each change.
paged_attention = torch.library.custom_op("nanovllm::paged_attention_2", attend_in_step, mutates_args=())


@paged_attention.register_fake
def _(query: Tensor, key_cache: Tensor, value_cache: Tensor, *_: Any) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], row_values(value_cache))


def step_tensors(module: nn.Module, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Handle and slot mapping of the running step, for an attention module that was called with `kwargs`."""
    if STEP_HANDLE in kwargs:
        return kwargs[STEP_HANDLE], kwargs[STEP_SLOT_MAPPING]
    return _step_tensors[getattr(module, LAYER_ENGINE)]


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that `transformers` calls in each attention layer during an engine's step."""
    handle, slot_mapping = step_tensors(module, kwargs)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    # One tensor holds K and V: the compiler would copy a whole cache if two arguments that change shared its memory.
    cache = getattr(module, LAYER_CACHE)
    kind = getattr(module, LAYER_KIND)
    sinks = kwargs.get(SINKS)
    if slot_mapping.dim() == 2:  # layers form several cache groups: a row for each kind of layer
        slot_mapping = slot_mapping[kind]
    is_compiled = torch.compiler.is_compiling()
    if not getattr(module, LAYER_SHARES):
        (write_states_compiled if is_compiled else write_states)(key, value, cache, slot_mapping)
    # Uncompiled, the dispatcher would only add its overhead to every layer.
    attend = paged_attention if is_compiled else attend_in_step
    return attend(query, cache[0], cache[1], handle, scaling, kind, sinks), None


# Decodes are gathered together while the longest of a group has at most this many times the blocks of the shortest:
# padding costs memory traffic, a further call costs some tens of microseconds a layer.
GROUP_RATIO = 1.5
# Nor do they gather more than this at once, so that gathered K and V are read from a processor's cache (64 requests of
# 9 blocks: 4.8 ms a layer in parts of 7 MB, 7.5 ms in one).
GROUP_BYTES = 8 * 2**20
# Rows of a chunk that are computed together where they see a part of the context alone, or where scores are held.
PIECE_ROWS = 256


class Scores(Protocol):
    """Attention with changed scores, which PyTorch's own does not compute."""

    def __call__(
        self, rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor | None
    ) -> Tensor:
        """Attention of rows [size, num_kv_heads, num_groups, num_rows, head_dim].

        Args:
            keys, values: [size, num_kv_heads, context, head_dim or value_dim].
            mask: [size, 1, num_rows, context] 0 or -inf; None where the rows are the last of the context.
            sinks: [num_heads], the layer's own parameter.

        Returns [size, num_kv_heads, num_groups, num_rows, value_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows that are computed together and the blocks that they see: some decodes, or rows of one sequence's chunk."""

    rows: Tensor | slice  # rows of the flat batch: int64 for decodes, a slice for a chunk
    size: int  # sequences
    blocks: Tensor  # [size * max_blocks] int64, each sequence's padded with the null block
    context: int  # keys of the longest sequence
    mask: Tensor | None  # [size, 1, num_rows or 1, context], 0 or -inf
    is_causal: bool  # True if row i sees keys 0 to i of the context, so that no mask is needed


class SdpaAttention:
    """The `sdpa` backend. One instance serves every layer of an engine.

    Args:
        kinds: traits of each kind of layers.
        block_bytes: bytes of K and V of one block in one layer.
        scores: `Scores` of each kind that PyTorch's attention does not serve; None for a kind that it serves.
    """

    reads_whole_blocks = True

    def __init__(
        self,
        kinds: Sequence[LayerTraits],
        block_size: int,
        block_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        scores: Sequence[Scores | None] = (),
    ) -> None:
        self.sights = [traits.sight for traits in kinds]
        self.scores = scores or [None] * len(kinds)
        self.block_size = block_size
        self.max_group_blocks = max(1, GROUP_BYTES // block_bytes)
        self.dtype = dtype
        self.device = device

    def plan(self, layout: BatchLayout) -> SdpaPlan:
        """The masks of one step, shared by all layers."""
        seen = {}
        for sight in set(self.sights):
            first_seen = sight.first_seen(layout.positions)
            seen[sight] = self._decode_groups(layout, first_seen) + self._chunks(layout, first_seen)
        return SdpaPlan(self, seen)

    def _chunks(self, layout: BatchLayout, first_seen: NDArray[np.int64]) -> list[_Piece]:
        """The pieces of all chunks; first_seen: [num_tokens], the first position that each row of the step sees."""
        chunks = []
        first_rows = layout.row_starts[layout.num_decodes : -1].tolist()
        for first_row, entry in zip(first_rows, layout.entries[layout.num_decodes :], strict=True):
            count = entry.num_new_tokens
            sees_all = first_seen[first_row + count - 1] == 0  # no row before it sees less
            step = count if sees_all and not any(self.scores) else PIECE_ROWS
            for row in range(0, count, step):
                rows = slice(first_row + row, first_row + min(row + step, count))
                positions = layout.positions[rows]
                firsts = first_seen[rows]
                end = int(positions[-1]) + 1
                block = int(firsts[0]) // self.block_size
                blocks = torch.tensor(entry.block_table[block : -(-end // self.block_size)], device=self.device)
                begin = block * self.block_size
                is_causal = bool(positions[0] == begin and firsts[-1] <= begin)
                mask = None if is_causal else self._mask(positions, firsts, begin, end - begin)[None, None]
                chunks.append(_Piece(rows, 1, blocks, end - begin, mask, is_causal))
        return chunks

    def _decode_groups(self, layout: BatchLayout, first_seen: NDArray[np.int64]) -> list[_Piece]:
        positions = layout.positions[: layout.num_decodes]
        first_blocks = first_seen[: layout.num_decodes] // self.block_size
        num_blocks = positions // self.block_size + 1 - first_blocks
        order = np.argsort(num_blocks, kind="stable")
        sorted_blocks = num_blocks[order]
        groups = []
        first = 0
        while first < len(order):
            end = int(np.searchsorted(sorted_blocks, sorted_blocks[first] * GROUP_RATIO, side="right"))
            end = min(end, first + max(1, self.max_group_blocks // int(sorted_blocks[end - 1])))
            rows = order[first:end]
            width = int(sorted_blocks[end - 1])
            blocks = np.full((len(rows), width), NULL_BLOCK, np.int64)
            for index, row in enumerate(rows.tolist()):
                table = layout.entries[row].block_table[first_blocks[row] : first_blocks[row] + num_blocks[row]]
                blocks[index, : len(table)] = table
            begins = first_blocks[rows] * self.block_size
            context = int((positions[rows] - begins).max()) + 1
            needs_mask = len(rows) > 1 or first_seen[rows[0]] > begins[0]
            mask = self._mask(positions[rows], first_seen[rows], begins, context)[:, None, None] if needs_mask else None
            flat_rows, flat_blocks = (torch.from_numpy(part).to(self.device) for part in (rows, blocks.reshape(-1)))
            groups.append(_Piece(flat_rows, len(rows), flat_blocks, context, mask, False))
            first = end
        return groups

    def _mask(
        self,
        positions: NDArray[np.int64],
        first_seen: NDArray[np.int64],
        begin: int | NDArray[np.int64],
        num_keys: int,
    ) -> Tensor:
        """[len(positions), num_keys]: 0 for the keys that a query at each position sees, -inf for the others.

        Args:
            first_seen: the first position that each query sees.
            begin: position of the first key, or one for each query.
        """
        keys = torch.arange(num_keys, device=self.device)
        last, first = (torch.from_numpy(bound - begin)[:, None].to(self.device) for bound in (positions, first_seen))
        hidden = (keys > last) | (keys < first) if first_seen.any() else keys > last
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """One step's pieces for each sight; `attend` is called once a layer."""

    backend: SdpaAttention
    seen: dict[Sight, list[_Piece]]

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scaling: float,
        kind: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionPlan`."""
        num_kv_heads = key_cache.shape[1]
        output = query.new_empty(*query.shape[:2], row_values(value_cache))
        scores = self.backend.scores[kind]
        for piece in self.seen[self.backend.sights[kind]]:
            keys, values = self._gather(key_cache, piece), self._gather(value_cache, piece, True)
            rows = query[piece.rows]
            is_chunk = isinstance(piece.rows, slice)
            # The query heads that share a KV head become rows of one query, so that K and V are read once for them.
            rows = rows.transpose(0, 1)[None] if is_chunk else rows.view(piece.size, num_kv_heads, -1, query.shape[2])
            if scores is not None:
                folded = rows.view(piece.size, num_kv_heads, query.shape[1] // num_kv_heads, -1, query.shape[2])
                attended = scores(folded, keys, values, piece.mask, scaling, sinks).flatten(1, 2)
            else:
                attended = F.scaled_dot_product_attention(
                    rows,
                    keys,
                    values,
                    attn_mask=None if piece.mask is None else piece.mask.expand(-1, -1, rows.shape[2], -1),
                    is_causal=piece.is_causal,
                    scale=scaling,
                    enable_gqa=rows.shape[1] != num_kv_heads,
                )
            # [1, num_heads, num_rows, value_dim] of a chunk, else [size, ...] of num_heads and value_dim
            output[piece.rows] = attended[0].transpose(0, 1) if is_chunk else attended.reshape(-1, *output.shape[1:])
        return output

    def _gather(self, cache: Tensor, piece: _Piece, is_value: bool = False) -> Tensor:
        """[size, num_kv_heads, context, head_dim] copied out of the cache."""
        # One row a block: index_select copies whole rows, seven times faster on a CPU than indexing with brackets.
        rows = cache.view(-1, self.backend.block_size * cache.shape[1] * cache.shape[2])
        gathered = rows.index_select(0, piece.blocks).view(-1, *cache.shape[1:])
        if (form := kv_formats.get(cache.dtype)) is not None:
            gathered = form.read(gathered, self.backend.dtype, is_value)
        return gathered.view(piece.size, -1, *gathered.shape[1:])[:, : piece.context].transpose(1, 2)
