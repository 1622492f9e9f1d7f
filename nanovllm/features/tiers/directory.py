"""A directory of segments: one process writes, others read; the least recently used segments go first. No torch."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanovllm import block_manager as block_hashes
from nanovllm.features.tiers.books import StoredBlock, TierBooks
from nanovllm.features.tiers.segments import (
    FILE_MODE,
    FOLDER_MODE,
    SEGMENT_BYTES,
    Place,
    Record,
    SegmentWriter,
    read_header,
    read_records,
    segment_numbers,
    segment_paths,
)

logger = logging.getLogger("nanovllm")

LOCK = "lock"
RANK_FOLDERS = "rank-*-of-*"  # folders of several ranks, in `prefix_cache_dir`
REFRESH_SECONDS = 1.0  # interval of looking for files of another process, and for a lock that it gave back

_open: weakref.WeakSet[CacheDirectory] = weakref.WeakSet()


def _leave_locks() -> None:
    """Close locks in a forked child: they belong to the parent, and are to end with it."""
    for directory in list(_open):
        directory.leave_lock()


os.register_at_fork(after_in_child=_leave_locks)


class CacheDirectory:
    """The files of one engine.

    Args:
        header: facts that KV depends on besides tokens and salts; segments with another one are not read.
        max_bytes: limit of all segments together, those of other models included.
    """

    def __init__(self, path: str | os.PathLike[str], header: dict[str, Any], max_bytes: int, books: TierBooks) -> None:
        self.folder = Path(path).expanduser()
        self._header = header
        self._books = books
        self.max_bytes = max_bytes
        self.segment_bytes = min(SEGMENT_BYTES, max_bytes // 4)
        self._segments: dict[int, list[tuple[StoredBlock, int]]] = {}  # blocks of each
        self._indexed: dict[int, int] = {}  # offset up to which each index is read
        self._waiting: dict[bytes, list[Record]] = {}  # hash of an unknown block -> records that follow it
        self._by_hash: dict[bytes, StoredBlock] = {}
        self._used: set[int] = set()  # segments with an up-to-date time of last use
        self._writer: SegmentWriter | None = None
        self._lock: int | None = None
        self._ending: list[threading.Thread] = []  # each makes a segment durable
        self._end_errors: list[OSError] = []  # errors of these threads
        self._next_refresh = self._next_try = 0.0
        self._has_lock = self._is_closed = False
        self.num_bytes = self.num_written = 0
        self.error: str | None = None  # reason for writing nothing
        try:
            self.folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            if (mode := self.folder.stat().st_mode & 0o777) & ~FOLDER_MODE:  # it was there, and keeps its mode
                text = "prefix_cache_dir %s has mode %04o, by which others may list it; chmod 700 keeps them out"
                logger.warning(text, self.folder, mode)
            self._take_lock()
            if self._lock is None:
                logger.info("prefix_cache_dir %s: another process writes there; this one reads", self.folder)
        except OSError as error:
            self._stop_writing(error)
        _open.add(self)
        self.refresh()

    @property
    def is_writer(self) -> bool:
        """Whether this process writes to the folder, or did until it was closed."""
        return self._has_lock and self.error is None

    def _take_lock(self) -> None:
        file = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, FILE_MODE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lock = file
            self._has_lock = True
        except BlockingIOError:  # another process writes
            os.close(file)

    def take_over(self, *, now: bool = False) -> None:
        """Become the writer if the former one has gone; looks at most once a second unless `now`."""
        time_now = time.monotonic()
        if self.is_writer or self.error is not None or self._is_closed or (time_now < self._next_try and not now):
            return
        self._next_try = time_now + REFRESH_SECONDS
        try:
            self._take_lock()
        except OSError as error:
            self._stop_writing(error)
        if self._lock is not None:
            self._read_indexes()  # the last time, since nobody else writes from now on
            logger.info("prefix_cache_dir %s: its writer has gone; this process writes there", self.folder)

    def leave_lock(self) -> None:
        """Close the lock without giving it back: this process is a forked child of its owner."""
        lock = self._lock
        self._lock = None
        self._has_lock = False
        self._is_closed = True
        if lock is not None:
            os.close(lock)

    def _stop_writing(self, error: OSError) -> None:
        if self.error is None:
            self.error = str(error)
            logger.warning(
                "prefix_cache_dir %s: %s; nothing more is written there, and what it holds is read", self.folder, error
            )
        self._end_segment()

    # ------------------------------------------------------------------------------------------------- reading

    def find(self, block_hash: bytes) -> StoredBlock | None:
        """A block that files have, by the hash of its chain."""
        return self._by_hash.get(block_hash)

    def refresh(self, *, now: bool = False) -> None:
        """Learn of segments and records that are new, at most once a second unless `now`."""
        time_now = time.monotonic()
        if (time_now < self._next_refresh and not now) or (self.is_writer and self._segments):
            return
        self._next_refresh = time_now + REFRESH_SECONDS
        self._read_indexes()

    def _read_indexes(self) -> None:
        with suppress(OSError):
            for number in segment_numbers(self.folder):
                self._read_index(number)
            self.num_bytes = sum(path.stat().st_size for path in self.folder.glob("*.kv"))

    def _read_index(self, number: int) -> None:
        segment, index = segment_paths(self.folder, number)
        known = self._indexed.get(number, 0)
        if known < 0 or index.stat().st_size == known:  # negative: the index is another model's
            return
        data = index.read_bytes()
        header, begin = read_header(data)
        with segment.open("rb") as file:
            own, _ = read_header(file.read(begin))
        if header != self._header or own != self._header:
            self._indexed[number] = -1
            return
        self._segments.setdefault(number, [])
        self._indexed[number] = known or begin
        for record, offset in read_records(data, known or begin, number):
            self._indexed[number] = offset
            self._learn(record)

    def _learn(self, record: Record) -> None:
        """Put a record into the tree, once the block before it is there."""
        pending = [record]
        while pending:
            new = pending.pop()
            parent = self._books.root(new.parent) if new.is_first else self._by_hash.get(new.parent)
            if parent is None:
                self._waiting.setdefault(new.parent, []).append(new)
                continue
            if block_hashes.digest(new.parent + new.tokens) != new.block_hash:
                continue
            if new.group >= len(self._books.block_bytes) or new.place.length != self._books.block_bytes[new.group]:
                continue
            self._note(parent.child(new.tokens), new.group, new.place)
            pending += self._waiting.pop(new.block_hash, ())

    def _note(self, node: StoredBlock, group: int, place: Place) -> None:
        node.places[group] = place
        self._by_hash[node.hash] = node
        self._segments.setdefault(place.segment, []).append((node, group))

    def open(self, place: Place) -> int:
        """A file to read a place from; the segment counts as used now."""
        path, _ = segment_paths(self.folder, place.segment)
        if place.segment not in self._used:
            self._used.add(place.segment)
            with suppress(OSError):
                os.utime(path)
        return os.open(path, os.O_RDONLY)

    def damaged(self, node: StoredBlock, group: int) -> None:
        """Forget a place with wrong content."""
        node.places.pop(group, None)
        if not node.places:
            self._by_hash.pop(node.hash, None)
        self._books.prune(node)

    # ------------------------------------------------------------------------------------------------- writing

    def append(self, node: StoredBlock, group: int, content: Any) -> bool:
        """Write the content of a block; False if this process does not write, or no longer can."""
        size = self._books.block_bytes[group]
        self._note_end_errors()
        if not self.is_writer or self._is_closed or group in node.places or size > self.max_bytes:
            return False
        try:
            if self._writer is None or self._writer.num_bytes + size > max(self.segment_bytes, size):
                self._begin_segment(max(self.segment_bytes, size))
            assert self._writer is not None and node.parent is not None
            before = node.parent
            place = self._writer.append(node.hash, before.hash, before.parent is None, group, node.key, content)
        except OSError as error:
            self._stop_writing(error)
            return False
        self.num_bytes += place.length
        self.num_written += 1
        self._note(node, group, place)
        return True

    def _begin_segment(self, most_bytes: int) -> None:
        self._end_segment()
        self.drop_oldest(most_bytes)
        number = max([*segment_numbers(self.folder), *self._segments, 0]) + 1
        self._writer = SegmentWriter(self.folder, number, self._header)
        self._segments.setdefault(number, [])

    def _end_segment(self) -> None:
        """Make the current segment durable, in a thread: a disk may take seconds, which no request is to wait for."""
        writer = self._writer
        self._writer = None
        if writer is None:
            return

        def end() -> None:
            try:
                writer.close()
            except OSError as error:
                self._end_errors.append(error)

        self._ending = [thread for thread in self._ending if thread.is_alive()]
        thread = threading.Thread(target=end, name="nanovllm-prefix-durable", daemon=True)
        try:
            thread.start()
            self._ending.append(thread)
        except RuntimeError:  # the interpreter ends
            end()

    def _note_end_errors(self) -> None:
        if self._end_errors:
            self._stop_writing(self._end_errors[0])

    def drop_oldest(self, num_new: int) -> None:
        """Remove the segments used longest ago until there is room for `num_new` bytes."""
        by_use = []
        for number in segment_numbers(self.folder):
            stat = segment_paths(self.folder, number)[0].stat()
            by_use.append((stat.st_mtime, number, stat.st_size))
        self.num_bytes = sum(size for _, _, size in by_use)
        for _, number, size in sorted(by_use):
            if self.num_bytes + num_new <= self.max_bytes:
                return
            remove_segment(self.folder, number)
            self.num_bytes -= size
            for node, group in self._segments.pop(number, ()):
                place = node.places.get(group)
                if place is not None and place.segment == number:
                    self.damaged(node, group)

    def close(self) -> None:
        """Make everything durable and let another process write."""
        self._is_closed = True
        try:
            self._end_segment()
            for thread in self._ending:
                thread.join()
            self._note_end_errors()
        finally:
            lock = self._lock
            self._lock = None
            if lock is not None:
                fcntl.flock(lock, fcntl.LOCK_UN)  # also where a child that was forked without Python has it open
                os.close(lock)


def folder_of_rank(rank: int, size: int) -> str:
    return f"rank-{rank}-of-{size}"


def remove_segment(folder: Path, number: int) -> None:
    """Remove a segment, its index first."""
    segment, index = segment_paths(folder, number)
    index.unlink(missing_ok=True)
    segment.unlink(missing_ok=True)
