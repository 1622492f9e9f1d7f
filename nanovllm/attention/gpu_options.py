"""Options of FlexAttention's GPU kernels: one table, and what follows from sizes alone.

The table was measured on an H200 (sm_90; bfloat16, heads of 128, pages of 64). Other GPUs take the same, with as many
stages and as large tiles as their shared memory holds; what else would suit them was not measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK_N = 64  # slots of a page that a chunk reads at once, at most
CHUNK_STAGES, CHUNK_WARPS = 3, 4  # tiles on their way at once, at most


class DecodeEntry(NamedTuple):
    """For batches up to this one."""

    batch: int
    piece: int  # slots of a block that are read or left out together, at most
    splits: int  # programs a sequence and KV head
    uneven_splits: int  # the same, where one sequence would keep them waiting
    num_stages: int
    num_warps: int


_DECODES = (
    DecodeEntry(2, 64, 16, 16, 3, 2), DecodeEntry(8, 64, 8, 16, 3, 2), DecodeEntry(16, 32, 4, 16, 4, 2),
    DecodeEntry(40, 32, 2, 8, 4, 1), DecodeEntry(80, 64, 2, 8, 2, 2), DecodeEntry(1 << 30, 64, 1, 8, 3, 2),
)  # fmt: skip
MIN_PIECE = min(entry.piece for entry in _DECODES)
MAX_SPLITS = max(entry.uneven_splits for entry in _DECODES)
_KV_HEADS_OF_TABLE = 8  # the table is for as many: a program serves one sequence and KV head
# A program reads so many tokens of its KV head in a microsecond, at best as many programs read at that rate together,
# and splits as numerous as the finer ones take some microseconds more to put together.
_TOKENS_PER_US, _PROGRAMS, _FINER_US = 64, 128, 4.0


class DecodeOptions(NamedTuple):
    """For a fixed number of decodes."""

    piece: int  # divides a block
    kernel: dict[str, Any]


def is_uneven(num_decodes: int, contexts: NDArray[np.int64], num_kv_heads: int) -> bool:
    """Whether the longest context, in tokens, would be read for longer than all together; `num_decodes` counts padding.

    Then the step waits for the programs of one sequence, and it is split finer.
    """
    entry = _entry_of(num_decodes, num_kv_heads)
    if entry.splits == entry.uneven_splits or not len(contexts):
        return False
    alone = contexts.max() / entry.splits / _TOKENS_PER_US
    together = contexts.sum() * num_kv_heads / _PROGRAMS / _TOKENS_PER_US
    return bool(alone > together + _FINER_US)


def decode_options(
    num_decodes: int,
    is_uneven: bool,
    num_kv_heads: int,
    num_groups: int,
    block_size: int,
    head_bytes: int,
    device: torch.device,
) -> DecodeOptions:
    """For a fixed number of decodes."""
    block_m = max(16, 1 << (num_groups - 1).bit_length())
    entry = _entry_of(num_decodes, num_kv_heads)
    splits = entry.uneven_splits if is_uneven else entry.splits
    piece = min(entry.piece, block_size)
    num_warps = entry.num_warps if piece >= 32 else 1
    sizes = _fitting(entry.num_stages, block_m, piece, head_bytes, device)
    return DecodeOptions(piece, {"SPLIT_KV": splits, "num_warps": num_warps, "IS_DIVISIBLE": True, **sizes})


def _entry_of(num_decodes: int, num_kv_heads: int) -> DecodeEntry:
    batch = -(-num_decodes * num_kv_heads // _KV_HEADS_OF_TABLE)
    return next(entry for entry in _DECODES if batch <= entry.batch)


def most_parts(max_decodes: int, num_kv_heads: int) -> int:
    """Into how many parts the decodes of a step are split together, at most."""
    batches = {entry: min(max_decodes, entry.batch * _KV_HEADS_OF_TABLE // num_kv_heads) for entry in _DECODES}
    return max(batch * entry.uneven_splits for entry, batch in batches.items())


def chunk_options(block_size: int, head_bytes: int, device: torch.device) -> dict[str, Any]:
    """For tiles of `block_size` rows."""
    block_m = min(64, block_size)
    sizes = _fitting(CHUNK_STAGES, block_m, block_size, head_bytes, device)
    fixed = {"num_warps": CHUNK_WARPS, "IS_DIVISIBLE": True, "FORCE_USE_FLEX_ATTENTION": True}
    return {"BLOCK_M": block_m, **fixed, **sizes}


def _fitting(max_stages: int, block_m: int, block_size: int, head_bytes: int, device: torch.device) -> dict[str, int]:
    """The largest tiles whose queries, and K and V once a stage, fit into the shared memory of a multiprocessor."""
    row_bytes = 1 << (head_bytes - 1).bit_length()  # heads are padded to a power of two
    properties: Any = torch.cuda.get_device_properties(device)
    available = 0.9 * properties.shared_memory_per_block_optin
    sizes = [(n, stages) for n in (64, 32, 16) if n <= min(block_size, BLOCK_N) for stages in range(max_stages, 0, -1)]
    fitting = ((n, stages) for n, stages in sizes if (block_m + 2 * stages * n) * row_bytes <= available)
    block_n, num_stages = next(fitting, sizes[-1])
    return {"BLOCK_N": block_n, "num_stages": num_stages}
