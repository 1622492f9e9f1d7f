"""Prompt of `nanovllm chat` at a terminal: line editing, history, multi-line messages, progress of the load."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, get_app
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.patch_stdout import patch_stdout

from nanovllm.cli.conversation import QUOTES
from nanovllm.fast.host.paths import cache_root

HISTORY_FILE = "chat_history"
REFRESH_S = 0.25  # seconds between updates of the status


class Terminal:
    """Prompt that reads messages.

    Args:
        status: returns the text at the right of the prompt, or None.
        keeps_history: keep the history in a file that only this user may read.
    """

    def __init__(self, status: Callable[[], str | None], *, keeps_history: bool) -> None:
        self._status = status
        self._error: BaseException | None = None
        self._session: PromptSession[str] = PromptSession(
            history=_history() if keeps_history else InMemoryHistory(),
            key_bindings=_key_bindings(),
            rprompt=lambda: None if get_app().is_done else status(),  # a line that was sent keeps none
            prompt_continuation="  ",
            multiline=True,  # Enter still sends; see the bindings
            enable_open_in_editor=True,  # Ctrl-X Ctrl-E
        )

    def call_when_shown(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the first prompt has been drawn."""

        def call_once(_: Application[str]) -> None:
            self._session.app.after_render -= call_once
            callback()

        self._session.app.after_render += call_once

    def read(self) -> str:
        """Read the next message; raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C on an empty line."""
        while True:
            self._session.refresh_interval = 0.0 if self._status() is None else REFRESH_S
            try:
                with patch_stdout(raw=True):  # prints appear above the prompt
                    return self._session.prompt("> ", pre_run=self._check)
            except KeyboardInterrupt:
                if not self._session.default_buffer.text:
                    raise

    def confirm(self, question: str) -> bool:
        """Ask a question; anything but y or yes means no."""
        try:
            with echo(is_on=True):
                return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:
            return False

    def leave(self, error: BaseException) -> None:
        """Make the current and later `read` calls raise; any thread may call it."""
        self._error = error
        if (loop := self._session.app.loop) is not None:
            loop.call_soon_threadsafe(self._check)

    def _check(self) -> None:
        app = self._session.app
        if self._error is not None and app.future is not None and not app.future.done():
            app.exit(exception=self._error)


@contextmanager
def echo(*, is_on: bool) -> Iterator[None]:
    """Whether the terminal shows typed keys within the block.

    While an answer is drawn it must not: a ^C or an early key moves the cursor from where the next lines replace the
    last. Keys wait for the next prompt.
    """
    try:
        import termios  # not on Windows

        attributes = termios.tcgetattr(sys.stdin.fileno())
    except (ImportError, OSError, ValueError, termios.error):  # no terminal
        yield
        return
    changed = [*attributes]
    changed[3] = changed[3] | termios.ECHO if is_on else changed[3] & ~termios.ECHO
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, attributes)


def _history() -> History:
    path = Path(cache_root() / HISTORY_FILE)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:  # an unwritable folder loses the history only
        return InMemoryHistory()
    return FileHistory(str(path))


@Condition
def _is_open() -> bool:
    """Whether the text begins with unclosed quotes."""
    text = get_app().current_buffer.text.strip()
    return text.startswith(QUOTES) and not (len(text) >= 6 and text.endswith(QUOTES))


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter", filter=~_is_open)
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _break(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
