"""Weights, pauses and sleep of a pool: every replica obeys an order, and one that starts again catches up.

::

    update_weights ──▶ image ──▶ check_weights ──▶ every replica that is up ──▶ an error: nothing is changed
                         ╰─────▶ update_weights ─▶ every replica that is up ──▶ died: it starts again with all images

Invariant: a replica that is up has received the images, the pause and the sleep in force before any request.
"""

from __future__ import annotations

import itertools
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.features.updates.sleeping import check_level
from nanovllm.features.updates.updating import Weights
from nanovllm.serving.replicas.messages import FromEngine, Obeyed, Order, Ready
from nanovllm.serving.replicas.replica_queue import FleetInterface, ReplicaQueue
from nanovllm.serving.replicas.weight_images import Image, mapped

logger = logging.getLogger("nanovllm")

CATCH_UP = -1  # number of orders to a replica that starts again
MAX_IMAGES = 16  # images that are kept: each has a descriptor, and several become one


class PoolUpdates:
    """State that the replicas of a fleet share besides their options. Not thread-safe.

    Args:
        advance: function that waits for messages and passes each on to `handle`.

    images: weights that were updated, the oldest first, each name once; a replica that starts again reads them.
    level: level of the replicas' sleep; None while they are awake.
    version: label of the weights.
    """

    def __init__(self, fleet: FleetInterface, advance: Callable[[], None]) -> None:
        self.images: list[Image] = []
        self.is_paused = False
        self.level: int | None = None
        self.version: str | None = None
        self._fleet = fleet
        self._advance = advance
        self._numbers = itertools.count(1)
        self._number = 0  # number of the last order
        self._waiting: set[ReplicaQueue] = set()  # replicas that have received it, and have not answered
        self._answers: list[Obeyed] = []
        self._behind: Counter[ReplicaQueue] = Counter()  # orders of a replica that catches up

    def update_weights(self, weights: Weights, *, keep_kv: bool, version: str | None = None) -> None:
        """Update every replica, or none; raises the errors of one engine."""
        given = weights() if callable(weights) else weights
        image = Image(given.items() if isinstance(given, Mapping) else given)
        while not (answers := self._ask("check_weights", image=image.sent())):
            self._advance()  # no replica is up
        while self._behind.total():  # they read images that may be dropped now
            self._advance()
        self._keep(image, {name for answer in answers for name in answer.names})
        if self.level is not None:
            self.level = 1  # an update brings weights back
        self.version = version
        self._ask("update_weights", image=image.sent(), keep_kv=keep_kv, version=version)

    def pause_generation(self) -> None:
        self.is_paused = True
        self._ask("pause_generation")

    def resume_generation(self) -> None:
        if self.is_paused:
            self.is_paused = False
            self._ask("resume_generation")

    def sleep(self, level: int) -> None:
        check_level(level)
        before = self.level
        self.level = max(level, before or 0)
        try:
            self._ask("sleep", level=level)
        except Exception:
            if before is None:
                self.wake()
            raise

    def wake(self) -> None:
        """Wake every replica; if one cannot, such as for want of memory, all sleep on."""
        if (level := self.level) is None:
            return
        self.level = None
        try:
            self._ask("wake")
        except Exception:
            self.sleep(level)
            raise

    def handle(self, replica: ReplicaQueue, message: FromEngine | None) -> None:
        """Handle a message of a replica, None for its death."""
        if isinstance(message, Ready):
            orders = [
                Order(CATCH_UP, "update_weights", image=image.sent(), version=self.version) for image in self.images
            ]
            orders += [Order(CATCH_UP, "pause_generation")] if self.is_paused else []
            orders += [] if self.level is None else [Order(CATCH_UP, "sleep", self.level)]
            for order in orders:
                self._fleet.send(replica, order)
            self._behind[replica] = len(orders)
        elif isinstance(message, Obeyed):
            if message.number == CATCH_UP:
                self._behind[replica] -= 1
            if message.number == self._number:
                self._waiting.discard(replica)
                self._answers.append(message)
            elif message.error is not None:
                logger.error("replica %d is not as the others are: %s", replica.index, pickle.loads(message.error))
        elif message is None:
            self._waiting.discard(replica)
            del self._behind[replica]

    def _ask(self, call: str, **options: Any) -> list[Obeyed]:
        """Have every replica that is up obey; returns the answers of the living, and raises the first error."""
        order = Order(next(self._numbers), call, **options)
        self._number = order.number
        self._answers = []
        self._waiting = {*self._fleet.up}
        for replica in self._fleet.up:
            self._fleet.send(replica, order)
        while self._waiting:
            self._advance()
        for answer in self._answers:
            if answer.error is not None:
                raise pickle.loads(answer.error)
        return self._answers

    def _keep(self, image: Image, aliases: set[str]) -> None:
        """Keep an image for replicas that start again; tensors that it replaces are dropped."""
        names = {tensor.name for tensor in image.tensors} | aliases
        kept = [old.without(names) for old in self.images]
        self.images = [*(old for old in kept if old.tensors), image]
        if len(self.images) > MAX_IMAGES:
            self.images = [Image(named for each in self.images for named in mapped(each.sent()))]
