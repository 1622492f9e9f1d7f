"""Reports of a directory of prefixes, for its owner. No torch."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from nanovllm.features.tiers.directory import LOCK, RANK_FOLDERS, remove_segment
from nanovllm.features.tiers.segments import checksum, read_header, read_records, segment_numbers, segment_paths


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """A segment: its model's digest, blocks and their tokens, bytes, and time of last use in seconds since 1970.

    model: None for a damaged header. num_damaged: blocks with a wrong checksum, once they were verified. rank: the
    folder of one of several ranks, which has its parts of blocks.
    """

    number: int
    model: str | None
    num_blocks: int
    num_tokens: int
    num_bytes: int
    used: float
    num_damaged: int = 0
    rank: str = ""


def segments_of(folder: str, *, verifies: bool = False) -> Iterator[SegmentReport]:
    """Report each segment of a folder and of the ranks' in it; `verifies` reads all blocks.

    Raises ValueError for a folder that is not there.
    """
    for path, rank in _folders(folder):
        yield from _segments_in(path, rank, verifies=verifies)


def _segments_in(path: Path, rank: str, *, verifies: bool) -> Iterator[SegmentReport]:
    for number in segment_numbers(path):
        segment, index = segment_paths(path, number)
        data = index.read_bytes()
        stat = segment.stat()
        header, begin = read_header(data)
        records = [] if header is None else [record for record, _ in read_records(data, begin, number)]
        damaged = 0
        if verifies:
            with segment.open("rb") as file:
                own, _ = read_header(file.read(begin))
                damaged += header is None or own != header
                for record in records:
                    file.seek(record.place.offset)
                    damaged += checksum(file.read(record.place.length)) != record.place.checksum
        yield SegmentReport(
            number, None if header is None else str(header.get("model")), len(records),
            sum(len(record.tokens) // 4 for record in records if record.group == 0),
            stat.st_size + len(data), stat.st_mtime, damaged, rank,
        )  # fmt: skip


def clear(folder: str) -> int:
    """Remove all segments; returns how many. Raises ValueError while an engine writes to the folder."""
    paths = [path for path, _ in _folders(folder)]
    with ExitStack() as locks:  # locks stay until all is removed: a reading engine takes a free one
        for path in paths:
            if (path / LOCK).exists():
                file = os.open(path / LOCK, os.O_RDWR)
                locks.callback(os.close, file)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ValueError(f"an engine writes to {folder!r}. End it first.") from None
        found = [(path, number) for path in paths for number in segment_numbers(path)]
        for path, number in found:
            remove_segment(path, number)
    return len(found)


def _folders(folder: str) -> list[tuple[Path, str]]:
    """The folder, and those of ranks in it with their names."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ValueError(f"there is no folder {folder!r}. Name that of prefix_cache_dir.")
    return [(path, ""), *((each, each.name) for each in sorted(path.glob(RANK_FOLDERS)))]
