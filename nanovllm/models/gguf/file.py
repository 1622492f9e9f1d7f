"""Reads and checks a GGUF file's header before any weight is read; without torch.

    magic, version, counts │ metadata: key, type, value │ tensors: name, shape, type, offset │ padding │ weights

The reader of the package `gguf` makes one array per token of a vocabulary, which takes seconds; this one decodes whole
arrays, and its errors name the damaged part of a file.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.errors import ModelLoadError
from nanovllm.features.extras import check_extra
from nanovllm.models.mistakes import refuse_pointers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
# Struct codes of metadata types: u8, i8, u16, i16, u32, i32, f32, bool, u64, i64, f64.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Beyond any real file. A damaged count within the size of a large file would take gigabytes, or minutes.
_MOST_BYTES_OF_TEXT = 1 << 26
_MOST_ITEMS = 1 << 22
_MOST_ENTRIES = 1 << 16
_MOST_DIMS = 4
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the file; pages of weights are read when `data` is accessed.

    shape: [out_features, in_features], torch's order.
    kind: "F32", "Q4_K", ...
    data: uint8 [..., bytes of a row], a view of the mapped file.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    data: NDArray[np.uint8]


class GGUFFile:
    """Metadata and tensors of one file, or of all parts of a split file.

    Args:
        path: the file, or the first part of a split one.

    Raises ModelLoadError for a file of another format, a truncated or damaged one, and a missing part;
    MissingLibraryError without the extra `gguf`.

    Attributes:
        metadata: metadata of the first part, by key.
        tensors: tensors of all parts, by name.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        check_extra(f"the model {self.path}", "gguf", "gguf")
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for index, part in enumerate(parts_of(self.path)):
            metadata, tensors = _Header(part).read()
            self.metadata = self.metadata if index else metadata
            for tensor in tensors:
                if tensor.name in self.tensors:
                    raise ModelLoadError(f"{part} is damaged: it has the tensor {tensor.name} twice.")
                self.tensors[tensor.name] = tensor
        if not isinstance(self.metadata.get("general.architecture"), str):
            raise ModelLoadError(f"{self.path} does not name its architecture (general.architecture).")

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.ggml.tokens" in self.metadata

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def of_architecture(self, key: str, default: Any = None) -> Any:
        """The metadata value of a key with the architecture's prefix: "block_count" reads "llama.block_count"."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def is_first_part(path: Path) -> bool:
    """Whether a file can be named as a model: an unsplit file or the first part."""
    found = _PART.search(path.name)
    return found is None or int(found[1]) == 1


@lru_cache(maxsize=1)
def _opened(path: Path, changed_ns: int, num_bytes: int) -> GGUFFile:
    return GGUFFile(path)


def open_gguf(path: str | Path) -> GGUFFile:
    """The file, cached from the last call if its size and mtime are unchanged; raises ModelLoadError as `GGUFFile`."""
    path = Path(path).expanduser()
    state = path.stat()
    return _opened(path, state.st_mtime_ns, state.st_size)


def forget_opened() -> None:
    """Drop the cached file and its vocabulary."""
    _opened.cache_clear()


def parts_of(path: Path) -> list[Path]:
    """All parts of a split model in order, by llama.cpp's naming scheme; an unsplit file is its only part.

    Raises ModelLoadError for a later part and for missing parts.
    """
    found = _PART.search(path.name)
    if found is None:
        return [path]
    number, count = map(int, found.groups())
    stem = path.name[: found.start()]
    parts = [path.with_name(f"{stem}-{index:05}-of-{count:05}.gguf") for index in range(1, count + 1)]
    if number > count:
        raise ModelLoadError(f"{path} would be part {number} of {count} of a model; give it the name it had.")
    if number != 1:
        raise ModelLoadError(f"{path} is part {number} of {count} of a model; name the first one, {parts[0].name}.")
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelLoadError(
            f"{path} is the first of {count} parts; {len(missing)} are missing beside it: {', '.join(missing[:4])}."
        )
    return parts


class _Header:
    """Reads one file from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                start = file.read(len(MAGIC))
                if start != MAGIC:
                    refuse_pointers([path])
                    raise ModelLoadError(
                        f"{path} is no GGUF file: it begins with {start!r} instead of {MAGIC!r}. A model is a GGUF "
                        "file, or a folder with config.json, weights and a tokenizer."
                    )
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"{path} could not be read: {error}") from error
        self._at = len(MAGIC)

    def read(self) -> tuple[dict[str, Any], list[StoredTensor]]:
        """Metadata and tensors; raises ModelLoadError."""
        try:
            return self._read()
        except (struct.error, IndexError, OverflowError) as error:
            raise self._truncated(f"its header does not end within its {len(self._bytes):,} bytes") from error
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{self._path} is damaged: a name or text in it is no UTF-8 ({error}).") from error

    def _read(self) -> tuple[dict[str, Any], list[StoredTensor]]:
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = struct.unpack("<I", struct.pack(">I", version))[0] in _VERSIONS
            detail = "is big-endian" if swapped else f"has version {version} of the format"
            raise ModelLoadError(f"{self._path} {detail}; versions 2 and 3, little-endian, are read. Convert it again.")
        num_tensors = self._number("Q")
        num_keys = self._number("Q")
        self._check_count("tensors", num_tensors, _MOST_ENTRIES)
        self._check_count("metadata", num_keys, _MOST_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in metadata:
                raise self._damaged(f"its metadata have {key[:60]!r} twice")
            metadata[key] = self._value(self._number("I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {str(alignment)[:60]}, which is no power of two")
        for name, _, _, offset in entries:
            if offset % alignment:
                raise self._damaged(f"the tensor {name} begins at {offset:,}, no multiple of {alignment}")
        start = -(-self._at // alignment) * alignment
        return metadata, list(self._tensors(entries, start))

    def _tensors(self, entries: list[tuple[str, tuple[int, ...], int, int]], start: int) -> Iterator[StoredTensor]:
        import numpy as np
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        content = np.frombuffer(self._bytes, dtype=np.uint8)
        ranges = []  # (start, end, name) in bytes
        for name, shape, number, offset in entries:
            try:
                kind = GGMLQuantizationType(number)
            except ValueError:
                raise ModelLoadError(
                    f"{self._path}: the tensor {name} is of type {number}, which the package `gguf` does not know. "
                    "Upgrade it, or take a file of a usual quantisation such as Q8_0 or Q4_K_M."
                ) from None
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if not prod(shape) or not shape or shape[-1] % block:
                raise self._damaged(f"{name} is {kind.name}, but of shape {list(shape)}")
            row_bytes = shape[-1] // block * block_bytes
            begin = start + offset
            num_bytes = prod(shape[:-1]) * row_bytes
            if begin + num_bytes > len(content):
                raise self._truncated(
                    f"the tensor {name} ends at byte {begin + num_bytes:,}, the file at byte {len(content):,}"
                )
            ranges.append((begin, begin + num_bytes, name))
            data = content[begin : begin + num_bytes].reshape(*shape[:-1], row_bytes)
            yield StoredTensor(name, shape, kind.name, data)
        for (_, end, name), (begin, _, other) in pairwise(sorted(ranges)):
            if begin < end:
                raise self._damaged(f"the tensors {name} and {other} overlap")

    def _damaged(self, detail: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path} is damaged: {detail}. Fetch it again.")

    def _check_count(self, what: str, count: int, most: int) -> None:
        if count > most:
            raise self._truncated(f"its header counts {count:,} {what}, where {most:,} would be the most")

    def _truncated(self, detail: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path} is truncated or damaged: {detail}. Fetch it again.")

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._number("I")
        self._check_count(f"dimensions of {name[:60]}", num_dims, _MOST_DIMS)
        dims = struct.unpack_from(f"<{num_dims}Q", self._bytes, self._at)
        self._at += 8 * num_dims
        return name, tuple(reversed(dims)), self._number("I"), self._number("Q")

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        length = self._number("Q")
        self._check_count("bytes of one text", length, _MOST_BYTES_OF_TEXT)
        end = self._at + length
        if end > len(self._bytes):
            raise IndexError(end)
        text = self._bytes[self._at : end].decode("utf-8")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._damaged(f"its metadata have a value of type {kind}")
        item = self._number("I")
        count = self._number("Q")
        self._check_count("items of an array", count, _MOST_ITEMS)
        if item not in _SCALARS:
            if item == _ARRAY:
                raise self._damaged("its metadata have an array of arrays")
            return [self._value(item) for _ in range(count)]
        size = struct.calcsize(f"<{_SCALARS[item]}") * count
        if self._at + size > len(self._bytes):
            raise IndexError(count)
        values = struct.unpack_from(f"<{count}{_SCALARS[item]}", self._bytes, self._at)
        self._at += size
        return list(values)
