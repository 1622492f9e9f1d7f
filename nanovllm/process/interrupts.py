"""Ctrl-C during a call: held back while an engine's books change, raised between two changes.

Python raises KeyboardInterrupt in the main thread, between any two instructions. A change of the books that it cuts
short would leave blocks without an owner, so the first SIGINT waits until the change is whole. A second one within a
step raises at once, for a user whose step hangs; elsewhere it could leave a lock taken, and waits too.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


class InterruptsHeld:
    """Within it the first SIGINT is noted; `pass_on` or the end passes it to the handler that was there before.

    It does nothing in other threads than the main one, or where SIGINT has no Python handler. It may be entered again
    after its end.
    """

    noted: tuple[int, FrameType | None] | None = None  # arguments for the handler
    is_in_step = False  # where a second SIGINT raises at once
    _handler: Callable[[int, FrameType | None], Any] | None = None  # that was there before
    _lets_through = False
    _holder: ClassVar[InterruptsHeld | None] = None  # of the main thread, the innermost

    def __enter__(self) -> InterruptsHeld:
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGINT) if is_main else None
        self._handler = handler if callable(handler) else None
        if self._handler is not None:
            self._outer = InterruptsHeld._holder
            signal.signal(signal.SIGINT, self._note)
            InterruptsHeld._holder = self
        return self

    def __exit__(self, *_: object) -> None:
        # Without a handler a second SIGINT is noted too: raised here, it would leave `_note` installed for ever.
        handler, self._handler = self._handler, None
        if handler is not None:
            InterruptsHeld._holder = self._outer
            signal.signal(signal.SIGINT, handler)
            if self.noted:
                noted, self.noted = self.noted, None
                handler(*noted)

    def pass_on(self) -> None:
        """Raise KeyboardInterrupt, or do what else the handler before does, if a SIGINT was noted."""
        if self.noted is not None and self._handler is not None:
            noted, self.noted = self.noted, None
            self._handler(*noted)

    def held_in(self, items: Generator[T]) -> Iterator[T]:
        """The same items; the first SIGINT is held back while the generator runs, but not while its items are read."""
        try:
            while True:
                with self:
                    item = next(items, None)
                if item is None:
                    return
                yield item
        finally:
            with self:
                items.close()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        is_second = self.noted is not None
        self.noted = (signum, frame)
        if self._lets_through or (is_second and self.is_in_step):
            self.pass_on()


@contextmanager
def interrupts_let_through() -> Iterator[None]:
    """Around work of seconds that changes no books, such as a graph capture: Ctrl-C raises at once."""
    holder = InterruptsHeld._holder if threading.current_thread() is threading.main_thread() else None
    if holder is None:
        yield
        return
    holder.pass_on()
    holder._lets_through = True
    try:
        yield
    finally:
        holder._lets_through = False


@contextmanager
def interrupts_put_off() -> Iterator[None]:
    """Around a part of a change that may hang: Ctrl-C ends it, and is raised once the change is whole."""
    try:
        yield
    except KeyboardInterrupt:
        holder = InterruptsHeld._holder if threading.current_thread() is threading.main_thread() else None
        if holder is None:
            raise
        holder.noted = holder.noted or (signal.SIGINT, None)
