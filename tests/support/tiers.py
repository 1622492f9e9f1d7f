"""Tiers without memory and files: a mock model that executes copies, and files read late, wrongly or never."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

from nanovllm.cache.cache_groups import CacheGroups
from nanovllm.cache.kinds import StateKind
from nanovllm.cache.tiers.books import StoredBlock, TierBooks
from nanovllm.cache.tiers.costs import LoadCosts
from nanovllm.cache.tiers.reading import FileReads, Job, ReadItem
from nanovllm.cache.tiers.segments import Place
from nanovllm.cache.tiers.tiered_blocks import TieredBlocks, TieredGroups
from nanovllm.core.batch import NULL_BLOCK, ScheduledBatch
from nanovllm.scheduler import Scheduler
from tests.support.mock_states import UNWRITTEN, Poison, check
from tests.support.scheduling import Loop, MockModel, make_config

Content = list[int | Poison | None]


class TieredModel(MockModel):
    """Executes the copies of a batch before its forward pass: stores, then the others."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.host: dict[tuple[int, int], Content] = {}  # by (group, slot)

    def execute(self, batch: ScheduledBatch, non_finite: Collection[str] = ()) -> list[int]:
        destinations = [(copy.group, copy.destination) for copy in batch.copies]
        check(len(set(destinations)) == len(destinations), "two copies of a step have one destination")
        for group, source, destination in batch.copies:
            if destination < 0:
                self.host[group, ~destination] = self.block(group, source)
        return super().execute(batch, non_finite)

    def _copy(self, batch: ScheduledBatch) -> None:
        super()._copy(replace(batch, copies=tuple(copy for copy in batch.copies if min(copy[1:]) >= 0)))
        for group, source, destination in batch.copies:
            if source < 0:
                self.set_block(group, destination, self.host[group, ~source])

    def fail(self, batch: ScheduledBatch) -> None:
        super().fail(batch)
        for group, _, destination in batch.copies:
            if destination < 0:
                self.host[group, ~destination] = [UNWRITTEN] * self.size_of(group)


class FakeReads(FileReads):
    """Reads that end when the walk says so, rightly or not."""

    def __init__(self, books: TierBooks, costs: LoadCosts, rng: random.Random, loop: TieredLoop) -> None:
        super().__init__(self, books, costs, self.no_view, clock=lambda: loop.now)  # type: ignore[arg-type]
        self.rng, self.loop, self.disk = rng, loop, dict[Place, Content]()

    @staticmethod
    def no_view(group: int, slot: int) -> memoryview:
        raise AssertionError("the thread does not run")

    def refresh(self) -> None: ...

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


class TieredLoop(Loop):
    """A loop with a tier of few slots, and files that come and go."""

    model: TieredModel
    manager: TieredBlocks

    def __init__(self, scheduler: Scheduler, rng: random.Random, *, num_slots: int, has_files: bool) -> None:
        super().__init__(scheduler)
        self.model = TieredModel(scheduler)
        self.rng = rng
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
                    if not self.books.is_pinned(node, group):
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
                elif group in node.slots and not self.books.is_pinned(node, group):
                    self.books.drop(node, group)
                continue
            block = self.manager.settled_block(group, node)
            if block != NULL_BLOCK and not self.in_flight:
                content = self.model.block(group, block)
                place = Place(0, len(self.reads.disk), 1, b"")
                self.reads.disk[place] = content
                node.places[group] = place
                self.seen["written"] += 1

    def check(self) -> None:
        super().check()
        if hasattr(self, "books"):
            self.books.check()


def make_tiered_scheduler(
    kinds: list[StateKind], num_blocks: list[int], *, block_size: int, **limits: float | None
) -> Scheduler:
    """A scheduler whose block manager has no tiers attached yet; one kind is full attention alone."""
    config = make_config(num_kv_blocks=num_blocks[0], **limits)
    if len(kinds) == 1:
        return Scheduler(config, TieredBlocks(num_blocks[0], block_size))
    manager = TieredGroups(
        kinds, num_blocks, block_size, max_model_len=config.max_model_len,
        max_chunk_tokens=config.long_prefill_token_threshold,
    )  # fmt: skip
    assert isinstance(manager, CacheGroups)
    return Scheduler(config, manager)
