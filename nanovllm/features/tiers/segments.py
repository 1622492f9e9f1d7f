"""Files of a prefix cache: segments of K and V, each with an index of its blocks. No torch.

A segment is two files that only grow; its number is their name::

    00000007.kv       header | K and V of a block | K and V of a block | ...
    00000007.index    header | record | record | ...         a record is written once its block is

A header names everything that KV depends on. A record has a checksum, and the checksum of its block. So a process that
is killed at any byte leaves blocks without a record, or a record that is cut short, which a reader ignores.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

MAGIC = b"nanokv1\n"
SEGMENT_BYTES = 64 * 2**20
_COUNT = struct.Struct("<I")
_FRAME = struct.Struct("<IQ")  # bytes of the record, and its checksum
_RECORD = struct.Struct("<16s16s?HQI16s")  # hash, parent, is_first, group, offset, length, checksum of the block
FILE_MODE = 0o600
FOLDER_MODE = 0o700
checksum = xxhash.xxh3_128_digest


class Place(NamedTuple):
    """Where a file has the content of a block."""

    segment: int
    offset: int
    length: int
    checksum: bytes


class Record(NamedTuple):
    """A block in a segment.

    block_hash, parent: hashes of the tokens up to its end and up to its start; a first block's parent: model and salt.
    tokens: token ids, int32, as bytes.
    """

    block_hash: bytes
    parent: bytes
    is_first: bool
    group: int
    tokens: bytes
    place: Place


def segment_paths(folder: Path, number: int) -> tuple[Path, Path]:
    """The segment and its index."""
    return folder / f"{number:08}.kv", folder / f"{number:08}.index"


def segment_numbers(folder: Path) -> list[int]:
    """Numbers of the segments of a folder, ascending."""
    return sorted(int(path.stem) for path in folder.glob("*.index") if path.stem.isdecimal())


def encode_header(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, sort_keys=True).encode()
    return MAGIC + _COUNT.pack(len(text)) + checksum(text) + text


def read_header(data: bytes) -> tuple[dict[str, Any] | None, int]:
    """The header at the start of a file and its length; None for one that is damaged or of another version."""
    begin = len(MAGIC) + _COUNT.size + 16
    if len(data) < begin or not data.startswith(MAGIC):
        return None, 0
    (length,) = _COUNT.unpack_from(data, len(MAGIC))
    text = data[begin : begin + length]
    if len(text) < length or checksum(text) != data[begin - 16 : begin]:
        return None, 0
    return json.loads(text), begin + length


def encode_record(record: Record) -> bytes:
    place = record.place
    body = _RECORD.pack(
        record.block_hash, record.parent, record.is_first, record.group, place.offset, place.length, place.checksum
    )
    body += record.tokens
    return _FRAME.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def read_records(data: bytes, offset: int, segment: int) -> Iterator[tuple[Record, int]]:
    """Records of an index from an offset on, each with the offset after it, up to the first that is damaged."""
    while len(data) >= offset + _FRAME.size:
        length, expected = _FRAME.unpack_from(data, offset)
        body = data[offset + _FRAME.size : offset + _FRAME.size + length]
        if len(body) < max(length, _RECORD.size) or xxhash.xxh3_64_intdigest(body) != expected:
            return
        offset += _FRAME.size + length
        block_hash, parent, is_first, group, start, count, block_sum = _RECORD.unpack_from(body)
        place = Place(segment, start, count, block_sum)
        yield Record(block_hash, parent, is_first, group, body[_RECORD.size :], place), offset


class SegmentWriter:
    """Appends blocks to a new segment of `num_bytes`.

    Raises OSError for a full disk; the blocks before stay readable.
    """

    def __init__(self, folder: Path, number: int, header: dict[str, Any]) -> None:
        self.number = number
        self._files = [_create(path) for path in segment_paths(folder, number)]
        self.num_bytes = 0  # size of the segment
        try:
            for file in self._files:
                _write(file, encode_header(header))
        except OSError:
            for file in self._files:
                os.close(file)
            raise
        self.num_bytes = os.fstat(self._files[0]).st_size

    def append(
        self, block_hash: bytes, parent: bytes, is_first: bool, group: int, tokens: bytes, content: Any
    ) -> Place:
        """Write a block, then its record."""
        content = memoryview(content).cast("B")
        place = Place(self.number, self.num_bytes, len(content), checksum(content))
        _write(self._files[0], content)
        self.num_bytes += len(content)
        _write(self._files[1], encode_record(Record(block_hash, parent, is_first, group, tokens, place)))
        return place

    def close(self) -> None:
        """Make the blocks durable, then the records."""
        files = self._files
        self._files = []
        try:
            for file in files:
                os.fsync(file)
        finally:
            for file in files:
                os.close(file)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, FILE_MODE)


def _write(file: int, data: Any) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
