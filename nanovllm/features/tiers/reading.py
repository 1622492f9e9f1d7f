"""Reads blocks from files into host memory in a thread, while the requests that want them wait. No torch."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from nanovllm.features.tiers.books import StoredBlock, TierBooks
from nanovllm.features.tiers.costs import LoadCosts
from nanovllm.features.tiers.directory import CacheDirectory
from nanovllm.features.tiers.segments import Place, checksum
from nanovllm.sequence import Sequence

MAX_WAIT_SECONDS = 2.0  # limit where the time to compute is unknown
TURN_SECONDS = 0.05  # longest wait of a step: requests are aborted between steps


class ReadItem(NamedTuple):
    """A block to be read into a slot of host memory."""

    node: StoredBlock
    group: int
    slot: int
    place: Place


@dataclass(eq=False, slots=True)
class Job:
    """Blocks read together; `results` has True for each with the right checksum, once `is_done` is set."""

    items: list[ReadItem]
    generation: int
    number: int = 0  # key of the other ranks' answers
    results: list[bool] = field(default_factory=list)
    num_bytes: int = 0
    seconds: float = 0.0
    is_done: threading.Event = field(default_factory=threading.Event)


class OtherRanks(Protocol):
    """Ranks that read their parts of the same blocks; see `RankOrders`."""

    def read(self, items: AnySequence[ReadItem]) -> int: ...

    def all_right(self, number: int, results: AnySequence[bool]) -> list[bool]: ...


class FileReads:
    """Reads of a directory. Only `_run` runs in the thread: it fills slots that belong to its job alone.

    Args:
        view: (group, slot) -> its bytes, writable.
        settle: waits until the device has ended all launched copies from and to host memory.
        others: a block is right only if their parts are.
    """

    medium = "disk"

    def __init__(
        self,
        directory: CacheDirectory,
        books: TierBooks,
        costs: LoadCosts,
        view: Callable[[int, int], memoryview],
        settle: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        others: OtherRanks | None = None,
    ) -> None:
        self._directory: CacheDirectory | None = directory
        self._books = books
        self._costs = costs
        self._view = view
        self._settle = settle
        self._clock = clock
        self._others = others
        self._jobs: list[Job] = []
        self._reading: dict[tuple[StoredBlock, int], Job] = {}
        self._waiting: dict[Sequence, tuple[list[Job], float]] = {}  # -> (jobs, deadline)
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.num_failed = self.num_read_blocks = self.num_timeouts = 0

    @property
    def is_attached(self) -> bool:
        """Whether the directory's model is still the engine's."""
        return self._directory is not None

    def refresh(self, *, now: bool = False) -> None:
        """Learn of new files, and become their writer if the former has gone: `now`, or looked for once a second."""
        if self._directory is not None:
            self._directory.take_over(now=now)
            self._directory.refresh()

    def begin(self, sequence: Sequence, lacking: Iterable[tuple[StoredBlock, int]], seconds: float | None) -> None:
        """Begin to read blocks for a sequence, which waits at most the seconds that computing them would take."""
        jobs: dict[Job, None] = {}
        items: list[ReadItem] = []
        for node, group in lacking:
            if (job := self._reading.get((node, group))) is not None:
                jobs[job] = None
                continue
            place = node.places.get(group)
            slot = None if place is None else self._books.take_slot(group)
            if slot is None or place is None:  # no room: later blocks are of no use
                break
            items.append(ReadItem(node, group, slot, place))
        if items:
            job = self.start(items)
            jobs[job] = None
        if jobs:
            wait = MAX_WAIT_SECONDS if seconds is None else min(seconds, MAX_WAIT_SECONDS)
            self._waiting[sequence] = [*jobs], self._clock() + wait

    def start(self, items: list[ReadItem]) -> Job:
        job = Job(items, self._books.generation, 0 if self._others is None else self._others.read(items))
        for item in items:
            item.node.num_reads += 1
            self._reading[item.node, item.group] = job
        self._jobs.append(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nanovllm-prefix-files", daemon=True)
            self._thread.start()
        self._queue.put(job)
        return job

    def is_waiting(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    def wait(self, sequence: Sequence, *, may_block: bool) -> None:
        """End a sequence's wait if its blocks are read or its time is over.

        Args:
            may_block: nothing else can run, so wait for a turn; later steps go on waiting.
        """
        jobs, deadline = self._waiting[sequence]
        end = min(deadline, self._clock() + TURN_SECONDS)
        for job in jobs if may_block else ():
            if (left := end - self._clock()) > 0.0:
                job.is_done.wait(left)
        is_over = self._clock() >= deadline
        if is_over or all(job.is_done.is_set() for job in jobs):
            self.num_timeouts += not all(job.is_done.is_set() for job in jobs)
            del self._waiting[sequence]
            self.collect()

    def collect(self) -> None:
        """Take the results of finished reads into the books."""
        if self._waiting:
            for sequence in [s for s in self._waiting if s.is_finished or s.is_running]:
                del self._waiting[sequence]
        if not any(job.is_done.is_set() for job in self._jobs):
            return
        for job in [job for job in self._jobs if job.is_done.is_set()]:
            self._jobs.remove(job)
            self._costs.measured(self.medium, job.num_bytes, job.seconds)
            for item, is_right in zip(job.items, job.results, strict=True):
                self._take(job, item, is_right)

    def _take(self, job: Job, item: ReadItem, is_right: bool) -> None:
        node, group, slot, _ = item
        node.num_reads -= 1
        self._reading.pop((node, group), None)
        is_current = job.generation == self._books.generation
        if is_right and is_current and group not in node.slots and group in node.places:
            self._books.hold(node, group, slot)
            self.num_read_blocks += 1
            return
        self._books.free_slot(group, slot)
        if is_current and not is_right:
            self.num_failed += 1
            if self._directory is not None:
                self._directory.damaged(node, group)
        if is_current:
            self._books.prune(node)

    def detach(self) -> None:
        """Read nothing more: the model may have changed."""
        self._directory = None
        self._waiting.clear()

    def close(self) -> None:
        """End the thread, after the job in progress."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    # ------------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            begin = time.perf_counter()
            files: dict[int, int] = {}
            right: list[bool] = []
            try:
                self._settle()
                for item in job.items:
                    right.append(self._read(item, files))
                job.results = right if self._others is None else self._others.all_right(job.number, right)
            except Exception:  # a device or rank failed: the engine's next step says so
                job.results = [] if self._others is not None else right
            finally:
                for file in files.values():
                    os.close(file)
                job.results += [False] * (len(job.items) - len(job.results))
                job.num_bytes = sum(item.place.length for item, ok in zip(job.items, job.results, strict=True) if ok)
                job.seconds = time.perf_counter() - begin
                job.is_done.set()

    def _read(self, item: ReadItem, files: dict[int, int]) -> bool:
        directory = self._directory
        return directory is not None and read_place(directory, item.place, self._view(item.group, item.slot), files)


def read_place(directory: CacheDirectory, place: Place, target: memoryview, files: dict[int, int]) -> bool:
    """Read a place of a file; returns whether its checksum is right.

    Args:
        files: open ones by segment, for the caller to close.
    """
    try:
        if place.segment not in files:
            files[place.segment] = directory.open(place)
        if len(target) != place.length or os.preadv(files[place.segment], [target], place.offset) != place.length:
            return False
        return checksum(target) == place.checksum
    except OSError:  # another process removed the file
        return False
