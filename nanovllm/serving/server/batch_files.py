"""The lines of OpenAI's batch files, read and checked; without torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/score", "/v1/rerank",
)  # fmt: skip
FIELDS = ("custom_id", "method", "url", "body")
BEGIN = b'{"id": "batch_req_'  # start of each output line


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line: `body` is JSON for the endpoint at `url`; `streams` if it asks for a stream."""

    custom_id: str
    url: str
    body: bytes
    streams: bool


def read_batch(lines: Iterable[str]) -> list[BatchRequest]:
    """Read the requests of a file; raises ValueError that names the first bad line.

    Bodies are checked later by their endpoint: its error becomes the line's response.
    """
    requests = []
    seen = dict[str, int]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _request(line)
            if request.custom_id in seen:
                raise ValueError(f"custom_id is {request.custom_id!r} as in line {seen[request.custom_id]}.")
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        seen[request.custom_id] = number
        requests.append(request)
    if not requests:
        raise ValueError("the batch file holds no request.")
    return requests


def _request(line: str) -> BatchRequest:
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}.") from None
    except RecursionError:
        limit = sys.getrecursionlimit()
        raise ValueError(f"its arrays and objects are nested deeper than {limit} or so, which is not read.") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is not an object with {', '.join(FIELDS)}.")
    missing = [name for name in FIELDS if name not in value]
    if missing:
        raise ValueError(f"{missing[0]!r} is missing; a line has {', '.join(FIELDS)}.")
    custom_id, method, url, body = (value[name] for name in FIELDS)
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(f"custom_id must be a string that is not empty, not {custom_id!r}.")
    if method != "POST":
        raise ValueError(f"method is {method!r}; it must be 'POST'.")
    if url not in ENDPOINTS:
        raise ValueError(f"url is {url!r}; it must be one of {', '.join(ENDPOINTS)}.")
    if not isinstance(body, dict):
        raise ValueError(f"body must be an object, not {body!r}.")
    return BatchRequest(custom_id, url, json.dumps(body).encode(), bool(body.get("stream")))


def answered_ids(path: Path) -> set[str]:
    """The custom_ids in an output file, empty without one; removes an incomplete last line.

    Raises ValueError for a file that is not the output of a batch.
    """
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    try:
        answers = [json.loads(line) for line in data[:whole].splitlines()]
        found = {answer["custom_id"] for answer in answers if answer["response"]}  # input lines have no response
        if not data[whole:].startswith(BEGIN[: len(data) - whole]):
            raise ValueError("the last line was not torn from an output")
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not the output of a batch, and cannot be continued. Name another.") from None
    if whole < len(data):
        os.truncate(path, whole)
    return found
