"""The prompts of a command: from its arguments, a file or standard input, with the options that come with each."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, TextIO

from nanovllm.sampling_params import SamplingParams

Request = tuple[Any, dict[str, Any]]  # a prompt (text, token ids or messages), and its own sampling options


def read_requests(prompts: list[str], file: str | None, form: str | None) -> list[Request]:
    """What `nanovllm generate` is asked for.

    Args:
        prompts: those given as arguments.
        file: where to read them instead; "-" or None is standard input.
        form: of the file: "text", "lines", "jsonl", or None to go by its name.

    Raises ValueError for what contradicts itself or is no prompt, with the number of its line.
    """
    if prompts:
        if file:
            raise ValueError("give prompts as arguments or in --file, not both.")
        if form:
            raise ValueError("--format is of a file; prompts given as arguments are text. Leave it out.")
        return [(prompt, {}) for prompt in prompts]
    if file is None or file == "-":
        return _parse(sys.stdin, form or "lines")
    path = Path(file)
    with path.open(encoding="utf-8") as opened:
        return _parse(opened, form or ("jsonl" if path.suffix == ".jsonl" else "lines"))


def _parse(file: TextIO, form: str) -> list[Request]:
    if form == "text":
        return [(file.read(), {})]
    requests: list[Request] = []
    for number, line in enumerate(file, 1):
        line = line.rstrip("\n")
        if not line.strip():
            continue
        requests.append((line, {}) if form == "lines" else _parse_json(line, number))
    if not requests:
        raise ValueError("there is no prompt in the input.")
    return requests


def _parse_json(line: str, number: int) -> Request:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} is not JSON: {error}") from error
    if isinstance(value, (str, list)):
        return value, {}
    if not isinstance(value, dict):
        raise ValueError(f"line {number} is {line}; a prompt is a string, a list of token ids or an object.")
    overrides = dict(value)
    prompts = [overrides.pop(name) for name in ("prompt", "messages") if name in overrides]
    if len(prompts) != 1:
        raise ValueError(f'line {number} needs "prompt" or "messages", one of the two.')
    known = {field.name for field in dataclasses.fields(SamplingParams)} | {"priority", "timeout"}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ValueError(
            f"line {number} holds {unknown[0]!r}, which is no option of a request ({', '.join(sorted(known))})."
        )
    return prompts[0], overrides
