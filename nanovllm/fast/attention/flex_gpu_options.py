"""Options of FlexAttention's GPU kernels: a measured table, and rules for other sizes and GPUs.

The table was measured on an H200 (sm_90; bfloat16, heads of 128, blocks of 64). Other GPUs (sm_80, sm_100) take the
same by two rules, which were not measured: batches count in proportion to the multiprocessors, and tiles are as large,
and stages as many, as shared memory holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from nanovllm.attention import AttentionLayer
from nanovllm.device import find_kernel
from nanovllm.layout import FULL, Sight

MIN_HEAD_DIM = 16  # elements, of queries and of values
BLOCK_N = 64  # slots of a block that a chunk reads at once, at most
CHUNK_STAGES = 3  # tiles on their way at once, at most
CHUNK_WARPS = 4


class DecodeEntry(NamedTuple):
    """Measured options, for batches of up to this many decodes."""

    batch: int
    kv_tile: int  # slots of a block that are read or left out together, at most
    splits: int  # programs a sequence and KV head
    num_stages: int
    num_warps: int


_DECODES = (
    DecodeEntry(2, 64, 16, 3, 2), DecodeEntry(8, 64, 8, 3, 2), DecodeEntry(16, 32, 4, 4, 2),
    DecodeEntry(40, 32, 2, 4, 1), DecodeEntry(80, 64, 2, 2, 2), DecodeEntry(1 << 30, 64, 1, 3, 2),
)  # fmt: skip
MIN_KV_TILE = min(entry.kv_tile for entry in _DECODES)
MAX_SPLITS = max(entry.splits for entry in _DECODES)
# Of the GPU that it was measured on: a program serves one sequence and KV head.
_PROGRAMS_PER_BATCH = 8
_MULTIPROCESSORS = 132


class Gpu(NamedTuple):
    """The GPU's sizes that the options depend on.

    shared_memory: bytes of a multiprocessor that one program may take.
    """

    num_multiprocessors: int
    shared_memory: int

    @classmethod
    def from_device(cls, device: torch.device) -> Gpu:
        properties: Any = torch.cuda.get_device_properties(device)
        return cls(properties.multi_processor_count, properties.shared_memory_per_block_optin)


class DecodeOptions(NamedTuple):
    """Options of the decode kernel, for a fixed number of decodes."""

    kv_tile: int  # slots; divides a block
    kernel: dict[str, Any]


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """The options of a model's kernels on a GPU.

    num_groups: query heads per KV head.
    head_bytes: bytes of one head's K of one token in the cache, without a scale, or of its V if that is wider.
    element_bytes: bytes of its elements, 2 for wider ones too.
    paged_decode: `PagedDecode` of `fast/kernels/paged_decode.py`, where it serves decodes; None for FlexAttention.
    build_prompts: builds the `PromptAttention` of `fast/kernels/prompt_attention.py`, where it serves chunks.
    compile_prompts: compiles it, for threads at start.
    sight, softcap: traits of the layers.
    """

    gpu: Gpu
    num_kv_heads: int
    num_groups: int
    head_bytes: int
    block_size: int
    paged_decode: Any = None
    build_prompts: Callable[[], Any] | None = None
    sight: Sight = FULL
    softcap: float | None = None
    compile_prompts: Callable[[], Any] | None = None
    element_bytes: int = 2

    @classmethod
    def for_layer(cls, layer: AttentionLayer, device: torch.device, block_size: int) -> KernelOptions:
        traits = layer.traits
        head_dim = max(layer.traits.head_dim, layer.traits.value_dim)
        kernel = find_kernel("paged_decode", "PagedDecode")
        if kernel is not None and not kernel.suits(head_dim, layer.dtype):
            kernel = None
        itemsize = (layer.cache_dtype or layer.dtype).itemsize
        heads = traits.num_kv_heads, traits.num_groups, head_dim * itemsize
        build_prompts = compile_prompts = None
        if open_kernel := find_kernel("prompt_attention", "open_kernel"):
            sizes = traits.num_heads, traits.num_kv_heads, traits.head_dim, block_size, layer.dtype
            window, chunk = traits.sight
            given = *sizes, window, traits.softcap, chunk, traits.value_dim
            compile_kernel: Any = find_kernel("prompt_attention", "compile_kernel")
            build_prompts, compile_prompts = (partial(f, *given, device=device) for f in (open_kernel, compile_kernel))
        return cls(
            Gpu.from_device(device), *heads, block_size, kernel, build_prompts, traits.sight, traits.softcap,
            compile_prompts, min(2, itemsize),
        )  # fmt: skip

    def decode_kernel(self, max_decodes: int, device: torch.device) -> Any | None:
        """A `PagedDecode` for steps of so many decodes; None where FlexAttention serves them."""
        if self.paged_decode is None:
            return None
        heads = self.num_kv_heads, self.num_groups, self.head_bytes, self.element_bytes
        return self.paged_decode(
            heads, self.block_size, gpu=self.gpu, max_decodes=max_decodes, device=device, sight=self.sight,
            softcap=self.softcap,
        )  # fmt: skip

    @property
    def padded_groups(self) -> int:
        """Decodes take groups of a power of two of query heads; the kernel fills them up to 16 anyway."""
        return 1 << (self.num_groups - 1).bit_length()

    def for_decodes(self, num_decodes: int) -> DecodeOptions:
        """Options for a fixed number of decodes."""
        block_m = max(16, self.padded_groups)
        entry = self._entry_for(num_decodes)
        kv_tile = min(entry.kv_tile, self.block_size)
        num_warps = entry.num_warps if kv_tile >= 32 else 1
        sizes = self._fitting(entry.num_stages, block_m, kv_tile)
        return DecodeOptions(kv_tile, {"SPLIT_KV": entry.splits, "num_warps": num_warps, "IS_DIVISIBLE": True, **sizes})

    def for_chunks(self) -> dict[str, Any]:
        """Options for tiles of `block_size` rows."""
        block_m = min(64, self.block_size)
        sizes = self._fitting(CHUNK_STAGES, block_m, self.block_size)
        fixed = {"num_warps": CHUNK_WARPS, "IS_DIVISIBLE": True, "FORCE_USE_FLEX_ATTENTION": True}
        return {"BLOCK_M": block_m, **fixed, **sizes}

    def most_splits(self, max_decodes: int) -> int:
        """Upper bound of the splits of all decodes of a step together."""
        if self.paged_decode is not None:
            heads = self.num_kv_heads, self.num_groups
            most: int = self.paged_decode.most_splits(heads, self.gpu.num_multiprocessors, max_decodes)
            return most
        return max(min(max_decodes, self._most_decodes(entry)) * entry.splits for entry in _DECODES)

    def _entry_for(self, num_decodes: int) -> DecodeEntry:
        return next(entry for entry in _DECODES if num_decodes <= self._most_decodes(entry))

    def _most_decodes(self, entry: DecodeEntry) -> int:
        """The entry's batch, scaled to this model's KV heads and this GPU's multiprocessors."""
        programs = entry.batch * _PROGRAMS_PER_BATCH * self.gpu.num_multiprocessors
        return programs // (_MULTIPROCESSORS * self.num_kv_heads)

    def _fitting(self, max_stages: int, block_m: int, block_size: int) -> dict[str, int]:
        """The largest tiles that fit into shared memory, with their queries, and K and V once a stage."""
        row_bytes = 1 << (self.head_bytes - 1).bit_length()  # heads are padded to a power of two
        lengths = [n for n in (64, 32, 16) if n <= min(block_size, BLOCK_N)]
        sizes = [(n, stages) for n in lengths for stages in range(max_stages, 0, -1)]
        available = 0.9 * self.gpu.shared_memory
        fitting = ((n, stages) for n, stages in sizes if (block_m + 2 * stages * n) * row_bytes <= available)
        block_n, num_stages = next(fitting, sizes[-1])
        return {"BLOCK_N": block_n, "num_stages": num_stages}
