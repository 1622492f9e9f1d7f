"""Tiers of one engine: stores in idle time and at its end, costs of loads, statistics."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from nanovllm.batch import NULL_BLOCK, ScheduledBatch
from nanovllm.block_manager import BlockManager
from nanovllm.errors import DeviceError
from nanovllm.features.costs.learned_costs import LearnedCosts
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.engine_stats import TierStats
from nanovllm.features.groups.cache_pools import CachePools
from nanovllm.features.tiers.books import StoredBlock
from nanovllm.features.tiers.costs import LoadCosts
from nanovllm.features.tiers.reading import FileReads
from nanovllm.features.tiers.tier_storage import TierStorage
from nanovllm.features.tiers.tiered_blocks import HOST, STEP_BYTES, TieredBlocks
from nanovllm.model import ModelBinding
from nanovllm.observability.step_records import Observer, StepRecord

if TYPE_CHECKING:
    from nanovllm.features.ranks.workers import WorkerProcesses
    from nanovllm.features.tiers.rank_tiers import RankOrders

logger = logging.getLogger("nanovllm")

CLOSE_SECONDS = 30.0  # most time for writing at the end
MIN_CHUNK_STEPS = 3  # fewest steps with chunks before the predicted time to compute counts
WRITES_BETWEEN_LOOKS = 64  # number of orders between two looks whether the other ranks still write
LOOK_SECONDS = 10.0  # time between looks whether they write again, such as after another process has gone
DECODES_SKIPPED = 16  # steps without chunks for each that is learned from

_open: weakref.WeakSet[PrefixTiers] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Save prefixes of engines that were not closed; their threads may not step any more."""
    for tiers in list(_open):
        with suppress(Exception):
            tiers.engine_closed()


