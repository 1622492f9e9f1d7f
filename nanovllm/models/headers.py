"""Headers of a model's safetensors files: dtype, shape and place of each tensor; without torch, no weight is read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.errors import ModelLoadError

STORED_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
}  # fmt: skip
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file; `dtype` is the name that safetensors has for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return math.ceil(self.num_elements * STORED_BITS.get(self.dtype, 8) / 8)

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {list(self.shape)})"


def weight_files(folder: Path) -> list[Path]:
    """Files that the library reads: those of the index, or the single one; without either, all that are there.

    Others, as of a second format in the folder, are left out. Raises ModelLoadError for a file that is missing.
    """
    index = folder / INDEX
    if not index.is_file():
        single = folder / SINGLE
        return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    try:
        names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ModelLoadError(f"{index} is damaged: it has no weight_map of names and files.") from None
    for name in names:
        if not (folder / name).is_file():
            raise ModelLoadError(f"{index} names {name}, which is not in its folder. Fetch the model again.")
    return [folder / name for name in names]


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of a model's files by name; raises ModelLoadError for a damaged or truncated file."""
    return {tensor.name: tensor for path in weight_files(folder) for tensor in _read_header(path)}


def _read_header(path: Path) -> list[StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ModelLoadError(
                f"{path} is damaged: it has {size:,} bytes, and its header alone would have {length:,}. Fetch it again."
            )
        try:
            header = json.loads(file.read(length))
            found = [_tensor(name, entry, path) for name, entry in header.items() if name != "__metadata__"]
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        except ModelLoadError:
            raise
        except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError):
            raise ModelLoadError(f"{path} is damaged: its header is not JSON of tensors. Fetch it again.") from None
    missing = max(ends, default=0) - (size - 8 - length)
    if missing > 0:
        raise ModelLoadError(f"{path} is truncated: {missing:,} bytes of its tensors are missing. Fetch it again.")
    return found


def _tensor(name: str, entry: Any, path: Path) -> StoredTensor:
    tensor = StoredTensor(name, str(entry["dtype"]), tuple(int(size) for size in entry["shape"]), path)
    start, end = entry["data_offsets"]
    if tensor.dtype in STORED_BITS and end - start != tensor.num_bytes:
        raise ModelLoadError(f"{path} is damaged: {tensor} has {end - start:,} bytes, not {tensor.num_bytes:,}.")
    return tensor
