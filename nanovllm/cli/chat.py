"""The command `nanovllm chat`: a conversation with the model, at a terminal or from a pipe."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import TYPE_CHECKING, Any

from nanovllm.cli.conversation import QUOTES, ChatEnded, Conversation
from nanovllm.cli.early_checks import check_start
from nanovllm.cli.errors import in_words
from nanovllm.cli.flags import add_model_argument, add_model_flags, engine_options, take_model_argument
from nanovllm.cli.sampling_flags import (
    add_sampling_flags,
    add_timeout_flag,
    load_llm,
    sampling_options,
    sampling_params,
)
from nanovllm.cli.standard_input import standard_input_lines
from nanovllm.model.default_model import DEFAULT_MODEL, ensure_default_model

if TYPE_CHECKING:
    from nanovllm.cli.terminal import Terminal
    from nanovllm.llm import LLM

# A conversation has one answer a turn and prints no numbers.
NOT_FOR_CHAT = {"n", "logprobs", "prompt_logprobs"}
DESCRIPTION = """
Talk to the model. At a terminal the prompt is there while the model is loaded, and /help lists the commands: /system,
/set, /retry, /save, /reset, /exit. From a pipe each line is a message.
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
        help="keep the messages typed at a terminal, for the arrow keys and Ctrl-R of later conversations",
    )  # fmt: skip
    chat.set_defaults(run=_chat)
    add_timeout_flag(chat)
    add_sampling_flags(chat, leave_out=NOT_FOR_CHAT)
    add_model_flags(chat)


def _chat(options: argparse.Namespace) -> int:
    take_model_argument(options)
    conversation = Conversation(options.system, sampling_options(options), show=_show)
    check_start(options, engine_options(options))
    if sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty():
        return _talk_at_terminal(conversation, options)
    with load_llm(options) as llm:
        for line in _piped_messages():
            try:
                question = conversation.read(line)
            except ChatEnded:
                break
            if question is not None:
                _answer(llm, conversation, question, options.timeout)
    return 0


def _show(text: str) -> None:
    print(text, flush=True)


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
    """Loads the model in a thread, once the prompt is drawn; a failure ends the prompt."""

    def __init__(self, options: argparse.Namespace) -> None:
        from nanovllm.cli.terminal import Terminal

        self._model, self._started = options.model, time.monotonic()
        self._llm: Future[LLM] = Future()
        self.terminal = Terminal(self.status, keeps_history=options.history)
        # The import of torch holds the GIL for seconds: the prompt must be drawn before.
        self.terminal.call_when_shown(threading.Thread(target=self._load, args=(options,), daemon=True).start)

    def _load(self, options: argparse.Namespace) -> None:
        try:
            llm = load_llm(options)
            llm.apply_chat_template([{"role": "user", "content": "hello"}])  # raises if the model has no chat template
            self._llm.set_result(llm)
        except BaseException as error:
            self._llm.set_exception(error)
            self.terminal.leave(error)

    def status(self) -> str | None:
        if self._llm.done():
            return None
        seconds = time.monotonic() - self._started
        return f"loading {os.path.basename(self._model.rstrip('/'))}, {seconds:.0f} s"

    def wait(self) -> LLM:
        return self._llm.result()

    @property
    def has_failed(self) -> bool:
        return self._llm.done() and self._llm.exception() is not None

    @property
    def is_done(self) -> bool:
        return self._llm.done()


def _talk_at_terminal(conversation: Conversation, options: argparse.Namespace) -> int:
    if options.model == DEFAULT_MODEL:
        ensure_default_model()  # its first download draws a progress bar
    if not options.verbose:  # log lines of the load would interrupt the conversation
        logging.getLogger("nanovllm").setLevel(logging.WARNING)
        logging.getLogger("nanovllm.progress").setLevel(logging.ERROR)
    loading = _Loading(options)
    terminal = loading.terminal
    try:
        while (line := _read_typed(terminal)) is not None:
            try:
                question = conversation.read(line)
                if question is not None:
                    _answer(loading.wait(), conversation, question, options.timeout, is_terminal=True)
            except ChatEnded:
                break
            except (ValueError, RuntimeError, OSError) as error:  # such as too long a conversation: the user can /reset
                if loading.has_failed:
                    loading.wait()
                conversation.restore()
                print(f"nanovllm: error: {in_words(error)}", file=sys.stderr)
            except KeyboardInterrupt:
                conversation.restore()
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
            print("Ctrl-D or /exit leaves; /help lists the commands")


def _answer(
    llm: LLM, conversation: Conversation, question: str, timeout: float | None, *, is_terminal: bool = False
) -> None:
    """Print the answer while it streams, and record it; an interrupt ends it and keeps the text so far."""
    params = sampling_params(conversation.sampling, llm)
    prompt = llm.apply_chat_template(conversation.with_question(question))[0]
    shown, is_cut = "", False
    with closing(llm.stream(prompt, params, timeout=timeout)) as stream:  # type: ignore[type-var]
        try:
            for output in stream:
                if output.error:
                    raise RuntimeError(output.error)
                completion = output.outputs[0]
                print(completion.text[len(shown) :], end="", flush=True)
                shown, is_cut = completion.text, completion.finish_reason == "length"
        except KeyboardInterrupt:
            pass
        finally:
            print(flush=True)
    if is_cut and is_terminal:
        print(f"[cut at {params.max_tokens} tokens: /set max_tokens 1000, then /retry]", file=sys.stderr)
    conversation.record(question, shown)
