"""Tiers of several ranks: each keeps its part of every block, and rank 0's books decide.

Orders go to ranks in one queue with the steps, so all ranks use a slot in one order. A rank answers through the ranks'
store which parts of a read were right. A block of files is a hit only with all parts::

    rank 0    order: read 7 | its own part ....... | all parts are right: a hit | step with copies
    rank 1                  | its part, answer 7 ............. |                | the copies of the step
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from nanovllm.batch import Copy
from nanovllm.errors import DeviceError
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_pools import CachePools
from nanovllm.features.ranks.rank_calls import answers_of, key_of
from nanovllm.features.ranks.ranks import Ranks
from nanovllm.features.ranks.workers import WorkerProcesses
from nanovllm.features.tiers.books import StoredBlock
from nanovllm.features.tiers.reading import ReadItem, read_place
from nanovllm.features.tiers.segments import Place
from nanovllm.features.tiers.tier_storage import TierStorage
from nanovllm.model import ModelBinding

ANSWER_SECONDS = 5.0  # most time until a rank answers at the end; a slower one is stuck in a step


class Part(NamedTuple):
    """A rank's part of a block, in one of its files."""

    node: StoredBlock
    group: int
    place: Place


class RankOrders:
    """Rank 0's side: orders to the other ranks, and their answers."""

    def __init__(self, workers: WorkerProcesses, ranks: Ranks) -> None:
        self._workers = workers
        self._ranks = ranks
        self._numbers = itertools.count()
        self._end = math.inf  # time after which nothing waits for answers

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

        Raises DeviceError if a rank is gone, and TimeoutError if it does not answer while the engine is closed.
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
            self._end = time.monotonic() + ANSWER_SECONDS  # reads in progress get this long; nobody needs them any more
            return True
        self._end = time.monotonic()
        return False

    def all_write(self) -> bool:
        """Whether the other ranks can write files."""
        with suppress(DeviceError, TimeoutError):
            number = next(self._numbers)
            self._send("tell_writer", number)
            self._end = math.inf
            return all(answer == b"1" for answer in self._answers(number, ANSWER_SECONDS))
        return False

    def finish(self, seconds: float) -> None:
        """Wait until all ranks have finished their writes, at most so long."""
        with suppress(DeviceError, TimeoutError):
            number = next(self._numbers)
            self._send("finish", number)
            self._end = math.inf
            self._answers(number, seconds)

    def _answers(self, number: int, seconds: float | None) -> list[bytes]:
        end = math.inf if seconds is None else time.monotonic() + seconds
        return [*answers_of(self._workers, self._ranks, _key(number), lambda: min(end, self._end))]


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
        self._memory = storage.memory
        self._books = storage.books
        self._directory = storage.directory
        self._ranks = ranks
        self._jobs: queue.SimpleQueue[tuple[int, list[tuple[Part | None, int]]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._damaged: queue.SimpleQueue[Part] = queue.SimpleQueue()

    def store(self, copies: Sequence[Copy]) -> None:
        self._memory.store(copies)

    def answer(self, number: int, answer: str = "") -> None:
        self._ranks.store.set(key_of(_key(number), self._ranks.rank), answer)

    def tell_writer(self, number: int) -> None:
        if self._directory is not None:
            self._directory.take_over(now=True)  # rank 0 goes first, so that one engine has the folders of all ranks
        self.answer(number, str(int(self._directory is not None and self._directory.is_writer)))

    def write(self, before: bytes, is_first: bool, group: int, tokens: bytes, block: int, slot: int | None) -> None:
        """Write this rank's part of a block, if its files have the block before."""
        assert self._directory is not None
        self._forget_damaged()
        parent = self._books.root(before) if is_first else self._directory.find(before)
        if parent is None:
            return
        node = parent.child(tokens)
        self._directory.append(node, group, self._memory.content(group, block, slot))
        self._books.prune(node)

    def read(self, number: int, items: Sequence[tuple[bytes, int, int]]) -> None:
        """Begin to read this rank's parts of blocks, by hash and group, into slots."""
        assert self._directory is not None
        self._forget_damaged()
        parts = [(self._part(block_hash, group), slot) for block_hash, group, slot in items]
        if any(part is None for part, _ in parts):
            self._directory.refresh(now=True)
            parts = [(self._part(block_hash, group), slot) for block_hash, group, slot in items]
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nanovllm-prefix-files", daemon=True)
            self._thread.start()
        self._jobs.put((number, parts))

    def _part(self, block_hash: bytes, group: int) -> Part | None:
        assert self._directory is not None
        node = self._directory.find(block_hash)
        return None if node is None or group not in node.places else Part(node, group, node.places[group])

    def _forget_damaged(self) -> None:
        assert self._directory is not None
        while not self._damaged.empty():
            node, group, place = self._damaged.get()
            if node.places.get(group) == place:  # another place means that it was written again
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
            number, parts = job
            right: list[bool] = []
            files: dict[int, int] = {}
            try:
                self._memory.settle()
                for part, slot in parts:
                    right.append(part is not None and self._is_right(part, slot, files))
            except Exception:  # the device has failed: the rank's next step says so
                pass
            finally:
                for file in files.values():
                    os.close(file)
            right += [False] * (len(parts) - len(right))
            self.answer(number, "".join("01"[is_right] for is_right in right))

    def _is_right(self, part: Part, slot: int, files: dict[int, int]) -> bool:
        assert self._directory is not None
        is_right = read_place(self._directory, part.place, self._memory.view(part.group, slot), files)
        if not is_right:
            self._damaged.put(part)
        return is_right


def _key(number: int) -> str:
    return f"tiers {number}"