class PrefixTiers(Observer):
    """The tiers of an engine's block manager, which it attaches.

    Args:
        manager: block manager without entries.
        fit: costs of computing; learns from steps with prompts, and from a few others.
        seed: identity of all that KV depends on besides tokens and salt.
        orders: connection to the other ranks; None on one rank.
    """

    def __init__(
        self, manager: TieredBlocks, storage: TierStorage, config: EngineConfig, fit: LearnedCosts, seed: str,
        clock: Callable[[], float], orders: RankOrders | None = None,
    ) -> None:  # fmt: skip
        self.manager = manager
        self.memory = storage.memory
        self.books = storage.books
        self._orders = orders
        self._fit = fit
        self._num_chunk_steps = 0
        self._max_step_tokens = config.max_num_batched_tokens
        self._num_skipped = 0  # steps since the last one that was learned from
        self._keeps_all = config.prefix_cache_host_bytes is not None  # files alone keep only likely hits
        self._num_writes, self._is_alone = 0, False  # orders to other ranks; True if these do not write
        self._next_look = 0.0  # time to ask other ranks again, after they did not write
        self._lock = threading.Lock()
        self._is_closed = False
        self._process_id = os.getpid()
        self.costs = LoadCosts(self._compute_seconds)
        self._goal = config.itl_goal
        self.directory = storage.directory
        self.reads = None
        memory = self.memory
        if self.directory is not None:
            files = self.directory, self.books, self.costs
            self.reads = FileReads(*files, memory.view, memory.settle, clock, orders)
            _open.add(self)
        manager.attach(
            self.books, self.costs, root_seed=seed, reads=self.reads, max_load_bytes=self._max_load_bytes,
            stores_all=self._keeps_all, stores_while_busy=memory.is_asynchronous and self._keeps_all,
            max_step_blocks=config.max_num_batched_tokens // config.block_size + config.max_num_seqs,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------- costs -------

    def _compute_seconds(self, start: int, count: int) -> float | None:
        """Predicted seconds to compute these tokens in steps of the most tokens, each alone; None if not known."""
        if self._num_chunk_steps < MIN_CHUNK_STEPS:
            return None
        end = start + count
        most = self._max_step_tokens
        return sum(self._fit.forecast((), at)(min(most, end - at)) for at in range(start, end, most)) or None

    def _max_load_bytes(self) -> float:
        """Most bytes of one step, by the latency goal."""
        rate = self.costs.rates.get(HOST)
        return STEP_BYTES if self._goal is None or rate is None else rate * self._goal

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        for num_bytes, seconds in self.memory.take_measured():
            self.costs.measured(HOST, num_bytes, seconds)
        self._num_skipped += 1
        # Loads take part of the step's time, and so do stores without a side stream. A fit takes 0.2 ms, and times of
        # prompts alone are asked for, so it learns from few steps of decodes.
        on_side = self.memory.is_asynchronous
        is_pure = all(copy.source >= 0 and (on_side or copy.destination >= 0) for copy in batch.copies)
        if is_pure and (batch.prefills or self._num_skipped >= DECODES_SKIPPED):
            self._num_skipped = 0
            self._fit.step_ended(record, batch)
            self._num_chunk_steps += bool(batch.prefills)
        else:
            self._fit.last_time = record.time

    # ---------------------------------------------------------------------------------------------------- the stores

    def save_idle(self) -> bool:
        """Store a block, with no step in flight; False if there is none to store."""
        with self._lock:
            if self.reads is not None:
                self.reads.refresh()
                self.reads.collect()
            if self._keeps_all and self._store_one():
                return True
            if self.directory is None or not self.directory.is_writer or not self._may_write():
                return False
            for group in self.manager.numbers:
                for _, node in self.manager.idle_blocks(group):
                    if self.manager.is_worth(node) and (unsaved := self._first_unsaved(node)) is not None:
                        return self._write(*unsaved)
            return False

    def _store_one(self) -> bool:
        stores = self.manager.stores_now()
        copies = [store.copy for store in stores]
        try:
            self.memory.store(copies)
            if self._orders is not None:
                self._orders.store(copies)
        except BaseException:  # idle work ends and requests go on: the slots have no content
            for node, copy in stores:
                self.books.drop(node, copy.group)
            raise
        return bool(stores)

    def _may_write(self) -> bool:
        """Whether the files still name the engine's model, and all ranks write theirs."""
        if self.reads is None or not self.reads.is_attached or (self._is_alone and time.monotonic() < self._next_look):
            return False
        if self._orders is not None and (self._is_alone or self._num_writes % WRITES_BETWEEN_LOOKS == 0):
            self._num_writes += 1
            was_alone, self._is_alone = self._is_alone, not self._orders.all_write()
            self._next_look = time.monotonic() + LOOK_SECONDS
            if self._is_alone and not was_alone:
                logger.warning(
                    "prefix_cache_dir: another rank writes no files, since its disk is full or read-only, or another "
                    "process writes there; nothing is written while that is so, and what is there is read"
                )
        return not self._is_alone

    def _first_unsaved(self, node: StoredBlock) -> tuple[StoredBlock, int] | None:
        """First block of the chain up to this one that no file has: a file's block is reached through earlier ones.

        A recurrent state is needed of this block only: it replaces earlier states.
        """
        chain = [node]
        while (before := chain[-1].parent) is not None and before.parent is not None:
            chain.append(before)
        for block in reversed(chain):
            for group, kind in enumerate(self.manager.kinds):
                is_needed = kind.record_bytes is None or block is node
                if is_needed and group not in block.places and self._has_content(block, group):
                    return block, group
        return None

    def _has_content(self, node: StoredBlock, group: int) -> bool:
        """Whether there is something to write; of a group without content a record of the tokens."""
        is_empty = not self.books.block_bytes[group]
        manager = self.manager
        has_slot = manager.settled_slot(group, node) is not None
        return is_empty or has_slot or manager.settled_block(group, node) != NULL_BLOCK

    def _write(self, node: StoredBlock, group: int) -> bool:
        assert self.directory is not None
        block = self.manager.settled_block(group, node) if self.books.block_bytes[group] else NULL_BLOCK
        slot = self.manager.settled_slot(group, node)
        if not self.directory.append(node, group, self.memory.content(group, block, slot)):
            return False
        if self._orders is not None:
            self._num_writes += 1
            self._orders.write(node, group, block, slot)
        return True

    def engine_closed(self) -> None:
        """Write blocks that no file has yet, and give the directory back; nothing in a forked child."""
        if os.getpid() != self._process_id:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            _open.discard(self)
            all_answer = self.directory is None or self._orders is None or self._orders.begin_close()
            if self.reads is not None:
                self.reads.close()
            if self.directory is not None:
                try:
                    if all_answer:
                        self._write_all()
                        if self._orders is not None:
                            self._orders.finish(CLOSE_SECONDS)
                except DeviceError:  # a rank is gone
                    pass
                finally:
                    self.directory.close()

    def _write_all(self) -> None:
        assert self.directory is not None
        end = time.monotonic() + CLOSE_SECONDS
        left = self.directory.max_bytes - 2 * self.directory.segment_bytes
        if self.reads is not None:
            self.reads.refresh(now=True)
        if not self.directory.is_writer or not self._may_write():
            return
        for root in list(self.books.roots.values()):
            for node in list(root.below()):
                for group, size in enumerate(self.books.block_bytes):
                    if node is root or group in node.places or not self._has_content(node, group):
                        continue
                    left -= size
                    if left < 0 or time.monotonic() > end or not self._write(node, group):
                        return

    # ----------------------------------------------------------------------------------------------------- statistics

    def stats(self) -> TierStats:
        manager = self.manager
        last = self.costs.last
        reads = self.reads
        return TierStats(
            host_bytes=self.books.used_bytes,
            num_host_blocks=self.books.num_stored,
            num_host_evictions=self.books.num_evictions,
            num_stored_blocks=manager.num_stored_blocks,
            num_loaded_blocks=manager.num_loaded_blocks,
            num_loaded_tokens=manager.num_loaded_tokens,
            dir_bytes=0 if self.directory is None else self.directory.num_bytes,
            num_written_blocks=0 if self.directory is None else self.directory.num_written,
            num_read_blocks=0 if reads is None else reads.num_read_blocks,
            num_failed_reads=0 if reads is None else reads.num_failed,
            num_loads=self.costs.num_loads,
            num_recomputes=self.costs.num_recomputes,
            load_seconds=None if last is None else last.load_seconds,
            compute_seconds=None if last is None else last.compute_seconds,
        )

    def __str__(self) -> str:
        return "the prefix cache's tiers"


class Runner(Protocol):
    """A `ModelRunner`."""

    binding: ModelBinding
    config: EngineConfig
    pools: CachePools
    workers: WorkerProcesses | None


def open_tiers(
    manager: BlockManager, runner: Runner, seed: str, digest: str | None, clock: Callable[[], float]
) -> PrefixTiers:
    """The tiers of an engine.

    Args:
        manager: block manager of `build_block_manager`, with tiers.
        digest: fingerprint of the model; None without files.
    """
    assert isinstance(manager, TieredBlocks)
    binding = runner.binding
    pools = runner.pools
    storage = TierStorage.open(binding, runner.config, pools, digest)
    orders = None
    if runner.workers is not None and binding.ranks is not None:
        from nanovllm.features.tiers.rank_tiers import RankOrders

        orders = RankOrders(runner.workers, binding.ranks)
    costs = LearnedCosts(runner.config, () if pools.is_one_full else pools.groups)
    return PrefixTiers(manager, storage, runner.config, costs, storage.seed or seed, clock, orders)
