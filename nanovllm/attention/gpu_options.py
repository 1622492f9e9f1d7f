"""Options of FlexAttention's GPU kernels: one table for each kind of GPU, and what follows from sizes alone.

sm_90 (H100, H200) is measured (bfloat16, heads of 128, pages of 64); sm_80 and sm_100 follow from their shared memory
and the number of their multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class KernelTable:
    """What is tuned for a kind of GPU.

    block_n: slots of a page that are read at once, at most.
    chunks: (num_stages, num_warps), of the first at most.
    decodes: (batch, programs a sequence, num_stages, num_warps) in rising order: a batch takes the first entry that is
        not smaller.
    """

    block_n: int
    chunks: tuple[int, int]
    decodes: tuple[tuple[int, int, int, int], ...]


_SM_90 = KernelTable(
    block_n=64, chunks=(3, 4), decodes=((8, 8, 3, 4), (16, 4, 3, 4), (96, 2, 2, 2), (1 << 30, 1, 3, 2))
)
_TABLES = {8: _SM_90, 9: _SM_90, 10: _SM_90}
MAX_SPLITS = max(splits for table in _TABLES.values() for _, splits, _, _ in table.decodes)
_KV_HEADS_OF_TABLE = 8  # the splits are for as many: a program serves one sequence and KV head


def decode_options(
    num_decodes: int, num_kv_heads: int, num_groups: int, block_size: int, head_bytes: int, device: torch.device
) -> dict[str, Any]:
    """For a fixed number of decodes."""
    table = _table(device)
    block_m = max(16, 1 << (num_groups - 1).bit_length())
    batch = -(-num_decodes * num_kv_heads // _KV_HEADS_OF_TABLE)
    _, splits, num_stages, num_warps = next(entry for entry in table.decodes if batch <= entry[0])
    num_warps = num_warps if block_size >= 32 else 1
    sizes = _fitting(table.block_n, num_stages, block_m, block_size, head_bytes, device)
    return {"SPLIT_KV": splits, "num_warps": num_warps, "IS_DIVISIBLE": True, **sizes}


def chunk_options(block_size: int, head_bytes: int, device: torch.device) -> dict[str, Any]:
    """For tiles of `block_size` rows."""
    table = _table(device)
    block_m = min(64, block_size)
    num_stages, num_warps = table.chunks
    sizes = _fitting(table.block_n, num_stages, block_m, block_size, head_bytes, device)
    fixed = {"num_warps": num_warps, "IS_DIVISIBLE": True, "FORCE_USE_FLEX_ATTENTION": True}
    return {"BLOCK_M": block_m, **fixed, **sizes}


def _table(device: torch.device) -> KernelTable:
    major, _ = torch.cuda.get_device_capability(device)
    return _TABLES[min(max(major, min(_TABLES)), max(_TABLES))]


def _fitting(
    max_block_n: int, max_stages: int, block_m: int, block_size: int, head_bytes: int, device: torch.device
) -> dict[str, int]:
    """The largest tiles whose queries, and K and V once a stage, fit into the shared memory of a multiprocessor."""
    row_bytes = 1 << (head_bytes - 1).bit_length()  # heads are padded to a power of two
    properties: Any = torch.cuda.get_device_properties(device)
    available = 0.9 * properties.shared_memory_per_block_optin
    sizes = [
        (n, stages) for n in (64, 32, 16) if n <= min(block_size, max_block_n) for stages in range(max_stages, 0, -1)
    ]
    fitting = ((n, stages) for n, stages in sizes if (block_m + 2 * stages * n) * row_bytes <= available)
    block_n, num_stages = next(fitting, sizes[-1])
    return {"BLOCK_N": block_n, "num_stages": num_stages}
