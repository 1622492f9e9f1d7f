"""Prompts of `nanovllm generate`: from arguments, standard input or a file, checked, with options per request."""

from __future__ import annotations

import dataclasses
import json
import select
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.cli.standard_input import read_standard_input
from nanovllm.config import text
from nanovllm.features.option_checks import utf8
from nanovllm.features.sampling_params import SamplingParams

PATIENCE_S = 2.0  # seconds of silent standard input before a notice
NAMES = ("id", "custom_id")  # fields of a request that its answer repeats
OPTIONS = {field.name for field in dataclasses.fields(SamplingParams)} | {"priority", "timeout"}


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: text, token ids or messages, with its options, and the `names` that its answer repeats."""

    prompt: Any
    options: dict[str, Any] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)

    @property
    def is_conversation(self) -> bool:
        return isinstance(self.prompt, list) and bool(self.prompt) and isinstance(self.prompt[0], dict)


def read_requests(prompts: list[str], file: str | None, form: str | None) -> list[Request]:
    """Read the prompts.

    Args:
        prompts: positional arguments; the text of standard input is appended to each.
        file: file to read instead; "-" for standard input.
        form: "text" for one prompt, "lines", "jsonl", or None for the default: text for standard input, jsonl for
            files with that suffix, lines for other files.

    Raises ValueError for contradictory arguments, and with the line number for an invalid prompt.
    """
    if file not in (None, "-"):
        if prompts:
            raise ValueError("prompts are given as arguments and in --file; give one of the two.")
        path = Path(str(file)).expanduser()
        return _parse(utf8(str(path), path.read_bytes()), form or ("jsonl" if path.suffix == ".jsonl" else "lines"))
    if not prompts:
        return _parse(_read_standard_input(), form or "text")
    if form == "jsonl":
        raise ValueError("--format jsonl holds whole requests, but prompts are given as arguments. Leave one out.")
    given = _read_standard_input() if file == "-" or not _is_terminal() else ""
    if not given.strip():
        if form:
            raise ValueError(f"--format {form} is about standard input, which holds no text. Leave it out.")
        return [Request(_checked(prompt)) for prompt in prompts]
    return [
        Request(_checked(f"{prompt}\n\n{request.prompt}"))
        for prompt in prompts
        for request in _parse(given, form or "text")
    ]


def _is_terminal() -> bool:
    return sys.stdin is None or sys.stdin.isatty()


def _read_standard_input() -> str:
    if sys.stdin is None:  # the caller closed it
        return ""
    if sys.stdin.isatty():
        print("nanovllm: reading the prompt from the terminal; Ctrl-D on an empty line ends it", file=sys.stderr)
    else:
        _tell_if_silent()
    return read_standard_input()


def _tell_if_silent() -> None:
    """Print a notice if standard input is silent: an open pipe, as services have, looks like a slow model."""
    try:
        is_ready = bool(select.select([sys.stdin], [], [], PATIENCE_S)[0])
    except (OSError, ValueError):  # not a real file
        return
    if not is_ready:
        print("nanovllm: waiting for standard input; if it holds no prompt, add < /dev/null", file=sys.stderr)


def _parse(given: str, form: str) -> list[Request]:
    if form == "text":
        whole = given.rstrip("\n")
        if not whole.strip():
            raise ValueError("there is no prompt: standard input or the file is empty.")
        return [Request(_checked(whole))]
    requests = []
    for number, line in enumerate(given.split("\n"), 1):
        line = line.rstrip("\r")
        if line.strip():
            requests.append(Request(_checked(line)) if form == "lines" else _parse_json(line, number))
    if not requests:
        raise ValueError("the input holds no prompt; give one per line.")
    return requests


def _parse_json(line: str, number: int) -> Request:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} is not JSON: {error}") from error
    if isinstance(value, (str, list)):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise ValueError(f"line {number} is {line}; a prompt is a string, a list of token ids or an object.")
    options = dict(value)
    names = {name: options.pop(name) for name in NAMES if name in options}
    prompts = [options.pop(name) for name in ("prompt", "messages") if name in options]
    if "body" in options and "url" in options:
        raise ValueError(f"line {number} is of OpenAI's batch format; `nanovllm run-batch` takes such files.")
    if len(prompts) != 1:
        raise ValueError(f'line {number} needs "prompt" or "messages", one of the two.')
    unknown = sorted(set(options) - OPTIONS)
    if unknown:
        raise ValueError(
            f"line {number} holds {unknown[0]!r}, which is not an option of a request ({', '.join(sorted(OPTIONS))})."
        )
    try:
        return Request(_checked(prompts[0]), options, names)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error


def _checked(prompt: Any) -> Any:
    """Check a prompt without a tokenizer; raises ValueError if it is invalid."""
    if prompt in ("", []):
        raise ValueError("the prompt is empty; it needs at least one token.")
    if isinstance(prompt, str):
        return text("the prompt", prompt)
    if not isinstance(prompt, list):
        raise ValueError(f"a prompt is a string, a list of token ids or a list of messages, not {prompt!r}.")
    if isinstance(prompt[0], dict):
        _check_conversation(prompt)
    elif not all(type(item) is int and item >= 0 for item in prompt):
        raise ValueError(f"a prompt's token ids must be whole numbers of 0 or more: {json.dumps(prompt)[:80]}")
    return prompt


def _check_conversation(messages: Iterable[Any]) -> None:
    for message in messages:
        if not (isinstance(message, dict) and {"role", "content"} <= message.keys()):
            raise ValueError(f"a conversation is a list of {{'role': ..., 'content': ...}}; it holds {message!r}.")
