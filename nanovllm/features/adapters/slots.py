"""Slots of adapters, as many as a step may have, and the admission of requests that need one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from nanovllm.features.adapters.loading import Adapter
from nanovllm.features.adapters.salts import adapter_of
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence

MAX_REFUSALS = 64  # steps in which an adapter lacks a slot, before the least recently used one takes no more requests


class AdapterSlots:
    """A `Budget` in front of another: a request starts once its adapter has a slot.

    A slot is free if no running sequence uses it; of free ones the least recently used is given away. An adapter that
    has waited for long makes one slot run empty, so that requests of others do not pass it for ever.

    Args:
        put: function that writes an adapter into a slot of the device.

    Attributes:
        reserve: function that makes room for an adapter on the device; it may raise torch.OutOfMemoryError, which
            within admission would end the engine.
    """

    def __init__(self, scheduler: Scheduler, num_slots: int, put: Callable[[int, Adapter], None]) -> None:
        self._scheduler = scheduler
        self._inner: Any = scheduler.budget
        self._put = put
        self.reserve: Callable[[Adapter], None] = lambda _: None
        self._digests: list[str | None] = [None] * num_slots
        self._last_steps = [-1] * num_slots  # the last step in which a request was admitted to each slot
        self._refusals: Counter[str] = Counter()  # digest of an adapter without a slot -> steps that it has waited
        self._refused_in_step = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def slot_of(self, adapter: Adapter) -> int:
        """The slot of an adapter with a running request."""
        return self._digests.index(adapter.digest)

    def has_time(self, sequence: Sequence) -> bool:
        """See `Budget`; False also for a sequence without a slot for its adapter."""
        adapter = adapter_of(sequence.cache_salt)
        if adapter is not None and not self._has_slot(adapter):
            return False
        return bool(self._inner.has_time(sequence))

    def _has_slot(self, adapter: Adapter) -> bool:
        """Whether the adapter has a slot in the step being scheduled; a free one is taken for it."""
        step = self._scheduler.stats.num_steps
        if adapter.digest in self._digests:
            slot = self._digests.index(adapter.digest)
            if self._is_draining(slot):
                return False
        else:
            running = self._digests_of(self._scheduler.running)
            free = [
                number
                for number, digest in enumerate(self._digests)
                if digest not in running and (digest is None or self._last_steps[number] != step)
            ]
            if not free:
                self._refuse(adapter.digest, step)
                return False
            slot = min(free, key=self._last_steps.__getitem__)
            self._put(slot, adapter)
            self._digests[slot] = adapter.digest
        self._last_steps[slot] = step
        self._refusals.pop(adapter.digest, None)
        return True

    def _refuse(self, digest: str, step: int) -> None:
        """Count the first adapter in a step's order that finds no slot."""
        if self._refused_in_step == step:
            return
        self._refused_in_step = step
        self._refusals[digest] += 1

    def _is_draining(self, slot: int) -> bool:
        """Whether a slot takes no more requests until it is free, since another adapter has waited for long."""
        if not self._refusals or max(self._refusals.values()) < MAX_REFUSALS:
            return False
        if slot != min(range(len(self._digests)), key=self._last_steps.__getitem__):
            return False
        for gone in self._refusals.keys() - self._digests_of(self._scheduler.waiting):  # their requests have ended
            del self._refusals[gone]
        is_in_use = self._digests[slot] in self._digests_of(self._scheduler.running)
        return is_in_use and max(self._refusals.values(), default=0) >= MAX_REFUSALS

    @staticmethod
    def _digests_of(sequences: Iterable[Sequence]) -> set[str]:
        return {adapter.digest for each in sequences if (adapter := adapter_of(each.cache_salt)) is not None}
