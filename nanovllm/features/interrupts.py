"""Defers Ctrl-C during a call while an engine's state changes, and raises it between two changes.

Python raises KeyboardInterrupt in the main thread, between any two instructions. An interrupted change of state would
leave blocks without an owner, so the first SIGINT waits until the change is complete. Within a step a second one raises
at once, in case the step hangs; elsewhere it could leave a lock acquired, and waits too.
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
    """Context manager that records the first SIGINT; `pass_on` or the exit calls the previous handler.

    It does nothing outside of the main thread, or if SIGINT has no Python handler. It can be reused after its exit.
    """

    noted: tuple[int, FrameType | None] | None = None  # arguments for the handler
    is_in_step = False  # a second SIGINT then raises at once
    _handler: Callable[[int, FrameType | None], Any] | None = None  # the previous one
    _lets_through = False
    _holder: ClassVar[InterruptsHeld | None] = None  # innermost one of the main thread

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
        # While the handler is None, a second SIGINT is recorded too: raised here, it would leave `_note` installed.
        handler = self._handler
        self._handler = None
        if handler is not None:
            InterruptsHeld._holder = self._outer
            signal.signal(signal.SIGINT, handler)
            if self.noted:
                noted = self.noted
                self.noted = None
                handler(*noted)

    def pass_on(self) -> None:
        """Call the previous handler, which usually raises KeyboardInterrupt, if a SIGINT was recorded."""
        if self.noted is not None and self._handler is not None:
            noted = self.noted
            self.noted = None
            self._handler(*noted)

    def held_in(self, items: Generator[T]) -> Iterator[T]:
        """Iterate over the items; the first SIGINT is deferred while the generator runs, not while items are used."""
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
    """Let Ctrl-C raise at once, in work of seconds that changes no state, such as a graph capture."""
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
    """Let Ctrl-C end a part of a change that may hang, and raise it after the change."""
    try:
        yield
    except KeyboardInterrupt:
        holder = InterruptsHeld._holder if threading.current_thread() is threading.main_thread() else None
        if holder is None:
            raise
        holder.noted = holder.noted or (signal.SIGINT, None)
