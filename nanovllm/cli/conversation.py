"""One conversation of `nanovllm chat`: messages, sampling options, and the /commands that change them."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.cli.units import whole_number
from nanovllm.core.sampling_params import SamplingParams

HELP = '''\
/system TEXT       the system prompt, from the next answer on; without TEXT shows it, /system - removes it
/set NAME VALUE    a sampling option, such as /set temperature 0.7; /set NAME - takes its default, /set shows all
/retry             answer the last message again
/save FILE         write the conversation as JSON
/reset             begin a new conversation
/exit              leave (also Ctrl-D)
Alt-Enter, or """ before and after the message, breaks a line. Ctrl-C ends an answer and keeps its text so far.
A message that begins with / has a space before it.'''
QUOTES = '"""'
NOT_TO_SET = {  # several answers, log-probabilities, and options of more than one word
    "n", "logprobs", "prompt_logprobs", "prompt_logprobs_start", "structured_output", "logits_processors", "logit_bias",
}  # fmt: skip
TRUTHS = {"true": True, "on": True, "false": False, "off": False}
_COMMAND = re.compile(r"/(\w+)(?:\s+(.*))?", re.DOTALL)


class ChatEnded(Exception):
    """The user asked to leave."""


@dataclass
class Conversation:
    """Messages and sampling options.

    Args:
        system: system prompt, or None.
        sampling: options of every answer, by their names in `SamplingParams`.
        show: prints a line for the user.
    """

    system: str | None
    sampling: dict[str, Any]
    show: Callable[[str], None]
    messages: list[dict[str, str]] = field(default_factory=list)
    given: dict[str, Any] = field(init=False)  # the options at the start
    _replaced: list[dict[str, str]] = field(init=False, default_factory=list)  # last exchange, during a /retry

    def __post_init__(self) -> None:
        self.given = dict(self.sampling)

    def read(self, line: str) -> str | None:
        """Return the message to answer; None for an empty line, and for a command, which it runs.

        Raises ChatEnded for /exit, ValueError for an unknown command or invalid arguments.
        """
        match = _COMMAND.fullmatch(line.rstrip())
        if match is None:
            text = line.strip()
            if len(text) >= 6 and text.startswith(QUOTES) and text.endswith(QUOTES):
                text = text[3:-3].strip("\n")
            else:
                text = line[1:] if line.startswith(" /") else line
            return text if text.strip() else None
        name, rest = match[1], (match[2] or "").strip()
        if name in ("exit", "quit", "bye"):
            raise ChatEnded
        if name == "retry":
            return self._retry()
        commands = {
            "help": self._help, "system": self._system, "set": self._set, "save": self._save, "reset": self._reset,
        }  # fmt: skip
        if name not in commands:
            near = difflib.get_close_matches(name, [*commands, "retry", "exit"], n=1)
            hint = f"; did you mean /{near[0]}?" if near else "."
            raise ValueError(f"there is no command /{name}{hint} /help lists them; a space before it makes it text.")
        commands[name](rest)
        return None

    def with_question(self, question: str) -> list[dict[str, str]]:
        """Return the messages for the chat template."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages, {"role": "user", "content": question}]

    def restore(self) -> None:
        """Restore the exchange that a failed /retry removed."""
        self.messages += self._replaced
        self._replaced = []

    def record(self, question: str, answer: str) -> None:
        self._replaced = []
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    # ------------------------------------------------------------------------------------------------------ commands

    def _help(self, _: str) -> None:
        self.show(HELP)

    def _system(self, text: str) -> None:
        if not text:
            self.show("there is no system prompt" if self.system is None else self.system)
            return
        self.system = None if text == "-" else text

    def _reset(self, _: str) -> None:
        self.messages.clear()

    def _retry(self) -> str:
        if not self.messages:
            raise ValueError("there is no message to answer again.")
        self._replaced = self.messages[-2:]
        del self.messages[-2:]
        return str(self._replaced[0]["content"])

    def _save(self, file: str) -> None:
        if not file:
            raise ValueError("/save needs a file, such as /save talk.json.")
        path = Path(file).expanduser()
        messages = self.with_question("")[:-1]
        path.write_text(json.dumps({"messages": messages}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        self.show(f"{len(messages)} messages are in {path}")

    def _set(self, rest: str) -> None:
        if not rest:
            shown = [f"{name} {value}" for name, value in self.sampling.items()]
            self.show("\n".join(shown) or "all options are the model's own")
            return
        name, _, word = rest.partition(" ")
        name, word = name.replace("-", "_"), word.strip()
        fields = {option.name: str(option.type) for option in dataclasses.fields(SamplingParams)}
        known = [option for option in fields if option not in NOT_TO_SET]
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"{name!r} is not an option of a conversation"
                + (f"; did you mean {near[0]}?" if near else f"; these are: {', '.join(known)}.")
            )
        if not word:
            raise ValueError(f"/set {name} needs a value, or - for its default.")
        options = {key: value for key, value in self.sampling.items() if key != name}
        if word == "-":
            options |= {name: self.given[name]} if name in self.given else {}
        else:
            options[name] = _value(name, word, fields[name])
        SamplingParams(**options)
        self.sampling = options


def _value(name: str, word: str, kind: str) -> Any:
    """Convert a word to the type of its option; raises ValueError."""
    if kind.startswith("bool"):
        if word.lower() not in TRUTHS:
            raise ValueError(f"{name} is {word!r}; it must be one of {', '.join(TRUTHS)}.")
        return TRUTHS[word.lower()]
    if kind.startswith("int"):
        return whole_number(word)
    if kind.startswith("float"):
        try:
            return float(word)
        except ValueError:
            raise ValueError(f"{name} is {word!r}; it must be a number.") from None
    return [int(item) for item in word.split()] if "int" in kind else [word]
