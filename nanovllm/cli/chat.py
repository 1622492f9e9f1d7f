"""The command `nanovllm chat`: a conversation with the model, at a terminal or from a pipe."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.cli.chat_answers import Answers
from nanovllm.cli.conversation import QUOTES, ChatEnded, Conversation
from nanovllm.cli.display import print_notice
from nanovllm.cli.early_checks import check_start
from nanovllm.cli.errors import in_words
from nanovllm.cli.flags import add_model_argument, add_model_flags, engine_options, take_model_argument
from nanovllm.cli.sampling_flags import (
    adapter_name,
    add_sampling_flags,
    add_timeout_flag,
    load_llm,
    sampling_options,
)
from nanovllm.cli.standard_input import standard_input_lines
from nanovllm.fast.host.paths import cache_root
from nanovllm.features.extras import check_extra
from nanovllm.models.default_model import DEFAULT_MODEL, ensure_default_model

if TYPE_CHECKING:
    from nanovllm.cli.terminal import Terminal
    from nanovllm.serving.llm import LLM

LAST_CONVERSATION = "last_conversation.json"
# A conversation has one answer a turn and prints no numbers.
NOT_FOR_CHAT = {"n", "logprobs", "prompt_logprobs"}
DESCRIPTION = """
Talk to the model. At a terminal the prompt is there while the model is loaded, answers are drawn as Markdown unless
NO_COLOR is set, and /help lists the commands: /continue, /retry, /image, /system, /set, /show, /model, /copy, /save,
/load, /reset, /clear, /exit. From a pipe each line is a message.
"""


def add_chat_command(commands: Any) -> None:
    """Register the subcommand."""
    chat = commands.add_parser(
        "chat", help="talk to the model", description=DESCRIPTION, allow_abbrev=False,
        usage="nanovllm chat [options] [MODEL]",
    )  # fmt: skip
    add_model_argument(chat)
    chat.add_argument("--system", metavar="TEXT", help="system prompt")
    chat.add_argument(
        "--history", action=argparse.BooleanOptionalAction, default=True,
        help="keep what is typed at a terminal, for the arrow keys and Ctrl-R of later conversations, and the last "
        "conversation, for --resume",
    )  # fmt: skip
    chat.add_argument("--resume", action="store_true", help="go on with the last conversation that was at a terminal")
    chat.set_defaults(run=_chat)
    add_timeout_flag(chat)
    add_sampling_flags(chat, leave_out=NOT_FOR_CHAT)
    add_model_flags(chat)


def _chat(options: argparse.Namespace) -> int:
    take_model_argument(options)
    adapter_name(options)
    conversation = Conversation(options.system, sampling_options(options), show=print_notice)
    is_at_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    if is_at_terminal:
        check_extra("nanovllm chat at a terminal", "cli", "prompt_toolkit", "rich", "markdown_it")
    if options.resume:
        _resume(conversation, options)
    check_start(options, engine_options(options))
    if is_at_terminal:
        return _talk_at_terminal(conversation, options)
    return _talk_in_pipe(conversation, options)


def _resume(conversation: Conversation, options: argparse.Namespace) -> None:
    """Load the last conversation; --system replaces its system prompt."""
    path = _last_conversation()
    if not path.exists():
        raise ValueError(
            f"there is no conversation to resume: {path} does not exist. Chats at a terminal write it, unless with "
            "--no-history; /load takes other files."
        )
    conversation.load(path)
    if options.system is not None:
        conversation.system = options.system


def _piped_messages() -> Iterator[str]:
    """Read messages from standard input: one per line, or several lines between quotes."""
    lines = standard_input_lines()
    for line in lines:
        if line.strip().startswith(QUOTES):
            while not (len(text := line.strip()) >= 6 and text.endswith(QUOTES)):
                more = next(lines, None)
                if more is None:
                    raise ValueError(f"standard input ends within {QUOTES}. Close the quotes.")
                line += more
        yield line.rstrip("\n")


class _Loading:
    """The model, loaded in a thread; a failure of the first load ends the prompt.

    Args:
        needs_template: refuse a model without a chat template before the first message.
        when_failed: callback for the error, in the thread that loads.
    """

    def __init__(
        self, options: argparse.Namespace, when_failed: Callable[[BaseException], None], *, needs_template: bool
    ) -> None:
        self._options = options
        self._when_failed = when_failed
        self._needs_template = needs_template
        self._started = time.monotonic()
        self._llm: Future[LLM] = Future()

    def start(self) -> None:
        threading.Thread(target=self.load, daemon=True).start()

    def load(self) -> None:
        """Load in this thread; `wait` raises its error."""
        try:
            self._llm.set_result(self._open(self._options))
        except BaseException as error:
            self._llm.set_exception(error)
            self._when_failed(error)

    def _open(self, options: argparse.Namespace) -> LLM:
        llm = load_llm(options)
        if self._needs_template:
            try:
                llm.apply_chat_template([{"role": "user", "content": "hello"}])
            except ValueError:
                llm.close()
                raise
        return llm

    def switch(self, options: argparse.Namespace) -> None:
        """Load another model; the first one is loaded again if that fails. Raises the error."""
        self.wait().close()  # memory may not hold both models
        self._llm, self._started = Future(), time.monotonic()
        try:
            self._llm.set_result(self._open(options))
            self._options = options
        except BaseException:
            self.load()
            raise

    def status(self) -> str | None:
        if self._llm.done():
            return None
        seconds = time.monotonic() - self._started
        return f"loading {os.path.basename(self._options.model.rstrip('/'))}, {seconds:.0f} s"

    def wait(self) -> LLM:
        return self._llm.result()

    @property
    def has_failed(self) -> bool:
        return self._llm.done() and self._llm.exception() is not None

    @property
    def is_done(self) -> bool:
        return self._llm.done()


def _add_model_command(
    conversation: Conversation, answers: Answers, options: argparse.Namespace, loading: _Loading
) -> None:
    """Add /model, which changes `options.model` once the new model is there."""

    def model(name: str) -> None:
        if not name:
            conversation.show(options.model)
            return
        wanted = argparse.Namespace(**vars(options) | {"model": name, "tokenizer": None, "adapter": []})
        check_start(wanted, engine_options(wanted))
        conversation.show(f"loading {name}")
        loading.switch(wanted)
        options.model = name
        options.tokenizer = None
        options.adapter = []
        answers.forget()

    conversation.further["model"] = model


def _talk_in_pipe(conversation: Conversation, options: argparse.Namespace) -> int:
    loading = _Loading(options, when_failed=lambda error: None, needs_template=False)
    loading.load()
    loading.wait()
    try:
        answers = Answers(conversation, options, loading.wait, is_terminal=False)
        _add_model_command(conversation, answers, options, loading)
        for line in _piped_messages():
            try:
                question = conversation.read(line)
            except ChatEnded:
                break
            if question is not None:
                answers.answer(question)
    finally:
        loading.wait().close()
    return 0


def _talk_at_terminal(conversation: Conversation, options: argparse.Namespace) -> int:
    from nanovllm.cli.terminal import Terminal, echo

    if options.model == DEFAULT_MODEL:
        ensure_default_model()  # its first download draws a progress bar
    if not options.verbose:  # log lines of the load would interrupt the conversation
        logging.getLogger("nanovllm").setLevel(logging.WARNING)
        logging.getLogger("nanovllm.progress").setLevel(logging.ERROR)
    loading = _Loading(options, when_failed=lambda error: terminal.leave(error), needs_template=True)
    terminal = Terminal(loading.status, keeps_history=options.history)
    # The import of torch holds the GIL for seconds: the prompt must be drawn before.
    terminal.call_when_shown(loading.start)
    conversation.confirm = terminal.confirm
    answers = Answers(conversation, options, loading.wait, is_terminal=True)
    _add_model_command(conversation, answers, options, loading)
    if options.resume:
        conversation.show(f"going on with {len(conversation.messages)} messages; /show tells more, /reset begins anew")
    try:
        while (line := _read_typed(terminal)) is not None:
            question = None
            try:
                with echo(is_on=False):
                    question = conversation.read(line)
                    if question is not None:
                        answers.answer(question)
                if options.history and conversation.messages:
                    with suppress(OSError):  # an unwritable folder disables --resume only
                        conversation.save(_last_conversation(), mode=0o600)
            except ChatEnded:
                break
            except (ValueError, RuntimeError, OSError) as error:  # such as too long a conversation: the user can /reset
                if loading.has_failed:
                    loading.wait()
                conversation.restore(question)
                print_notice(f"nanovllm: error: {in_words(error)}", sys.stderr)
            except KeyboardInterrupt:
                conversation.restore(question)
                print(flush=True)
    finally:
        if not loading.is_done:  # a load cannot be interrupted, so do not wait for it
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0 if sys.exception() is None else 130)
    loading.wait().close()
    return 0


def _read_typed(terminal: Terminal) -> str | None:
    """Read the next message or command; None to leave. Raises the error of a failed load."""
    while True:
        try:
            return terminal.read()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print_notice("Ctrl-D or /exit leaves; /help lists the commands")


def _last_conversation() -> Path:
    return cache_root() / LAST_CONVERSATION
