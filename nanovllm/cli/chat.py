"""The command `nanovllm chat`: a conversation with the model on a terminal."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from nanovllm.cli.flags import add_model_flags
from nanovllm.cli.sampling_flags import add_sampling_flags, add_timeout_flag, load_llm, sampling_options
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

# A conversation has one answer a turn and prints no numbers.
NOT_FOR_CHAT = {"n", "logprobs", "prompt_logprobs"}


def add_chat_command(commands: Any) -> None:
    """Register the subcommand."""
    chat = commands.add_parser(
        "chat", help="talk to the model",
        description="Talk to the model. /reset starts a new conversation, /exit ends the command.", allow_abbrev=False,
    )  # fmt: skip
    chat.add_argument("--system", metavar="TEXT", help="system prompt")
    chat.set_defaults(run=_chat)
    add_timeout_flag(chat)
    add_sampling_flags(chat, leave_out=NOT_FOR_CHAT)
    add_model_flags(chat)


def _chat(options: argparse.Namespace) -> int:
    params = SamplingParams(**sampling_options(options))
    beginning = [{"role": "system", "content": options.system}] if options.system else []
    with load_llm(options) as llm:
        conversation = list(beginning)
        while (line := _read_line()) is not None:
            if line.strip() == "/exit":
                break
            if line.strip() == "/reset":
                conversation = list(beginning)
            elif line.strip():
                question = {"role": "user", "content": line}
                try:
                    answer = _answer(llm, [*conversation, question], params, options.timeout)
                except ValueError as error:  # such as too long a conversation; on a terminal the user can /reset
                    if not sys.stdin.isatty():
                        raise
                    print(f"nanovllm: error: {error}", file=sys.stderr)
                else:
                    conversation += [question, {"role": "assistant", "content": answer}]
    return 0


def _read_line() -> str | None:
    try:
        if sys.stdin.isatty():
            return input("> ")
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    except EOFError:
        return None


def _answer(llm: LLM, conversation: list[dict[str, str]], params: SamplingParams, timeout: float | None) -> str:
    """Print the answer while it streams; an interrupt ends it and keeps the text so far."""
    shown = ""
    stream = llm.stream(llm.apply_chat_template(conversation)[0], params, timeout=timeout)
    try:
        for output in stream:
            if output.error:
                raise RuntimeError(output.error)
            text = output.outputs[0].text
            print(text[len(shown) :], end="", flush=True)
            shown = text
    except KeyboardInterrupt:
        pass
    finally:
        stream.close()  # type: ignore[attr-defined]
        print(flush=True)
    return shown
