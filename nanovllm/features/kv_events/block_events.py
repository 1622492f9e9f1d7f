"""Block events: blocks added to and evicted from the prefix cache, in one batch per step.

Routers of requests among engines consume them: the front of several replicas (`serving/replicas`), or an external
router (`kv_events.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from nanovllm.batch import ScheduledBatch
from nanovllm.block_manager import BlockManager, PrefixEntry
from nanovllm.features.groups.cache_groups import CacheGroups
from nanovllm.observability.step_records import Observer, StepRecord
from nanovllm.sequence import Sequence

logger = logging.getLogger("nanovllm")


class Findable(NamedTuple):
    """A block became findable in the prefix cache.

    parent_hash: hash of the previous block; None for a first block.
    tokens: token ids as bytes of int32.
    cache_salt: the request's, for a first block.
    of_states: True for the recurrent state after the block.
    """

    block_hash: bytes
    parent_hash: bytes | None
    tokens: bytes
    cache_salt: str
    of_states: bool = False


class Forgotten(NamedTuple):
    """A block, or the recurrent state after it, is no longer findable."""

    block_hash: bytes
    of_states: bool = False


class InHostMemory(NamedTuple):
    """A block, or the recurrent state after it, was stored in host memory (`stored` says which), or dropped (None)."""

    block_hash: bytes
    stored: Findable | None
    of_states: bool = False


class AllForgotten(NamedTuple):
    """The prefix cache was cleared."""


BlockEvent = Findable | Forgotten | AllForgotten
Receiver = Callable[[list[BlockEvent]], None]  # runs in the engine's thread


class BlockEvents(Observer):
    """Observes a block manager, and delivers its events after each step.

    Events between steps (an abort, a failed step) are delivered with the next request or step; until then a consumer's
    index is stale, which costs a cache miss.
    """

    def __init__(self) -> None:
        self._events: list[BlockEvent] = []
        self._receivers: list[Receiver] = []

    @classmethod
    def follow(cls, manager: BlockManager, observers: Any, receive: Receiver) -> None:
        """Call `receive` with each batch of events of an engine that has not computed anything yet."""
        if manager.entries:
            raise RuntimeError(f"{len(manager.entries)} blocks are findable already; follow a new engine.")
        events = manager.observer
        if not isinstance(events, cls):
            events = manager.observer = cls()
            if isinstance(manager, CacheGroups):
                manager.state_observer = StateEvents(events)
            observers.append(events)
        events._receivers.append(receive)

    def findable(self, entry: PrefixEntry, parent_hash: bytes | None) -> None:
        salt = entry.parent if isinstance(entry.parent, str) else ""
        self.add(Findable(entry.block_hash, parent_hash, entry.tokens, salt))

    def forgotten(self, block_hash: bytes) -> None:
        self.add(Forgotten(block_hash))

    def add(self, event: BlockEvent) -> None:
        self._events.append(event)

    def all_forgotten(self) -> None:
        self._events = [AllForgotten()]  # supersedes earlier events
        self.flush()  # an idle engine may not step for long

    def request_added(self, sequences: list[Sequence]) -> None:
        self.flush()

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        self.flush()

    def flush(self) -> None:
        """Deliver the events so far; a receiver that raises is logged and dropped."""
        if not self._events:
            return
        events = self._events
        self._events = []
        for receive in tuple(self._receivers):
            try:
                receive(events)
            except Exception:
                self._receivers.remove(receive)
                logger.exception("%s raised on block events; it is not called again", receive)

    def __str__(self) -> str:
        return "block events"


class StateEvents:
    """Adds the events of recurrent states to those of blocks."""

    def __init__(self, events: BlockEvents) -> None:
        self._events = events

    def findable(self, entry: PrefixEntry, parent_hash: bytes | None) -> None:
        salt = entry.parent if isinstance(entry.parent, str) else ""
        self._events.add(Findable(entry.block_hash, parent_hash, entry.tokens, salt, of_states=True))

    def forgotten(self, block_hash: bytes) -> None:
        self._events.add(Forgotten(block_hash, of_states=True))

    def all_forgotten(self) -> None:
        """No event: the blocks' events say so."""
