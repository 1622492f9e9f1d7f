"""Tiers of one engine: stores in idle time and at its end, costs of loads, statistics."""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import transformers

import nanovllm
from nanovllm.attention.host_memory import HostMemory
from nanovllm.block_manager import BlockManager
from nanovllm.cache.cache_pools import CachePools
from nanovllm.cache.tiers.books import StoredBlock, TierBooks
from nanovllm.cache.tiers.costs import LoadCosts
from nanovllm.cache.tiers.directory import CacheDirectory
from nanovllm.cache.tiers.reading import FileReads
from nanovllm.cache.tiers.tiered_blocks import HOST, STEP_BYTES, TieredBlocks
from nanovllm.core.batch import NULL_BLOCK, ScheduledBatch
from nanovllm.core.config import EngineConfig
from nanovllm.core.option_stats import TierStats
from nanovllm.execution.learned_costs import LearnedCosts
from nanovllm.model.binding import ModelBinding
from nanovllm.observability.step_records import Observer, StepRecord
from nanovllm.process.device import find_kernel

logger = logging.getLogger("nanovllm")

DEFAULT_HOST_BYTES = 2**30  # that files are read into, where no host tier is asked for
CLOSE_SECONDS = 30.0  # for writing at the end
MIN_CHUNK_STEPS = 3  # measured before the predicted time to compute counts

_open: weakref.WeakSet[PrefixTiers] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Save prefixes of engines that nobody closed; their threads may step no more."""
    for tiers in list(_open):
        with suppress(Exception):
            tiers.engine_closed()


class PrefixTiers(Observer):
    """The tiers of an engine's block manager, which it attaches.

    Args:
        manager: without entries.
        seed: everything that KV depends on besides tokens and salt; `header` likewise, for files.
        directory: folder of the files; None for host memory alone.
    """

    def __init__(
        self, manager: TieredBlocks, memory: HostMemory, config: EngineConfig, pools: CachePools,
        seed: str, header: dict[str, Any] | None, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.manager, self.memory = manager, memory
        self._fit = LearnedCosts(config, () if pools.is_one_full else pools.groups)
        self._num_chunk_steps, self._max_step_tokens = 0, config.max_num_batched_tokens
        self._keeps_all = config.prefix_cache_host_bytes is not None  # else only likely hits, in files
        self._works_idle = config.tensor_parallel_size == 1  # other ranks follow steps alone
        self._lock = threading.Lock()
        self._is_closed = False
        self._process_id = os.getpid()
        sizes = [group.block_bytes for group in pools.groups]
        host_bytes = config.prefix_cache_host_bytes or max(DEFAULT_HOST_BYTES, _least_bytes(pools))
        self.books = TierBooks(sizes, host_bytes, _shares(pools))
        self.costs = LoadCosts(self._compute_seconds)
        self._goal = config.itl_goal
        self.directory: CacheDirectory | None = None
        self.reads: FileReads | None = None
        if header is not None:
            assert config.prefix_cache_dir is not None
            self.directory = CacheDirectory(config.prefix_cache_dir, header, config.prefix_cache_dir_bytes, self.books)
            self.reads = FileReads(self.directory, self.books, self.costs, memory.view, memory.settle, clock)
            _open.add(self)
        manager.attach(
            self.books, self.costs, root_seed=seed, reads=self.reads, max_load_bytes=self._max_load_bytes,
            stores_all=self._keeps_all, stores_while_busy=memory.is_asynchronous and self._keeps_all,
            max_step_blocks=config.max_num_batched_tokens // config.block_size + config.max_num_seqs,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------- costs -------

    def _compute_seconds(self, start: int, count: int) -> float | None:
        """Of as many steps as the tokens take, each alone."""
        if self._num_chunk_steps < MIN_CHUNK_STEPS:
            return None
        end, most = start + count, self._max_step_tokens
        return sum(self._fit.forecast((), at)(min(most, end - at)) for at in range(start, end, most)) or None

    def _max_load_bytes(self) -> float:
        """Most bytes of one step, by the latency goal."""
        rate = self.costs.rates.get(HOST)
        return STEP_BYTES if self._goal is None or rate is None else rate * self._goal

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        for num_bytes, seconds in self.memory.take_measured():
            self.costs.measured(HOST, num_bytes, seconds)
        # Loads take part of the step's time, and so do stores without a side stream.
        if not batch.copies or (self.memory.is_asynchronous and all(copy.source >= 0 for copy in batch.copies)):
            self._fit.step_ended(record, batch)
            self._num_chunk_steps += bool(batch.prefills)
        else:
            self._fit.last_time = record.time

    # ---------------------------------------------------------------------------------------------------- the stores

    def save_idle(self) -> bool:
        """Store a block, with no step in flight; False if there is none to store."""
        if not self._works_idle:
            return False
        with self._lock:
            if self.reads is not None:
                self.reads.collect()
            if self._keeps_all and self._store_one():
                return True
            if self.directory is None or not self.directory.is_writer or not self._writes_files:
                return False
            for group in self.manager.numbers:
                for _, node in self.manager.idle_blocks(group):
                    if self.manager.is_worth(node) and (unsaved := self._first_unsaved(node)) is not None:
                        return self._write(*unsaved)
            return False

    def _store_one(self) -> bool:
        copies = self.manager.stores_now()
        self.memory.store(copies)
        return bool(copies)

    @property
    def _writes_files(self) -> bool:
        """Whether the files still name the engine's model."""
        return self.reads is not None and self.reads.is_attached

    def _first_unsaved(self, node: StoredBlock) -> tuple[StoredBlock, int] | None:
        """The first block up to this one that no file has; a block in a file is reached by those before it.

        Of recurrent states this one's alone: it replaces those before it.
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
        return is_empty or group in node.slots or self.manager.settled_block(group, node) != NULL_BLOCK

    def _write(self, node: StoredBlock, group: int) -> bool:
        assert self.directory is not None
        if not self.books.block_bytes[group]:
            return self.directory.append(node, group, b"")
        block = self.manager.settled_block(group, node)
        if block != NULL_BLOCK:
            return self.directory.append(node, group, self.memory.read_block(group, block))
        self.memory.settle()
        return self.directory.append(node, group, self.memory.view(group, node.slots[group]))

    def engine_closed(self) -> None:
        """Write blocks that no file has yet, and give the directory back; nothing in a forked child."""
        if os.getpid() != self._process_id:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            _open.discard(self)
            if self.reads is not None:
                self.reads.close()
            if self.directory is not None:
                try:
                    self._write_all()
                finally:
                    self.directory.close()

    def _write_all(self) -> None:
        assert self.directory is not None
        end, left = time.monotonic() + CLOSE_SECONDS, self.directory.max_bytes - 2 * self.directory.segment_bytes
        if not self.directory.is_writer or not self._writes_files:
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
        manager, last, reads = self.manager, self.costs.last, self.reads
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


def _shares(pools: CachePools) -> list[float]:
    """Shares of a tier's bytes for the cache groups: those of the KV cache."""
    return [group.block_bytes * count / pools.num_bytes for group, count in zip(*pools, strict=True)]


