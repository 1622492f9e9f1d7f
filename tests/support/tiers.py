"""Tiers without memory and files: a mock model that executes copies, idle work, and files read late, wrongly or never.

Every slot of host memory and every block of a file is checked against the KV of the tokens that the books name for it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Iterable
from dataclasses import replace

from nanovllm.batch import NULL_BLOCK, Copy, ScheduledBatch
from nanovllm.block_manager import root_hash
from nanovllm.features.groups.cache_groups import CacheGroups
from nanovllm.features.groups.state_kinds import FULL, StateKind
from nanovllm.features.policies.mock_model import MockModel
from nanovllm.features.policies.mock_states import UNWRITTEN, Poison, check
from nanovllm.features.tiers.books import StoredBlock, TierBooks
from nanovllm.features.tiers.costs import LoadCosts
from nanovllm.features.tiers.prefix_tiers import PrefixTiers
from nanovllm.features.tiers.reading import FileReads, Job, ReadItem
from nanovllm.features.tiers.segments import Place
from nanovllm.features.tiers.tiered_blocks import TieredBlocks, TieredGroups
from nanovllm.scheduler import Scheduler
from tests.engine.loops import empty_prefix, extend_prefix
from tests.support.public_options import make_config
from tests.support.scheduling import Loop, shared_scheduler

Content = list[int | Poison | None]
SALTS = ("", "salt")


class TieredModel(MockModel):
    """Executes the copies of a batch before its forward pass: stores, then the others."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.manager = scheduler.block_manager
        self.host: dict[tuple[int, int], Content] = {}  # by (group, slot)
        self.reads: FakeReads | None = None

    def execute(self, batch: ScheduledBatch, non_finite: Collection[str] = ()) -> list[int]:
        destinations = [(copy.group, copy.destination) for copy in batch.copies]
        check(len(set(destinations)) == len(destinations), "two copies of a step have one destination")
        if self.reads is not None:
            self.reads.finish_some()  # the thread waits for no step that is not launched
        self.store(batch.copies)
        return super().execute(batch, non_finite)

    def store(self, copies: Iterable[Copy]) -> None:
        """Execute the copies to host memory, before any other of a step."""
        for group, source, destination in copies:
            if destination < 0:
                self.host[group, ~destination] = self.block(group, source)

    def content(self, group: int, block: int, slot: int | None) -> Content:
        """The content of a block: from the KV cache, from a slot for the null block, nothing without either."""
        if block != NULL_BLOCK:
            return self.block(group, block)
        return [] if slot is None else self.host[group, slot]

    def _copy(self, batch: ScheduledBatch) -> None:
        super()._copy(replace(batch, copies=tuple(copy for copy in batch.copies if min(copy[1:]) >= 0)))
        for group, source, destination in batch.copies:
            if source < 0:
                self.set_block(group, destination, self.host[group, ~source])

    def fail(self, batch: ScheduledBatch) -> None:
        super().fail(batch)
        for (group, slot), node in self.manager._stored_in.get(batch.step_id, {}).items():
            if node.slots.get(group) == slot:  # else a read of a file has it, which began when the copy had ended
                self.host[group, slot] = [UNWRITTEN] * self.size_of(group)


