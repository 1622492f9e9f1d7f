"""Tiers of several ranks: each keeps its part of every block, and rank 0's books decide.

Orders go to ranks in one queue with the steps, so all ranks use a slot in one order. Answers come through the ranks'
store: which parts of a read were right. A block of files is a hit only with all parts::

    rank 0    order: read 7 | its own part ....... | all parts are right: a hit | step with copies
    rank 1                  | its part, answer 7 ............. |                | the copies of the step
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nanovllm.cache.cache_pools import CachePools
from nanovllm.cache.tiers.books import StoredBlock
from nanovllm.cache.tiers.reading import ReadItem, read_place
from nanovllm.cache.tiers.segments import Place
from nanovllm.core.batch import NULL_BLOCK, Copy
from nanovllm.core.config import EngineConfig
from nanovllm.core.errors import DeviceError
from nanovllm.execution.tier_storage import TierStorage
from nanovllm.execution.workers import WorkerProcesses
from nanovllm.model.binding import ModelBinding
from nanovllm.model.ranks import Ranks

POLL_SECONDS = 0.001
ANSWER_SECONDS = 5.0  # that a rank may take to answer at the end: else it is stuck in a step


class RankOrders:
    """Rank 0's side: orders to the other ranks, and their answers."""

    def __init__(self, workers: WorkerProcesses, ranks: Ranks) -> None:
        self._workers, self._ranks = workers, ranks
        self._numbers = itertools.count()
        self._is_over = False  # answers count no longer

    def _send(self, kind: str, *payload: Any) -> None:
        self._workers.send("follow_tiers", kind, payload)

    def store(self, copies: Sequence[Copy]) -> None:
        """Execute copies to host memory, with no step in flight."""
        if copies:
            self._send("store", copies)

    def write(self, node: StoredBlock, group: int, block: int, slot: int | None) -> None:
        """Write a block's parts to files, from the KV cache or from host memory."""
        before = node.parent
        assert before is not None
        self._send("write", before.hash, before.parent is None, group, node.key, block, slot)

    def read(self, items: Sequence[ReadItem]) -> int:
        """Begin to read parts into slots; returns the number of the answers."""
        number = next(self._numbers)
        self._send("read", number, [(item.node.hash, item.group, item.slot) for item in items])
        return number

    def all_right(self, number: int, results: Sequence[bool]) -> list[bool]:
        """Whether each block of a read is right on every rank; waits, in any thread, until all have read.

        Raises DeviceError if a rank is gone.
        """
        right = list(results)
        for answer in self._answers(number, None):
            right = [own and other == ord("1") for own, other in zip(right, answer, strict=True)]
        return right

    def begin_close(self) -> bool:
        """Whether all ranks answer; if not, they are stuck in a step, and nothing waits for them any more."""
        with suppress(DeviceError, TimeoutError):
            number = next(self._numbers)
            self._send("answer", number)
            self._answers(number, ANSWER_SECONDS)
            return True
        self._is_over = True
        return False

    def finish(self, seconds: float) -> None:
        """Wait until all ranks have finished their writes, at most so long."""
        with suppress(DeviceError, TimeoutError):
            number = next(self._numbers)
            self._send("finish", number)
            self._answers(number, seconds)

    def _answers(self, number: int, seconds: float | None) -> list[bytes]:
        end, found = None if seconds is None else time.monotonic() + seconds, []
        for rank in range(1, self._ranks.size):
            while not self._ranks.store.check([_key(number, rank)]):
                self._workers.check()
                if self._is_over or (end is not None and time.monotonic() > end):
                    raise TimeoutError(f"rank {rank} gives no answer {number}")
                time.sleep(POLL_SECONDS)
            found.append(self._ranks.store.get(_key(number, rank)))
            self._ranks.store.delete_key(_key(number, rank))
        return found


class RankTiers:
    """The tiers of a rank besides the first, which executes orders by their names.

    A thread reads files; all else runs in the rank's main thread.
    """

    @classmethod
    def open(cls, binding: ModelBinding, config: EngineConfig, pools: CachePools, digest: str | None) -> RankTiers:
        """Arguments and errors as of `TierStorage.open`."""
        assert binding.ranks is not None
        return cls(TierStorage.open(binding, config, pools, digest), binding.ranks)

    def __init__(self, storage: TierStorage, ranks: Ranks) -> None:
        self._memory, self._books, self._directory = storage.memory, storage.books, storage.directory
        self._ranks = ranks
        self._jobs: queue.SimpleQueue[tuple[int, list[tuple[Place | None, int, int]]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._read: dict[Place, tuple[StoredBlock, int]] = {}  # of blocks that were read
        self._damaged: queue.SimpleQueue[Place] = queue.SimpleQueue()

    def store(self, copies: Sequence[Copy]) -> None:
        self._memory.store(copies)

    def answer(self, number: int, answer: str = "") -> None:
        self._ranks.store.set(_key(number, self._ranks.rank), answer)

    def write(self, before: bytes, is_first: bool, group: int, tokens: bytes, block: int, slot: int | None) -> None:
        """Write this rank's part of a block, if its files have the block before."""
        assert self._directory is not None
        self._forget_damaged()
        parent = self._books.root(before) if is_first else self._directory.find(before)
        if parent is None:
            return
        node = parent.child(tokens)
        if block != NULL_BLOCK:
            content: Any = self._memory.read_block(group, block)
        elif slot is not None:
            self._memory.settle()
            content = self._memory.view(group, slot)
        else:
            content = b""
        self._directory.append(node, group, content)
        self._books.prune(node)

    def read(self, number: int, items: Sequence[tuple[bytes, int, int]]) -> None:
        """Begin to read this rank's parts of blocks, by hash and group, into slots."""
        assert self._directory is not None
        self._forget_damaged()
        places = [(self._place(block_hash, group), group, slot) for block_hash, group, slot in items]
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nanovllm-prefix-files", daemon=True)
            self._thread.start()
        self._jobs.put((number, places))

    def _place(self, block_hash: bytes, group: int) -> Place | None:
        assert self._directory is not None
        node = self._directory.find(block_hash)
        if node is None or group not in node.places:
            self._directory.refresh(now=True)
            node = self._directory.find(block_hash)
        if node is None or group not in node.places:
            return None
        place: Place = node.places[group]
        self._read[place] = node, group
        return place

    def _forget_damaged(self) -> None:
        while not self._damaged.empty():
            node, group = self._read[self._damaged.get()]
            if self._directory is not None:
                self._directory.damaged(node, group)

    def finish(self, number: int) -> None:
        """End the thread, and make the files durable."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
        if self._directory is not None:
            self._directory.close()
        self.answer(number)

    # ------------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            number, places = job
            right: list[bool] = []
            files: dict[int, int] = {}
            try:
                self._memory.settle()
                for place, group, slot in places:
                    right.append(self._is_right(place, group, slot, files))
            except Exception:  # of a device that failed: the rank's next step says so
                pass
            finally:
                for file in files.values():
                    os.close(file)
            right += [False] * (len(places) - len(right))
            self.answer(number, "".join("01"[is_right] for is_right in right))

    def _is_right(self, place: Place | None, group: int, slot: int, files: dict[int, int]) -> bool:
        assert self._directory is not None
        if place is None:
            return False
        is_right = read_place(self._directory, place, self._memory.view(group, slot), files)
        if not is_right:
            self._damaged.put(place)
        return is_right


def _key(number: int, rank: int) -> str:
    return f"tiers/{number}/{rank}"
