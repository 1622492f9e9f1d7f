"""KV events: publishes changes of a prefix cache over ZeroMQ, in vLLM's schema, for external routers.

A message has three frames: topic, sequence number (8 bytes, big endian), and a batch in MessagePack::

    [seconds since 1970, [event, ...], rank]
    {"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., "token_ids": [...], "block_size": 16, ...}
    {"type": "BlockRemoved", "block_hashes": [...], "medium": "GPU"}
    {"type": "AllBlocksCleared"}

A thread encodes and sends, so that no step waits for a subscriber. A lost batch leaves a gap in the sequence numbers;
subscribers request it at the replay endpoint.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nanovllm.batch import ScheduledBatch
from nanovllm.block_manager import BlockManager
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_groups import CacheGroups
from nanovllm.features.groups.state_kinds import StateKind
from nanovllm.features.kv_events.block_events import (
    AllForgotten,
    BlockEvent,
    BlockEvents,
    Findable,
    Forgotten,
    InHostMemory,
)
from nanovllm.features.tiers.books import StoredBlock
from nanovllm.observability.step_records import Observer, StepObservers, StepRecord

logger = logging.getLogger("nanovllm")

MEDIUM = "GPU"  # vLLM's name for the pool that attention reads, on any device
HOST_MEDIUM = "CPU"  # vLLM's name for host memory
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MAX_QUEUED = 10_000  # batches queued for the thread; further ones are lost
MAX_UNSENT = 10_000  # messages queued for one slow subscriber; it misses further ones
MAX_REPLAYED = 10_000  # batches kept for replay
POLL_SECONDS = 0.05  # longest wait of a replay request while there are no events
JOIN_SECONDS = 1.0  # wait of the first batch for a subscriber: subscribers of an earlier engine reconnect
MORE_SUBSCRIBERS_SECONDS = 0.2  # wait for further subscribers after the first
CLOSE_SECONDS = 1.0  # most seconds for sending queued batches when the engine closes


class KvEventPublisher(Observer):
    """Publishes the batches of one engine's `BlockEvents`, until it closes.

    The first batch is AllBlocksCleared: subscribers may know an earlier engine at this endpoint.

    Raises ValueError for an unusable endpoint.
    """

    def __init__(self, config: EngineConfig) -> None:
        from msgspec.msgpack import Encoder
        from zmq import ROUTER, XPUB, Context

        self._encode = Encoder().encode
        self._topic = config.kv_events_topic.encode()
        self._rank = config.kv_events_rank
        self._next_sequence = 0
        self._num_lost = 0
        self._queue: queue.Queue[tuple[int, float, Sequence[BlockEvent | InHostMemory]]] = queue.Queue(MAX_QUEUED)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_REPLAYED)  # (sequence number, payload)
        self._is_closing = threading.Event()
        self._context: Any = Context()
        try:
            self._publish: Any = self._open(XPUB, "kv_events", config.kv_events, MAX_UNSENT)
            # A ROUTER drops messages beyond its limit, and one request may ask for all kept batches: no limit.
            self._replay: Any = self._open(ROUTER, "kv_events_replay", config.kv_events_replay, 0)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread: threading.Thread | None = None
        self._kinds: list[str] = []  # kinds of the cache groups of a model with recurrent states
        self._block_size: int | None = None
        self._in_tier: dict[tuple[StoredBlock, bool], bytes] = {}  # hashes in host memory by (block, of_states)
        self._of_tier: list[BlockEvent | InHostMemory] = []  # events of the tier since the last step

    @staticmethod
    def check(config: EngineConfig) -> None:
        """Check the endpoints of all replicas before a model is loaded; raises as the constructor."""
        for replica in range(config.data_parallel_size):
            own = replace(config, kv_events_rank=config.kv_events_rank + replica)
            KvEventPublisher(own)._context.destroy(linger=0)

    def begin(self, manager: BlockManager, observers: StepObservers) -> None:
        """Start publishing the events of this block manager, until the engine closes."""
        self._block_size = manager.block_size
        if isinstance(manager, CacheGroups) and manager.cuts_chunks:
            self._kinds = [_name(group.kind) for group in manager.groups]
        self._thread = threading.Thread(target=self._run, name="nanovllm-kv-events", daemon=True)
        self._thread.start()
        observers.append(self)
        BlockEvents.follow(manager, observers, self.receive)
        self.receive([AllForgotten()])

    def receive(self, events: Sequence[BlockEvent | InHostMemory]) -> None:
        """Queue a batch for sending; never waits."""
        sequence = self._next_sequence
        self._next_sequence = self._next_sequence + 1
        try:
            self._queue.put_nowait((sequence, time.time(), events))
        except queue.Full:
            self._num_lost += 1
            if self._num_lost == 1:
                logger.warning("KV events come faster than they are sent; batch %d is lost", sequence)

    def tier_changed(self, block: StoredBlock, group: int, is_stored: bool) -> None:
        """A block of the first cache group or a recurrent state was stored in host memory, or dropped there."""
        of_states = bool(self._kinds) and group == len(self._kinds) - 1
        if group and not of_states:
            return
        if not is_stored:
            if (block_hash := self._in_tier.pop((block, of_states), None)) is not None:
                self._of_tier.append(InHostMemory(block_hash, None, of_states))
            return
        entry = block.entry
        before = block.parent
        if entry is None or before is None:  # a block from a file: its hash is not known yet
            return
        parent_hash = before.entry.block_hash if before.entry is not None else self._in_tier.get((before, False))
        if before.parent is None or parent_hash is not None:
            salt = entry.parent if isinstance(entry.parent, str) else ""
            self._in_tier[block, of_states] = entry.block_hash
            stored = Findable(entry.block_hash, parent_hash, entry.tokens, salt, of_states)
            self._of_tier.append(InHostMemory(entry.block_hash, stored, of_states))

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        if self._of_tier:
            events = self._of_tier
            self._of_tier = []
            self.receive(events)

    def engine_closed(self) -> None:
        """Send queued batches, within `CLOSE_SECONDS`, and close the sockets."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join(2 * CLOSE_SECONDS)

    def __str__(self) -> str:
        return "kv_events"

    def _open(self, kind: int, option: str, endpoint: str | None, max_unsent: int) -> Any:
        """A socket at an option's endpoint, offset by the rank; None if the option is not set."""
        if endpoint is None:
            return None
        from zmq import SNDHWM, ZMQError

        endpoint = endpoint_of_rank(endpoint, self._rank)
        is_bound = option == "kv_events_replay" or "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc:")
        socket = self._context.socket(kind)
        socket.setsockopt(SNDHWM, max_unsent)
        try:
            (socket.bind if is_bound else socket.connect)(endpoint)
        except ZMQError as error:
            raise ValueError(
                f"{option} is {endpoint!r}, which cannot be {'bound' if is_bound else 'connected'}: {error}. "
                "Choose another endpoint, or end who holds it."
            ) from error
        return socket

    # ------------------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        self._await_subscribers()
        deadline = None
        while deadline is None or time.monotonic() < deadline:
            if deadline is None and self._is_closing.is_set():
                deadline = time.monotonic() + CLOSE_SECONDS
            try:
                while self._publish.poll(0):
                    self._publish.recv()  # a subscription
                while self._replay is not None and self._replay.poll(0):
                    self._answer(self._replay.recv_multipart())
                sequence, now, events = self._queue.get(timeout=0 if deadline else POLL_SECONDS)
            except queue.Empty:
                if deadline:
                    break
                continue
            try:
                number = sequence.to_bytes(8, "big")
                payload = self._encode([now, in_schema(events, self._kinds, self._block_size), self._rank])
                self._sent.append((number, payload))
                self._publish.send_multipart((self._topic, number, payload))
            except Exception:
                logger.exception("batch %d of KV events is lost", sequence)
        self._context.destroy(linger=int(1000 * CLOSE_SECONDS))

    def _await_subscribers(self) -> None:
        end = time.monotonic() + JOIN_SECONDS
        while not self._is_closing.is_set() and time.monotonic() < end:
            if self._publish.poll(int(1000 * POLL_SECONDS)):
                self._is_closing.wait(MORE_SUBSCRIBERS_SECONDS)
                return

    def _answer(self, request: list[bytes]) -> None:
        """Send every kept batch from the requested number on, then the end marker."""
        if len(request) != 3 or len(request[2]) != 8:
            logger.warning("a replay request must be an empty frame and one of 8 bytes, not %r", request[1:])
            return
        client = request[0]
        first = request[2]
        for number, payload in self._sent:
            if number >= first:  # big endian, so bytes compare as numbers
                self._replay.send_multipart((client, b"", number, payload))
        self._replay.send_multipart((client, b"", END_OF_REPLAY, b""))


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of one engine among several: port, or name of the socket, plus the rank."""
    if rank == 0:
        return endpoint
    if endpoint.startswith("ipc:"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


def _name(kind: StateKind) -> str:
    if kind.record_bytes is not None:
        return "mamba"
    return "full_attention" if kind.is_full else "sliding_window" if kind.window else "chunked_local_attention"


def in_schema(
    events: Sequence[BlockEvent | InHostMemory], kinds: Sequence[str] = (), block_size: int | None = None
) -> list[dict[str, Any]]:
    """vLLM's events; consecutive blocks of one chain are merged to one event, and so are consecutive removals.

    Args:
        kinds: names of the cache groups' kinds, recurrent states last; empty without states, when events name no group.
        block_size: tokens of a block; further bytes are the identity of its pictures. None where blocks have none.
    """
    found: list[dict[str, Any]] = []
    tail: tuple[bytes | None, bool] | None = None  # last hash of the chain in the last event, and whether of states
    for event in events:
        if isinstance(event, Findable):
            size = 4 * block_size if block_size else len(event.tokens)
            keys = _extra_keys(event, event.tokens[size:])
            is_next = tail == (event.parent_hash, event.of_states) and (not keys or "extra_keys" in found[-1])
            if not is_next:
                found.append(_stored(event, size // 4, has_keys=bool(keys)) | _group(event, kinds, with_kind=True))
            stored = found[-1]
            tail = (event.block_hash, event.of_states)
            stored["block_hashes"].append(as_number(event.block_hash))
            stored["token_ids"] += array("i", event.tokens[:size])
            if "extra_keys" in stored:
                stored["extra_keys"].append(keys or None)
            continue
        tail = None
        if isinstance(event, InHostMemory):
            found += _in_host_memory(event, kinds, block_size)
        elif isinstance(event, Forgotten):
            removed = {"type": "BlockRemoved", "block_hashes": [], "medium": MEDIUM} | _group(event, kinds)
            if not found or found[-1] | {"block_hashes": []} != removed:
                found.append(removed)
            found[-1]["block_hashes"].append(as_number(event.block_hash))
        else:
            found.append({"type": "AllBlocksCleared"})
    return found


def _group(
    event: Findable | Forgotten | InHostMemory, kinds: Sequence[str], *, with_kind: bool = False
) -> dict[str, Any]:
    """The number of an event's cache group, and its kind."""
    number = len(kinds) - 1 if event.of_states else 0
    fields: dict[str, Any] = {"group_idx": number} if kinds else {}
    return fields | {"kv_cache_spec_kind": kinds[number]} if kinds and with_kind else fields


