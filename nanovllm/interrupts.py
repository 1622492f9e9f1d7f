"""Ctrl-C during a call: held back while an engine's books change, raised between two changes.

Python raises KeyboardInterrupt in the main thread, between any two instructions. A change of the books that it cuts
short would leave blocks without an owner, so the first SIGINT waits until the change is whole. A second one raises at
once, for a user whose step hangs.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar


class InterruptsHeld:
    """Within it the first SIGINT is noted; `check` or the end passes it to the handler that was there before.

    It does nothing in other threads than the main one, or where SIGINT has no handler of Python's. It may be entered
    again after its end.
    """

    _holder: ClassVar[InterruptsHeld | None] = None  # of the main thread, the innermost

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None  # that was there before
        self._noted: tuple[int, FrameType | None] | None = None
        self._lets_through = False

    def __enter__(self) -> InterruptsHeld:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler, self._outer = handler, InterruptsHeld._holder
                InterruptsHeld._holder = self
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
            InterruptsHeld._holder = self._outer
            if self._noted is not None:
                noted, self._noted = self._noted, None
                handler(*noted)

    def check(self) -> None:
        """Raise KeyboardInterrupt, or do what else the handler before does, if a SIGINT came."""
        if self._noted is not None and self._handler is not None:
            noted, self._noted = self._noted, None
            self._handler(*noted)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        is_second = self._noted is not None
        self._noted = (signum, frame)
        if is_second or self._lets_through:
            self.check()


@contextmanager
def interrupts_let_through() -> Iterator[None]:
    """Around work of seconds that changes no books, such as a graph capture: Ctrl-C raises at once."""
    holder = InterruptsHeld._holder if threading.current_thread() is threading.main_thread() else None
    if holder is None:
        yield
        return
    holder.check()
    holder._lets_through = True
    try:
        yield
    finally:
        holder._lets_through = False
