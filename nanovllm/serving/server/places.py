"""Places of a server's connections: when all are taken, the connection that waited longest for its request yields.

::

    places     [answers][answers][sends a body][sends headers]     "sends a body" began first: it yields
    spare      [asks for /health][ ][ ]                            for new connections while all places have answers

Invariant: a connection waits from its first byte, or the end of its last answer, to the end of its request.
"""

from __future__ import annotations

from typing import Protocol

# Connections beyond the limit that are answered if they ask for /health, while every place has an answer.
SPARE_PLACES = 32


class Occupant(Protocol):
    """A connection with a place."""

    def yield_place(self) -> None:
        """Close the connection for another one; it leaves its place."""


class Places:
    """Places of one server.

    Args:
        limit: number of connections with any request.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: set[Occupant] = set()
        self._waiting: dict[Occupant, None] = {}  # connections with a place that wait for a request, the longest first
        self._spare: dict[Occupant, None] = {}  # connections beyond the limit, oldest first

    def enter(self, occupant: Occupant) -> None:
        """Give a new connection a place, if need be the longest-waiting connection's, or a spare one."""
        if self.take(occupant):
            return
        if len(self._spare) >= SPARE_PLACES:
            next(iter(self._spare)).yield_place()
        self._spare[occupant] = None

    def take(self, occupant: Occupant) -> bool:
        """Whether a connection has a place for any request, not a spare one; takes one that is free or yields."""
        if occupant in self._taken:
            return True
        if len(self._taken) >= self._limit and self._waiting:
            next(iter(self._waiting)).yield_place()
        if len(self._taken) >= self._limit:
            return False
        self._spare.pop(occupant, None)
        self._taken.add(occupant)
        self._waiting[occupant] = None
        return True

    def wait(self, occupant: Occupant) -> None:
        """The connection waits for a request from now on."""
        if occupant in self._taken:
            self._waiting.pop(occupant, None)
            self._waiting[occupant] = None

    def serve(self, occupant: Occupant) -> None:
        """The connection's request is complete."""
        self._waiting.pop(occupant, None)

    def leave(self, occupant: Occupant) -> None:
        """The connection is closed, or about to be; idempotent."""
        self._taken.discard(occupant)
        self._waiting.pop(occupant, None)
        self._spare.pop(occupant, None)