def _in_host_memory(event: InHostMemory, kinds: Sequence[str], block_size: int | None) -> list[dict[str, Any]]:
    if event.stored is None:
        removed = {"type": "BlockRemoved", "block_hashes": [as_number(event.block_hash)], "medium": HOST_MEDIUM}
        return [removed | _group(event, kinds)]
    return [stored | {"medium": HOST_MEDIUM} for stored in in_schema([event.stored], kinds, block_size)]


def _extra_keys(event: Findable, pictures: bytes) -> list[str]:
    """Further keys of a block: the salt, in the first block of a chain, and its pictures."""
    keys = []
    if event.cache_salt and not event.parent_hash:
        keys.append(event.cache_salt.encode("utf-8", "backslashreplace").decode())  # it may hold lone surrogates
    return [*keys, pictures.hex()] if pictures else keys


def _stored(first: Findable, block_size: int, *, has_keys: bool) -> dict[str, Any]:
    """An event for a chain that begins with this block, without blocks yet."""
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [],
        "parent_block_hash": None if first.parent_hash is None else as_number(first.parent_hash),
        "token_ids": [],
        "block_size": block_size,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None,
    }
    return event | {"extra_keys": []} if has_keys or first.cache_salt else event


def as_number(block_hash: bytes) -> int:
    """A hash as a number for routers: its last 64 bits."""
    return int.from_bytes(block_hash[-8:], "big")
