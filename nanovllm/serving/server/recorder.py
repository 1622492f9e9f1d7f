"""Recorder of a server's requests: arrivals, lengths and hashed prefixes, for `nanovllm tune` and `simulate`; no text.

The engine thread only queues ended requests. The recorder's thread hashes their prompts and appends each line with one
write, so that a killed process tears at most the last line. The hashes are keyed by random bytes that are never
written: a guessed prompt cannot be looked up in the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import queue
import secrets
import threading
import time
from array import array
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.outputs import RequestOutput
from nanovllm.sequence import NewRequest
from nanovllm.serving.server.metrics import worst_reason

logger = logging.getLogger("nanovllm")

BLOCK_TOKENS = 64  # prompt tokens per hash
HASH_BITS = 53  # exact in every reader of JSON
MAX_QUEUED_TOKENS = 2**22  # prompt tokens that wait for the thread; further requests are left out, and counted
REQUEST_TOKENS = 64  # tokens that the queue counts per request in addition to its prompt


class _Ended(NamedTuple):
    request: NewRequest
    num_output_tokens: int
    reason: str


class Recorder:
    """Appends a JSON line for each ended request to a file, which is replaced once it is full.

    Args:
        max_bytes: size above which the file is renamed to PATH.1, in place of an older one, and begun anew.

    num_recorded, num_dropped: requests so far.

    Raises OSError if the file cannot be written, ValueError if it is not a record.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int = 2**28) -> None:
        self.num_recorded = self.num_dropped = 0
        self._path = Path(path)
        self._max_bytes = max_bytes
        self._file: int | None
        self._file, self._num_bytes = _open_record(self._path)
        self._key = secrets.token_bytes(16)
        self._epoch = time.time() - time.monotonic()  # Unix time at zero of the engine's clock
        self._queue: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._num_queued_tokens = 0
        self._lock = threading.Lock()  # guards `_num_queued_tokens`, which the engine thread and this one change
        self._thread = threading.Thread(target=self._run, name="nanovllm-record", daemon=True)
        self._thread.start()

    def record(self, request: NewRequest, output: RequestOutput | None) -> None:
        """Queue an ended request; never waits. `output` is its last one, None if the engine died."""
        cost = len(request.prompt_token_ids) + REQUEST_TOKENS
        with self._lock:
            has_room = self._num_queued_tokens + cost <= MAX_QUEUED_TOKENS
            if has_room:
                self._num_queued_tokens += cost
            else:
                self.num_dropped += 1
        if not has_room:
            if self.num_dropped == 1:
                logger.warning("%s: the disk is too slow for all requests, and the first is left out", self._path)
            return
        num_output_tokens = output.metrics.num_output_tokens if output else 0
        self._queue.put(_Ended(request, num_output_tokens, worst_reason(output)))

    def close(self) -> None:
        """Write the queued requests, and close the file; idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if self.num_dropped:
            logger.warning("%s: %d requests were left out", self._path, self.num_dropped)
            self.num_dropped = 0

    @staticmethod
    def check(path: str | os.PathLike[str]) -> None:
        """Raise like the constructor, before a model is loaded."""
        os.close(_open_record(Path(path))[0])

    # ------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while (ended := self._queue.get()) is not None:
                line = self._line(ended)
                with self._lock:
                    self._num_queued_tokens -= len(ended.request.prompt_token_ids) + REQUEST_TOKENS
                self._write(line)
        except Exception as error:
            logger.error("%s: recording ends: %s", self._path, error)
            with self._lock:  # no further request is queued
                self._num_queued_tokens = MAX_QUEUED_TOKENS
                self.num_dropped = self.num_dropped + 1
        finally:
            if self._file is not None:
                os.close(self._file)

    def _line(self, ended: _Ended) -> bytes:
        request = ended.request
        tokens = ended.request.prompt_token_ids
        line: dict[str, Any] = {
            "arrival": round(self._epoch + request.arrival_time, 4),
            "prompt_tokens": len(tokens),
            "output_tokens": ended.num_output_tokens,
            "block_tokens": BLOCK_TOKENS,
            "hash_ids": prefix_hashes(tokens, request.cache_salt, self._key),
            "ended": ended.reason,
        }
        if (count := getattr(request.params, "n", 1)) > 1:
            line["n"] = count
        if request.priority:
            line["priority"] = request.priority
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        if self._num_bytes and self._num_bytes + len(line) > self._max_bytes:
            full = self._file
            self._file = None
            os.close(full)
            os.replace(self._path, f"{self._path}.1")
            self._file, self._num_bytes = _open_record(self._path)
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._num_bytes += len(line)
        self.num_recorded += 1


def prefix_hashes(token_ids: list[int], salt: str, key: bytes) -> list[int]:
    """One hash per block of a prompt, a partial last one included; equal for equal prefixes and salts."""
    tokens = array("i", token_ids)
    parent = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), key=key, digest_size=16).digest()
    found = []
    for first in range(0, len(tokens), BLOCK_TOKENS):
        block = tokens[first : first + BLOCK_TOKENS].tobytes()
        parent = hashlib.blake2b(parent + block, key=key, digest_size=16).digest()
        found.append(int.from_bytes(parent[:8], "little") >> (64 - HASH_BITS))
    return found


def _open_record(path: Path) -> tuple[int, int]:
    """Open a record for appending, and cut off a torn last line; returns descriptor and size.

    The descriptor holds a lock: a second writer could cut off a line of the first, or rename the file under it.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        _lock(file, path)
        size = os.fstat(file).st_size
        if size == 0:
            return file, 0
        end = b"".join(_last_parts(file, size))
        first = os.pread(file, 65536, 0).split(b"\n", 1)[0]
        if b'"hash_ids":[' not in first or not first.startswith(b'{"arrival":'):
            raise ValueError(f"record is {str(path)!r}, which holds something else. Name another file, or remove it.")
        whole = size - len(end) + end.rfind(b"\n") + 1
        if whole < size:
            logger.warning("%s: its last line was torn, and is removed", path)
            os.ftruncate(file, whole)
        return file, whole
    except BaseException:
        os.close(file)
        raise


def _lock(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"record is {str(path)!r}, to which another server writes. Name another file.") from None
    except OSError:
        pass  # a file system without locks


def _last_parts(file: int, size: int) -> list[bytes]:
    """Chunks of a file's end, back to at least one line end or the begin."""
    parts: list[bytes] = []
    while size > 0:
        first = max(0, size - 65536)
        parts.insert(0, os.pread(file, size - first, first))
        if b"\n" in parts[0]:
            break
        size = first
    return parts