def _least_bytes(pools: CachePools) -> int:
    """Bytes of a tier of which recurrent states get a share that holds one; 0 for a model without any."""
    return math.ceil(pools.groups[-1].block_bytes / _shares(pools)[-1]) if any(pools.are_records) else 0


def host_memory(binding: ModelBinding, config: EngineConfig, pools: CachePools) -> HostMemory:
    """The host memory of a rank, which executes the copies of its steps from now on.

    Raises ValueError for bytes that hold no recurrent state, or that cannot be pinned.
    """
    caches = binding.caches
    if not isinstance(caches.host, HostMemory):
        sizes = [group.block_bytes for group in pools.groups]
        caches.host = HostMemory(caches, sizes, config.block_size, binding.device)
        num_bytes = config.prefix_cache_host_bytes or 0
        if num_bytes and num_bytes < (least := _least_bytes(pools)):
            raise ValueError(
                f"prefix_cache_host_bytes is {num_bytes:,}, of which recurrent states have a share that holds none: "
                f"one of {type(binding.model).__name__} takes {sizes[-1]:,} bytes. Set at least {least:,}."
            )
        try:
            caches.host.pin([int(num_bytes * share) for share in _shares(pools)])
        except RuntimeError as error:
            raise ValueError(
                f"prefix_cache_host_bytes is {num_bytes:,} for each of {config.tensor_parallel_size} ranks, and this "
                f"machine cannot pin so much memory ({error}). Set fewer bytes."
            ) from error
    return caches.host


def open_tiers(
    manager: BlockManager, binding: ModelBinding, config: EngineConfig, pools: CachePools, seed: str,
    digest: str | None, clock: Callable[[], float],
) -> PrefixTiers:  # fmt: skip
    """The tiers of an engine.

    Args:
        manager: of `build_block_manager`, with tiers.
        digest: of the model; None without files.
    """
    assert isinstance(manager, TieredBlocks)
    memory = host_memory(binding, config, pools)
    header = None if digest is None else file_header(binding, config, pools, digest)
    if header is not None:
        seed = json.dumps(header, sort_keys=True)
    return PrefixTiers(manager, memory, config, pools, seed, header, clock)


def file_header(binding: ModelBinding, config: EngineConfig, pools: CachePools, digest: str) -> dict[str, Any]:
    """Everything that the bytes of KV depend on besides tokens and salts.

    Args:
        digest: of the model's config and weights, by `model.fingerprint`.
    """
    shapes = [
        [
            [*part.shape[:1], *part.shape[2:], str(part.dtype)]
            for part in binding.caches.blocks_of(group, config.block_size)
        ]
        for group in range(len(pools.groups))
    ]
    states = [sorted(map(str, layer.states)) for layer in binding.mixers.layers] if binding.mixers else None
    return ({} if states is None else {"states": states}) | {
        "model": digest,
        "rope": binding.rope.choice,
        "device": binding.device.type,
        "machine": platform.machine(),
        "processor": _processor(binding.device),
        "attention_backend": config.attention_backend,
        "block_size": config.block_size,
        "groups": [[*group.kind.spans, list(group.layers), group.block_bytes] for group in pools.groups],
        "blocks": shapes,
        "quantization": config.quantization,
        "exact_activations": config.exact_activations,
        "nanovllm": nanovllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor(device: torch.device) -> str | None:
    """The class of the CPU, or the name of the GPU: others round K and V differently."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    rounding_class = find_kernel("processor_classes", "rounding_class")
    return None if rounding_class is None else rounding_class()
