"""Kernels that read a weight for few rows: `few_rows_cuda/`.

There is one block per multiprocessor. Each of its warps has a ring in shared memory. The copy engine fills it with the
rows of weights that the warp multiplies, so no warp waits for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nanovllm.fast.kernels import nvrtc

MAX_ROWS = 8
NUM_WARPS = 8  # warps of a block
SLOTS = range(3, 5)  # slots in a warp's ring; more copies in flight only delay other loads
PATIENCE = 1 << 24  # reads before a wait traps: seconds
_MOST_BLOCKS = 256
_OWN_BYTES = 4096  # bytes of static shared memory
_SOURCES = Path(__file__).with_name("few_rows_cuda")


def is_available(device: torch.device) -> bool:
    """Whether the GPU has a copy engine that these kernels use, and there is a compiler."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9 and nvrtc.is_available()


def num_blocks(device: torch.device) -> int:
    """Blocks of a launch."""
    properties: Any = torch.cuda.get_device_properties(device)
    return min(properties.multi_processor_count, _MOST_BLOCKS)


def num_slots(slot_bytes: int, other_bytes: int, device: torch.device) -> int:
    """Slots of each warp's ring that fit into shared memory together with `other_bytes`; `SLOTS` are supported."""
    properties: Any = torch.cuda.get_device_properties(device)
    available = properties.shared_memory_per_block_optin - _OWN_BYTES - other_bytes
    return min(SLOTS[-1], available // (NUM_WARPS * slot_bytes))


def holds(shared_bytes: int, device: torch.device) -> bool:
    """Whether a block can have this much dynamic shared memory in addition to its static one."""
    properties: Any = torch.cuda.get_device_properties(device)
    fits: bool = shared_bytes + _OWN_BYTES <= properties.shared_memory_per_block_optin
    return fits


def function(
    files: tuple[str, ...], name: str, definitions: Mapping[str, int], device: torch.device, *, shared_bytes: int
) -> nvrtc.CudaFunction:
    """A kernel of some source files; machine code is cached on disk."""
    major, minor = torch.cuda.get_device_capability(device)
    source = nvrtc.joined_sources(nvrtc.BFLOAT16, *(_SOURCES / file for file in ("1_parts.h", *files)))
    own = {"ROWS": MAX_ROWS, "GRID": num_blocks(device), "PATIENCE": PATIENCE}
    with torch.cuda.device(device):
        code = nvrtc.compile_source(source, f"sm_{major}{minor}", {**own, **definitions})
        return nvrtc.CudaFunction(code, name, num_threads=32 * NUM_WARPS, shared_bytes=shared_bytes)
