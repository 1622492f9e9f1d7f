"""Trace files: a workload as JSON lines, one object per request; docs/guide/benchmarking.md has the format.

`read_trace` also takes recorded traffic without prompts, see `recorded.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanovllm.tools.workloads.recorded import format_of, read_recorded
from nanovllm.tools.workloads.workloads import TimedRequest, Workload

FIELDS = ("arrival", "prompt", "output_tokens", "after", "priority", "cache_salt", "client")

Tokenize = Callable[[str], list[int]]


def write_trace(workload: Workload, path: str | Path) -> None:
    """Write a workload for `read_trace`; fields at their defaults are omitted."""
    with open(path, "w", encoding="utf-8") as file:
        for request in workload.requests:
            line: dict[str, Any] = {
                "arrival": request.arrival,
                "prompt": request.prompt_token_ids,
                "output_tokens": request.num_output_tokens,
            }
            if request.after is not None:
                line["after"] = request.after
            if request.priority:
                line["priority"] = request.priority
            if request.cache_salt:
                line["cache_salt"] = request.cache_salt
            if request.client:
                line["client"] = request.client
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_trace(path: str | Path, *, tokenize: Tokenize | None = None, first: int | None = None) -> Workload:
    """Read a workload.

    Args:
        tokenize: maps text prompts to token ids; without it they are refused.
        first: number of requests to keep, from the first on; None: all.

    Raises ValueError naming file and line for invalid input.
    """
    with open(path, encoding="utf-8") as file:
        begin = next((line for line in file if line.strip()), "")
    if (kind := format_of(begin)) is not None:
        return read_recorded(Path(path), kind, first=first)
    requests: list[TimedRequest] = []
    latest = 0.0
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                request = _request(line, len(requests), tokenize)
                if request.after is None:
                    if request.arrival < latest:
                        raise ValueError(
                            f"arrival {request.arrival:g} is before {latest:g} of an earlier line; sort by arrival"
                        )
                    latest = request.arrival
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            requests.append(request)
    if not requests:
        raise ValueError(f"{path} holds no request; write one JSON object a line.")
    workload = Workload(Path(path).stem, requests, {"trace": str(path)})
    return workload if first is None else workload.first(first)


def _request(line: str, number: int, tokenize: Tokenize | None) -> TimedRequest:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("a request must be a JSON object.")
    for key in value:
        if key not in FIELDS:
            raise ValueError(f"no field {key!r}; there are {', '.join(FIELDS)}.")
    for key in ("prompt", "output_tokens"):
        if key not in value:
            raise ValueError(f"the field {key!r} is missing.")
    arrival = value.get("arrival", 0.0)
    after = value.get("after")
    names = {key: value.get(key, "") for key in ("cache_salt", "client")}
    if isinstance(arrival, bool) or not isinstance(arrival, (int, float)) or not 0.0 <= arrival < math.inf:
        raise ValueError(f"arrival is {arrival!r}; it must be a number of seconds, 0 or more.")
    if after is not None and not (_is_integer(after) and 0 <= after < number):
        raise ValueError(f"after is {after!r}; it must be the index, from 0, of an earlier request.")
    if not _is_integer(value["output_tokens"]) or value["output_tokens"] < 1:
        raise ValueError(f"output_tokens is {value['output_tokens']!r}; it must be a whole number, at least 1.")
    if not _is_integer(value.get("priority", 0)):
        raise ValueError(f"priority is {value['priority']!r}; it must be a whole number.")
    for key, name in names.items():
        if not isinstance(name, str):
            raise ValueError(f"{key} is {name!r}; it must be a string.")
    prompt = _token_ids(value["prompt"], tokenize)
    return TimedRequest(float(arrival), prompt, value["output_tokens"], after, value.get("priority", 0), **names)


def _token_ids(prompt: Any, tokenize: Tokenize | None) -> list[int]:
    if isinstance(prompt, str):
        if tokenize is None:
            raise ValueError("the prompt is text, which needs a tokenizer. Give token ids.")
        prompt = tokenize(prompt)
    if not isinstance(prompt, list) or not prompt or not all(_is_integer(token) and token >= 0 for token in prompt):
        raise ValueError("the prompt must be text or a list of token ids, and not empty.")
    return prompt


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
