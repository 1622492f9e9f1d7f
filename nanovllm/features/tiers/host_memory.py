"""Host memory of the KV cache: slots of one block each, filled from it and copied back to it.

On a GPU the memory is pinned. A store gathers blocks on the step's stream, so that the step may overwrite them, and
leaves for the host on a side stream. A load runs on the step's stream before its forward pass, and waits for earlier
stores only if they fill its slots::

    step's stream   gather | forward pass of step 1 ...........   | (wait) | load | forward pass of step 2 ...
    side stream            | wait | copy to host .....|

Invariant: a slot is written by one stream only once the other has read it, and read only once it is written.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.batch import NULL_BLOCK, Copy
from nanovllm.kv_cache import HostCopies, KVCaches

SLAB_BYTES = 64 * 2**20  # allocation unit; more for large blocks, since pinned sizes are powers of two
ALIGNMENT = 16  # bytes: slots begin at multiples, for elements of any dtype


class HostMemory(HostCopies):
    """Slots of host memory of one rank, by cache group.

    Args:
        caches: caches, already allocated.
        block_bytes: bytes of one block in each cache group, on this rank; 0 for a group without content.
    """

    def __init__(self, caches: KVCaches, block_bytes: Sequence[int], block_size: int, device: torch.device) -> None:
        self._device = device
        self._block_bytes = list(block_bytes)
        self._parts = [caches.blocks_of(group, block_size) for group in range(len(block_bytes))]
        for group, parts in enumerate(self._parts):
            held = sum(part.nbytes // part.shape[1] for part in parts)
            if held != block_bytes[group]:
                raise RuntimeError(f"blocks of cache group {group} have {held} bytes, not {block_bytes[group]}")
        self._row_bytes = [-(-size // ALIGNMENT) * ALIGNMENT for size in block_bytes]
        self._slab_slots = [
            (SLAB_BYTES << (8 * size // SLAB_BYTES).bit_length()) // size if size else 0 for size in self._row_bytes
        ]
        self._slabs: list[list[Tensor]] = [[] for _ in block_bytes]
        self._lock = threading.Lock()  # guards `_slabs`, which a thread that reads files may extend
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._loaded: torch.cuda.Event | None = None  # end of the latest load
        self._stores: deque[tuple[torch.cuda.Event, set[tuple[int, int]]]] = deque()  # perhaps unfinished: their slots
        # Loads that are not measured yet; ranks other than the first never do.
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque(maxlen=64)
        self._measured: deque[tuple[int, float]] = deque(maxlen=64)  # ranks besides the first do not ask

    @property
    def is_asynchronous(self) -> bool:
        """Whether copies overlap with steps."""
        return self._side is not None

    def take_measured(self) -> list[tuple[int, float]]:
        """(bytes, seconds) of loads since the last call."""
        while self._timed and self._timed[0][1].query():
            begin, end, num_bytes = self._timed.popleft()
            self._measured.append((num_bytes, begin.elapsed_time(end) / 1000.0))
        measured = list(self._measured)
        self._measured.clear()
        return measured

    def slot(self, group: int, slot: int) -> Tensor:
        """The bytes of a slot, [block_bytes] uint8."""
        slab, row = divmod(slot, self._slab_slots[group])
        return self._slab(group, slab)[row, : self._block_bytes[group]]

    def view(self, group: int, slot: int) -> memoryview:
        """The bytes of a slot, for a thread that reads a file into it."""
        return self.slot(group, slot).numpy().data

    def _slab(self, group: int, number: int) -> Tensor:
        with self._lock:
            while len(self._slabs[group]) <= number:
                shape = self._slab_slots[group], self._row_bytes[group]
                with torch.inference_mode(False):
                    is_pinned = self._side is not None
                    self._slabs[group].append(torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=is_pinned))
            return self._slabs[group][number]

    def pin(self, num_bytes: Sequence[int]) -> None:
        """Allocate a GPU's slots of so many bytes for each group now: in a step, 4 GB would take about a second.

        No slab is larger than its group's bytes.
        """
        for group, (size, total) in enumerate(zip(self._block_bytes, num_bytes, strict=True)):
            if size and total >= size:
                self._slab_slots[group] = min(self._slab_slots[group], total // size)
                if self._side is not None:
                    self.slot(group, total // size - 1)

    def settle(self) -> None:
        """Wait for all copies launched so far; any thread may."""
        for event in [self._loaded, *(event for event, _ in tuple(self._stores))]:
            if event is not None:
                event.synchronize()

    # ------------------------------------------------------------------------------------------------------ copies

    def store(self, copies: Sequence[Copy]) -> Sequence[Copy]:
        """Execute the copies to host memory, before any other of a step; returns those within the device."""
        if stores := [copy for copy in copies if copy.destination < 0]:
            with torch.inference_mode():
                self._store(stores)
        return [copy for copy in copies if copy.source >= 0 <= copy.destination]

    def load(self, copies: Sequence[Copy]) -> None:
        """Execute the copies from host memory, after all others of a step."""
        if loads := [copy for copy in copies if copy.source < 0]:
            with torch.inference_mode():
                self._load(loads)

    def content(self, group: int, block: int, slot: int | None) -> Any:
        """Bytes of a block: from the KV cache, from a slot for the null block, b"" without either."""
        if block != NULL_BLOCK:
            return self.read_block(group, block)
        if slot is None:
            return b""
        self.settle()
        return self.view(group, slot)

    def read_block(self, group: int, block: int) -> NDArray[np.uint8]:
        """The content of a block, [block_bytes], on the host; with no step in flight."""
        with torch.inference_mode():
            parts = [part[:, block].contiguous().view(torch.uint8).flatten() for part in self._parts[group]]
            content: NDArray[np.uint8] = torch.cat(parts).cpu().numpy()
            return content

    def _store(self, stores: Sequence[Copy]) -> None:
        if self._side is None:
            for group, blocks, slots in _runs([(c.group, c.source, ~c.destination) for c in stores], self._slab_slots):
                for part, rows in self._rows(group, slots):
                    rows.copy_(part[:, blocks].transpose(0, 1))
            return
        current = stream = torch.cuda.current_stream(self._device)
        try:
            gathered: Iterable[Tensor] = [self._gather(copy) for copy in stores]
            stream = self._side
        except torch.OutOfMemoryError:  # one by one, before the step
            gathered = map(self._gather, stores)
            current.wait_stream(self._side)
        self._side.wait_stream(current)  # later loads read these slots, too
        with torch.cuda.stream(stream):
            for copy, content in zip(stores, gathered, strict=True):
                self.slot(copy.group, ~copy.destination).copy_(content, non_blocking=True)
                content.record_stream(stream)
            self._stores.append((stream.record_event(), {(copy.group, ~copy.destination) for copy in stores}))
        while self._stores and self._stores[0][0].query():
            self._stores.popleft()

    def _gather(self, copy: Copy) -> Tensor:
        parts = self._parts[copy.group]
        return torch.cat([part[:, copy.source].contiguous().view(torch.uint8).flatten() for part in parts])

    def _load(self, loads: Sequence[Copy]) -> None:
        num_bytes = sum(self._block_bytes[copy.group] for copy in loads)
        if self._side is None:
            begin = time.perf_counter()
            for group, slots, blocks in _runs([(c.group, ~c.source, c.destination) for c in loads], self._slab_slots):
                for part, rows in self._rows(group, slots):
                    part[:, blocks].copy_(rows.transpose(0, 1))
            self._measured.append((num_bytes, time.perf_counter() - begin))
            return
        current = torch.cuda.current_stream(self._device)
        sources = {(copy.group, ~copy.source) for copy in loads}
        for event, stored in self._stores:
            if not stored.isdisjoint(sources):
                current.wait_event(event)
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record(current)
        for copy in loads:
            content = self.slot(copy.group, ~copy.source).to(self._device, non_blocking=True)
            offset = 0
            for part in self._parts[copy.group]:
                size = part.nbytes // part.shape[1]
                shape = len(part), *part.shape[2:]
                part[:, copy.destination].copy_(content[offset : offset + size].view(part.dtype).view(shape))
                offset += size
        end_event.record(current)
        self._timed.append((begin_event, end_event, num_bytes))
        self._loaded = end_event

    def _rows(self, group: int, slots: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part of a group's caches, and its bytes in slots of one slab as [num_slots, n, block_size, ...]."""
        number = slots.start // self._slab_slots[group]
        base = number * self._slab_slots[group]
        slab = self._slab(group, number)[slots.start - base : slots.stop - base]
        offset = 0
        for part in self._parts[group]:
            size = part.nbytes // part.shape[1]
            rows = slab[:, offset : offset + size].view(part.dtype)
            yield part, rows.view(len(slab), len(part), *part.shape[2:])
            offset += size


def _runs(pairs: Sequence[tuple[int, int, int]], slab_slots: Sequence[int]) -> Iterator[tuple[int, slice, slice]]:
    """(group, source, destination) merged to runs in which both count up, none across two slabs."""
    begin = 0
    for index in range(1, len(pairs) + 1):
        if index < len(pairs):
            (group, source, target), (other, next_source, next_target) = pairs[index - 1], pairs[index]
            size = slab_slots[group]
            follows = (other, next_source, next_target) == (group, source + 1, target + 1)
            if follows and next_source % size and next_target % size:
                continue
        group, source, target = pairs[begin]
        count = index - begin
        yield group, slice(source, source + count), slice(target, target + count)
        begin = index