class FakeReads(FileReads):
    """Reads that end when the walk says so, rightly or not."""

    def __init__(self, books: TierBooks, costs: LoadCosts, rng: random.Random, loop: TieredLoop) -> None:
        super().__init__(self, books, costs, self.no_view, clock=lambda: loop.now)  # type: ignore[arg-type]
        self.rng, self.loop, self.disk = rng, loop, dict[Place, Content]()

    @staticmethod
    def no_view(group: int, slot: int) -> memoryview:
        raise AssertionError("the thread does not run")

    def refresh(self, *, now: bool = False) -> None: ...

    def damaged(self, node: StoredBlock, group: int) -> None:
        node.places.pop(group, None)
        self._books.prune(node)

    def detach(self) -> None:
        super().detach()
        self._directory = self  # type: ignore[assignment]

    def start(self, items: list[ReadItem]) -> Job:
        self._thread = self  # type: ignore[assignment]
        return super().start(items)

    def finish(self, job: Job) -> None:
        """End a read, with some of its blocks damaged."""
        for item in job.items:
            content = self.disk.get(item.place)
            is_right = content is not None and self.rng.random() < 0.5
            self.loop.model.host[item.group, item.slot] = content if is_right else []
            job.results.append(is_right)
        job.is_done.set()
        self.loop.seen["read late"] += 1

    def finish_some(self) -> None:
        for job in self._jobs:
            if not job.is_done.is_set() and self.rng.random() < 0.5:
                self.finish(job)

    def wait(self, sequence, *, may_block: bool) -> None:
        if may_block:  # nothing else can run: time passes until the reads end, or the deadline comes
            if self.rng.random() < 0.5:
                for job in self._jobs:
                    if not job.is_done.is_set():
                        self.finish(job)
            else:
                self.loop.now += 10.0
        super().wait(sequence, may_block=False)


class FakeFiles:
    """The directory of `FakeIdleWork`."""

    is_writer = True

    def __init__(self, loop: TieredLoop) -> None:
        self._loop = loop

    def append(self, node: StoredBlock, group: int, content: Content) -> bool:
        self._loop.write(node, group, content)
        return True


class FakeIdleWork(PrefixTiers):
    """The idle work of an engine's tiers over a mock model's memory."""

    def __init__(self, loop: TieredLoop) -> None:
        self.manager, self.memory, self.books, self.reads = loop.manager, loop.model, loop.books, loop.reads  # type: ignore[assignment]
        self.directory = None if loop.reads is None else FakeFiles(loop)  # type: ignore[assignment]
        self._keeps_all, self._orders, self._is_alone, self._lock = True, None, False, threading.Lock()


