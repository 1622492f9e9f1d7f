"""Recorded traffic as workloads: a server's record, Mooncake's traces, and Azure's. None of them holds text.

Prompts are drawn: a block's tokens follow from its hash alone, so that prompts share prefixes where the recorded ones
did. Times are counted from the first arrival. A request that ended without an output token is played with one.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.tools.workloads.block_tokens import draw_prompt
from nanovllm.tools.workloads.workloads import TimedRequest, Workload

logger = logging.getLogger("nanovllm")

MOONCAKE_BLOCK = 512  # tokens per hash
RECORD = "nanovllm serve --record"
MOONCAKE = "Mooncake"
AZURE = "Azure"
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
UNIQUE = 2**54  # lower bound of hashes that no other prompt shares; recorded hashes are below it


class Recorded(NamedTuple):
    """A recorded request.

    arrival: seconds since any point in time.
    hash_ids: one per block of the prompt, a partial last one included.
    ended: finish reason, for the summary; None if the format has none.
    """

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_tokens: int
    hash_ids: list[int]
    num_samples: int = 1
    priority: int = 0
    ended: str | None = None


def format_of(first_line: str) -> str | None:
    """Detect the format of a file by its first line; None if unknown."""
    if first_line.lstrip("\ufeff").startswith("TIMESTAMP,"):
        return AZURE
    try:
        value = json.loads(first_line)
    except ValueError:
        return None
    if not isinstance(value, dict) or "hash_ids" not in value:
        return None
    return MOONCAKE if "timestamp" in value else RECORD


def read_recorded(path: Path, kind: str, *, first: int | None) -> Workload:
    """Read a file as a workload.

    Args:
        kind: format from `format_of`.
        first: number of arrivals to keep, from the first on; None: all, which may not fit into memory.

    Raises ValueError naming file and line for invalid input.
    """
    found = sorted(_lines(path, kind), key=lambda request: request.arrival)[:first]
    if not found:
        raise ValueError(f"{path} holds no request.")
    begin = found[0].arrival
    requests = [timed for request in found for timed in _as_timed(request, begin)]
    ends = Counter(request.ended for request in found if request.ended is not None)
    if unusual := {reason: count for reason, count in sorted(ends.items()) if reason not in ("stop", "length")}:
        told = ", ".join(f"{count} {reason}" for reason, count in unusual.items())
        logger.warning("%s: of %d requests did not end by themselves: %s", path, len(found), told)
    parameters: dict[str, Any] = {"trace": str(path), "format": kind, "ended": dict(ends), "first": first}
    return Workload(path.stem if first is None else f"{path.stem}[:{first}]", requests, parameters)


def _lines(path: Path, kind: str) -> Iterator[Recorded]:
    parse: Callable[[str, int], Recorded] = {RECORD: _record, MOONCAKE: _mooncake, AZURE: _azure}[kind]
    with open(path, encoding="utf-8-sig") as file:
        if kind == AZURE and (header := next(file).strip()) != AZURE_HEADER:
            raise ValueError(f"{path}, line 1: the columns are {header!r}, not {AZURE_HEADER}.")
        for number, line in enumerate(file, 2 if kind == AZURE else 1):
            if not line.strip():
                continue
            try:
                yield parse(line, number)
            except (ValueError, TypeError, KeyError) as error:
                if not line.endswith("\n"):
                    logger.warning("%s: the last line, %d, was torn, and is left out", path, number)
                    return
                reason = f"the field {error} is missing" if isinstance(error, KeyError) else error
                raise ValueError(f"{path}, line {number}: {reason}") from error


def _record(line: str, number: int) -> Recorded:
    value = _object(line)
    return Recorded(
        _seconds("arrival", value["arrival"]),
        _count("prompt_tokens", value["prompt_tokens"], 1),
        _count("output_tokens", value["output_tokens"], 0),
        block := _count("block_tokens", value["block_tokens"], 1),
        _hashes(value["hash_ids"], value["prompt_tokens"], block),
        _count("n", value.get("n", 1), 1),
        value.get("priority", 0),
        value.get("ended"),
    )


def _mooncake(line: str, number: int) -> Recorded:
    value = _object(line)
    length = _count("input_length", value["input_length"], 1)
    hashes = _hashes(value["hash_ids"], length, MOONCAKE_BLOCK)
    output = _count("output_length", value["output_length"], 0)
    return Recorded(1e-3 * _seconds("timestamp", value["timestamp"]), length, output, MOONCAKE_BLOCK, hashes)


def _azure(line: str, number: int) -> Recorded:
    cells = line.strip().split(",")
    if len(cells) != 3:
        raise ValueError(f"{len(cells)} columns, where {AZURE_HEADER} are 3.")
    try:
        arrival = _timestamp(cells[0].strip())
    except ValueError as error:
        raise ValueError(f"{error}, in the column TIMESTAMP") from error
    length = _count("ContextTokens", _whole_number(cells[1]), 1)
    output = _count("GeneratedTokens", _whole_number(cells[2]), 0)
    return Recorded(arrival, length, output, length, [UNIQUE + number])


def _timestamp(text: str) -> float:
    day, _, clock = text.partition(" ")
    clock, _, fraction = clock.removesuffix("+00:00").partition(".")  # seven digits at most; `datetime` keeps six
    return datetime.fromisoformat(f"{day} {clock}+00:00").timestamp() + float(f"0.{fraction or 0}")


def _whole_number(text: str) -> int | str:
    """The number of a cell; its text, which `_count` refuses by name, if it is none."""
    try:
        return int(text)
    except ValueError:
        return text.strip()


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("a request must be a JSON object.")
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"the arrival is {value!r}; {name} must be a number.")
    return float(value)


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, at least {least}.")
    return value


def _hashes(value: Any, length: int, block_tokens: int) -> list[int]:
    needed = -(-length // block_tokens)
    if not isinstance(value, list) or not all(isinstance(item, int) and 0 <= item < UNIQUE for item in value):
        raise ValueError("hash_ids must be a list of whole numbers, 0 or more.")
    if len(value) != needed:
        raise ValueError(f"hash_ids has {len(value)} entries; {length} tokens are {needed} blocks of {block_tokens}.")
    return value


# ----------------------------------------------------------------------------------------------------------- drawing


def _as_timed(request: Recorded, begin: float) -> Iterable[TimedRequest]:
    """One request per sample, with the same prompt."""
    prompt = draw_prompt(request.hash_ids, request.num_prompt_tokens, request.block_tokens)
    count = request.num_samples
    for sample in range(count):
        share = request.num_output_tokens // count + (sample < request.num_output_tokens % count)
        yield TimedRequest(request.arrival - begin, prompt, max(1, share), priority=request.priority)
