"""Retry-After of a full queue: estimates when a refused client should try again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

MIN_SECONDS = 1.0  # OpenAI's clients ignore longer ones
MAX_SECONDS = 60.0
WINDOW_SECONDS = 30.0


def estimated_wait(num_waiting: int, num_ended: int, seconds: float) -> float:
    """Estimate the seconds until all waiting samples run, within the bounds.

    Args:
        num_waiting: samples in the queue.
        num_ended: samples that ended within the last `seconds`; 0 counts as 1.
    """
    seconds_each = max(seconds, 1.0) / max(num_ended, 1)
    return min(max(num_waiting * seconds_each, MIN_SECONDS), MAX_SECONDS)


class RetryAfter:
    """Estimates from recently ended samples, and staggers clients that are refused together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_since = clock()
        self._ends: deque[tuple[float, int]] = deque()  # (time, samples) within the window
        self._last_retry = -math.inf  # retry time of the last refused client

    def record_busy(self) -> None:
        """Restart the estimate at the first request after idle time."""
        self._busy_since = self._clock()
        self._ends.clear()

    def record_ended(self, num_samples: int) -> None:
        """Record samples that ended now."""
        self._ends.append((self._clock(), num_samples))
        self._drop_old()

    def seconds(self, num_waiting: int) -> int:
        """Return the header's value for one more refused client."""
        now = self._clock()
        self._drop_old()
        recent = sum(num_samples for _, num_samples in self._ends), min(WINDOW_SECONDS, now - self._busy_since)
        retry = now + estimated_wait(num_waiting, *recent)
        seconds_each = max(recent[1], 1.0) / max(recent[0], 1)
        self._last_retry = min(max(retry, self._last_retry + seconds_each), now + MAX_SECONDS)
        return math.ceil(self._last_retry - now)

    def _drop_old(self) -> None:
        while self._ends and self._ends[0][0] < self._clock() - WINDOW_SECONDS:
            self._ends.popleft()