class TieredLoop(Loop):
    """A loop with a tier of few slots, and files that come and go."""

    model: TieredModel
    manager: TieredBlocks

    def __init__(self, scheduler: Scheduler, rng: random.Random, *, num_slots: int, has_files: bool) -> None:
        super().__init__(scheduler)
        self.model = TieredModel(scheduler)
        self.rng = rng
        self._known: dict[StoredBlock, list[int]] = {}  # hashes of prefixes
        num_groups = len(self.manager.pools)
        self.books = TierBooks([1] * num_groups, num_slots)
        costs = LoadCosts(lambda start, count: rng.choice((None, 1.0, 0.0)))
        costs.rates["host"] = 1000.0
        self.reads = FakeReads(self.books, costs, rng, self) if has_files else None
        self.manager.attach(
            self.books, costs, root_seed="model", reads=self.reads, stores_all=rng.random() < 0.8,
            stores_while_busy=rng.random() < 0.5, max_load_bytes=lambda: rng.choice((1, 3, 100)),
            max_step_blocks=8,
        )  # fmt: skip
        self.model.reads = self.reads
        self.idle_work = FakeIdleWork(self)

    def idle(self) -> None:
        """Use idle time as the engine does, with no step in flight: some pieces of work.

        Sometimes all requests end before, the last step beside a schedule without work; else some may wait.
        """
        if self.rng.random() < 0.3:
            self.drain(depth=2)
        while self.in_flight:
            self.read()
        for _ in range(self.rng.randint(1, 10)):
            if not self.use_idle_time():
                break
            self.check()

    def use_idle_time(self) -> bool:
        """Do a piece of idle work; False if there is none to do."""
        if self.reads is not None and self.rng.random() < 0.3:
            self.reads.finish_some()
        queued = len(self.manager.copies)
        does_work = self.idle_work.save_idle()
        check(len(self.manager.copies) == queued, "idle work takes copies of the next batch")
        self.seen["idle beside queued copies"] += does_work and queued > 0
        return does_work

    def launch(self, non_finite: Collection[str] = ()) -> ScheduledBatch | None:
        before = self.manager.num_loaded_blocks
        batch = super().launch(non_finite)
        self.seen["loads"] += self.manager.num_loaded_blocks - before
        self.seen["stores"] += 0 if batch is None else sum(copy.destination < 0 for copy in batch.copies)
        if self.reads is not None and self.reads.is_attached:
            self.reads.finish_some()
            self.save_some()
            if not self.in_flight and self.rng.random() < 0.6:
                self.evict_all()
            if self.rng.random() < 0.3:
                self.now += 10.0
        return batch

    def evict_all(self) -> None:
        """Leave the files alone: no block that is free and no slot keeps its content."""
        for pool in self.manager.pools:
            for block in list(pool.free_blocks):
                pool.forget_block(block)
        for root in list(self.books.roots.values()):
            for node in list(root.below()):
                for group in list(node.slots):
                    if not self.books.is_pinned(group, node.slots[group]):
                        self.books.drop(node, group)

    def save_some(self) -> None:
        """Write blocks to the files, and remove others."""
        assert self.reads is not None
        nodes = [node for root in self.books.roots.values() for node in root.below() if node.parent is not None]
        chosen = self.rng.sample(nodes, min(20, len(nodes)))
        for node, group in [(node, group) for node in chosen for group in self.manager.numbers]:
            if group in node.places:
                if self.rng.random() < 0.05:
                    self.reads.damaged(node, group)
                elif group in node.slots and not self.books.is_pinned(group, node.slots[group]):
                    self.books.drop(node, group)
                continue
            block = self.manager.settled_block(group, node)
            if block != NULL_BLOCK and not self.in_flight:
                self.write(node, group, self.model.block(group, block))

    def write(self, node: StoredBlock, group: int, content: Content) -> None:
        """Write a block to the files."""
        assert self.reads is not None
        self._check_content(node, group, content, "file")
        place = Place(0, len(self.reads.disk), 1, b"")
        self.reads.disk[place] = content
        node.places[group] = place
        self.seen["written"] += 1

    def check(self) -> None:
        super().check()
        if hasattr(self, "books"):
            self.books.check()
            for root in self.books.roots.values():
                for node in root.below():
                    for group in node.slots:
                        if (slot := self.manager.settled_slot(group, node)) is not None:
                            self._check_content(node, group, self.model.host[group, slot], f"slot {slot}")

    def _check_content(self, node: StoredBlock, group: int, content: Content, place: str) -> None:
        """Check that a content is the KV of the tokens before and in a block, or poison."""
        expected = self._prefixes(node)[-self.model.size_of(group) :]
        is_right = len(content) == len(expected) and all(
            isinstance(found, Poison) or found == right for found, right in zip(content, expected, strict=True)
        )
        check(is_right, f"{place} of group {group} has another content than that of its tokens")

    def _prefixes(self, node: StoredBlock) -> list[int]:
        """The hashes of the prefixes that end in a block."""
        if node not in self._known:
            assert node.parent is not None
            if node.parent.parent is None:
                prefix = next(
                    empty_prefix(salt) for salt in SALTS if root_hash(self.manager.root_seed, salt) == node.parent.key
                )
            else:
                prefix = self._prefixes(node.parent)[-1]
            found = self._known[node] = []
            for token_id in memoryview(node.key).cast("i"):
                prefix = extend_prefix(prefix, token_id)
                found.append(prefix)
        return self._known[node]


def make_tiered_scheduler(
    kinds: list[StateKind], num_blocks: list[int], *, block_size: int, **limits: float | None
) -> Scheduler:
    """A scheduler whose block manager has no tiers attached yet; one kind is full attention alone."""
    config = make_config(num_kv_blocks=num_blocks[0], **limits)
    if kinds == [FULL]:
        return shared_scheduler(config, TieredBlocks(num_blocks[0], block_size))
    manager = TieredGroups(
        kinds, num_blocks, block_size, max_model_len=config.max_model_len,
        max_chunk_tokens=config.long_prefill_token_threshold,
    )  # fmt: skip
    assert isinstance(manager, CacheGroups)
    return shared_scheduler(config, manager)
