"""When a client that was refused for a full queue should come again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

MIN_SECONDS, MAX_SECONDS = 1.0, 60.0  # OpenAI's clients follow no longer one
WINDOW_SECONDS = 30.0


def estimated_wait(num_waiting: int, num_ended: int, seconds: float) -> float:
    """Seconds until all that wait have begun, within the bounds.

    Args:
        num_waiting: samples in the queue.
        num_ended: samples that ended within the last `seconds`; of none the first may end any moment.
    """
    seconds_each = max(seconds, 1.0) / max(num_ended, 1)
    return min(max(num_waiting * seconds_each, MIN_SECONDS), MAX_SECONDS)


class RetryAfter:
    """Estimates from what ended lately, and spreads those who are refused together: each waits for its own place."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_since = clock()
        self._ends: deque[tuple[float, int]] = deque()  # within the window: time, samples
        self._last_place = -math.inf  # of the client that was refused last

    def note_busy(self) -> None:
        """The first request after none: what ended before, and the time without any, tell nothing."""
        self._busy_since = self._clock()
        self._ends.clear()

    def note_ended(self, num_samples: int) -> None:
        self._ends.append((self._clock(), num_samples))
        self._drop_old()

    def seconds(self, num_waiting: int) -> int:
        """The header's value for one more client."""
        now = self._clock()
        self._drop_old()
        recent = sum(num_samples for _, num_samples in self._ends), min(WINDOW_SECONDS, now - self._busy_since)
        place = now + estimated_wait(num_waiting, *recent)
        seconds_each = max(recent[1], 1.0) / max(recent[0], 1)
        self._last_place = min(max(place, self._last_place + seconds_each), now + MAX_SECONDS)
        return math.ceil(self._last_place - now)

    def _drop_old(self) -> None:
        while self._ends and self._ends[0][0] < self._clock() - WINDOW_SECONDS:
            self._ends.popleft()
