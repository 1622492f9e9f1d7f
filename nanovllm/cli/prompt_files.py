"""Prompts of `nanovllm generate`: from arguments, a file or standard input, with options per request."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, TextIO

from nanovllm.sampling_params import SamplingParams

Request = tuple[Any, dict[str, Any]]  # prompt (text, token ids or messages) and the options of the request


def read_requests(prompts: list[str], file: str | None, form: str | None) -> list[Request]:
    """Read the prompts.

    Args:
        prompts: positional arguments.
        file: file to read instead; "-" or None for standard input.
        form: format of the file: "text", "lines", "jsonl", or None for the default of its suffix.

    Raises ValueError for contradictory arguments, and with the line number for an invalid prompt.
    """
    if prompts:
        if file:
            raise ValueError("prompts are given as arguments and in --file; give one of the two.")
        if form:
            raise ValueError("--format applies to files, but prompts are given as arguments. Leave it out.")
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
        raise ValueError("the input holds no prompt; give one per line.")
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
            f"line {number} holds {unknown[0]!r}, which is not an option of a request ({', '.join(sorted(known))})."
        )
    return prompts[0], overrides
