"""One conversation of `nanovllm chat`: messages, sampling options, and the /commands that change them."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.cli.units import whole_number
from nanovllm.features.option_checks import utf8
from nanovllm.features.sampling_params import SamplingParams

HELP = '''\
/continue          go on with an answer that a limit or Ctrl-C cut
/retry             answer the last message again
/image FILE        a picture before the next message; may be given again, /image - takes them back
/system TEXT       the system prompt, from the next answer on; without TEXT shows it, /system - removes it
/set NAME VALUE    a sampling option, such as /set temperature 0.7; /set NAME - takes its default, /set shows all
/show              the model, its context, the options and the messages
/model NAME        another model for the same conversation
/copy              copy the last answer to the clipboard
/save FILE         write the conversation as JSON
/load FILE         go on with a conversation that /save wrote
/reset             begin a new conversation
/clear             the same, on an empty screen
/exit              leave (also Ctrl-D)
Alt-Enter, or """ before and after the message, breaks a line. Ctrl-C ends an answer and keeps its text so far.
A message that begins with / has a space before it.'''
QUOTES = '"""'
NOT_TO_SET = {  # several answers, log-probabilities, and options of more than one word
    "n", "logprobs", "prompt_logprobs", "prompt_logprobs_start", "structured_output", "logits_processors", "logit_bias",
}  # fmt: skip
TRUTHS = {"true": True, "on": True, "false": False, "off": False}
TURNS = ("user", "assistant")
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
        confirm: asks the user a yes-or-no question; None without a terminal.

    further: callback of each command by its name, called with its arguments; the chat adds commands that need a model.
    """

    system: str | None
    sampling: dict[str, Any]
    show: Callable[[str], None]
    confirm: Callable[[str], bool] | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # files of pictures of the next message
    further: dict[str, Callable[[str], None]] = field(default_factory=dict)
    given: dict[str, Any] = field(init=False)  # the options at the start
    _replaced: list[dict[str, Any]] = field(init=False, default_factory=list)  # last exchange, during a /retry
    _failed: str | None = field(init=False, default=None)  # the last message, if it has no answer

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
        name = match[1]
        rest = (match[2] or "").strip()
        if name in ("exit", "quit", "bye"):
            raise ChatEnded
        if name == "retry":
            return self._retry()
        commands = {
            "help": self._help, "image": self._image, "system": self._system, "set": self._set, "save": self._save,
            "load": self._load, "reset": self.reset,
        } | self.further  # fmt: skip
        if name not in commands:
            near = difflib.get_close_matches(name, [*commands, "retry", "exit"], n=1)
            hint = f"; did you mean /{near[0]}?" if near else "."
            raise ValueError(f"there is no command /{name}{hint} /help lists them; a space before it makes it text.")
        commands[name](rest)
        return None

    def with_question(self, question: str) -> list[dict[str, Any]]:
        """Return the messages for the chat template."""
        asked = {"role": "user", "content": question, "images": self.images}
        return [_with_pictures(message) for message in (*self._stored(), asked)]

    def _stored(self) -> list[dict[str, Any]]:
        """The messages as a file has them: a text and files of pictures each."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def restore(self, question: str | None = None) -> None:
        """Restore the exchange that a failed /retry removed; /retry then asks `question`, which has no answer."""
        if not self._replaced and question is not None:
            self._failed = question
        self.messages += self._replaced
        self._replaced = []

    def record(self, question: str, answer: str) -> bool:
        """Add an exchange; returns whether a /retry gave the same answer again."""
        is_same = bool(self._replaced) and self._replaced[1]["content"] == answer
        self._replaced = []
        self._failed = None
        pictures = {"images": self.images} if self.images else {}
        self.images = []
        asked = {"role": "user", "content": question} | pictures
        self.messages += [asked, {"role": "assistant", "content": answer}]
        return is_same

    def load(self, path: Path) -> None:
        """Replace messages and system prompt by those of a file.

        Raises OSError, and ValueError for a file of another form.
        """
        try:
            messages = json.loads(utf8(str(path), path.read_bytes()))["messages"]
            roles, texts = zip(*((message["role"], message["content"]) for message in messages), strict=True)
        except (ValueError, KeyError, TypeError):
            raise ValueError(f'{path} holds no conversation, {{"messages": [...]}} as /save writes it.') from None
        num_system = int(roles[0] == "system")
        turns = roles[num_system:]
        if len(turns) % 2 or turns != TURNS * (len(turns) // 2) or not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"{path} holds messages of {', '.join(map(str, roles[:8]))}; a conversation is texts of user and "
                "assistant in turn, after an optional one of system."
            )
        self.reset()
        self.system = texts[0] if num_system else None
        self.messages = [
            {key: message[key] for key in ("role", "content", "images") if key in message}
            for message in messages[num_system:]
        ]

    def save(self, path: Path, mode: int = 0o666) -> int:
        """Write the conversation to a file; returns the number of messages."""
        messages = self._stored()
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False, indent=1) + "\n")
        return len(messages)

    # ------------------------------------------------------------------------------------------------------ commands

    def reset(self, _: str = "") -> None:
        self.messages.clear()
        self.images = []
        self._failed = None

    def _help(self, _: str) -> None:
        self.show(HELP)

    def _image(self, file: str) -> None:
        if file == "-":
            self.images = []
            return
        path = str(Path(file).expanduser())
        if not os.path.isfile(path):
            raise ValueError(f"/image needs the file of a picture, such as /image cat.png, not {file!r}.")
        self.images = [*self.images, path]
        self.show(f"pictures of the next message: {', '.join(self.images)}")

    def _system(self, text: str) -> None:
        if not text:
            self.show("there is no system prompt" if self.system is None else self.system)
            return
        self.system = None if text == "-" else text

    def _retry(self) -> str:
        if self._failed is not None:
            return self._failed
        if not self.messages:
            raise ValueError("there is no message to answer again.")
        self._replaced = self.messages[-2:]
        del self.messages[-2:]
        self.images = self._replaced[0].get("images", [])
        return str(self._replaced[0]["content"])

    def _load(self, file: str) -> None:
        if not file:
            raise ValueError("/load needs a file that /save wrote, such as /load talk.json.")
        path = Path(file).expanduser()
        self.load(path)
        self.show(f"{len(self.messages)} messages are loaded from {path}")

    def _save(self, file: str) -> None:
        if not file:
            raise ValueError("/save needs a file, such as /save talk.json.")
        path = Path(file).expanduser()
        if path.exists():
            if self.confirm is None:
                raise ValueError(f"{path} exists, and /save overwrites no file from a pipe. Name another file.")
            if not self.confirm(f"{path} exists. Overwrite it?"):
                self.show("nothing is written")
                return
        self.show(f"{self.save(path)} messages are in {path}")

    def _set(self, rest: str) -> None:
        if not rest:
            shown = [f"{name} {value}" for name, value in self.sampling.items()]
            self.show("\n".join(shown) or "all options are the model's own")
            return
        name, _, word = rest.partition(" ")
        name = name.replace("-", "_")
        word = word.strip()
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


def _with_pictures(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the chat template gets it: its pictures are parts before its text."""
    role, content, images = message["role"], message["content"], message.get("images")
    if images:
        content = [*({"type": "image", "image": path} for path in images), {"type": "text", "text": content}]
    return {"role": role, "content": content}


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
