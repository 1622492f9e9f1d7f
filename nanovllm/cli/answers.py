"""Answers of `nanovllm generate` on standard output: text or JSON lines, in the order of prompts or as they end."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nanovllm.cli.display import print_answer
from nanovllm.cli.prompt_files import Request

if TYPE_CHECKING:
    from nanovllm.outputs import CompletionOutput, RequestOutput, TokenLogprobs

MAX_HEADING = 100  # characters of a prompt above its answer


class AnswerWriter:
    """Writes each answer once and flushes it.

    Args:
        is_ordered: write in order of the prompts: an answer waits for the answers of earlier prompts.
    """

    def __init__(self, requests: list[Request], *, as_json: bool, is_ordered: bool) -> None:
        self._requests = requests
        self._as_json = as_json
        self._is_ordered = is_ordered
        self._waiting: dict[int, RequestOutput] = {}
        self._next = 0
        self.num_written = 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Add the final output of a prompt."""
        if not self._is_ordered:
            self._write(index, output)
            return
        self._waiting[index] = output
        while self._next in self._waiting:
            self._write(self._next, self._waiting.pop(self._next))
            self._next += 1

    def write_waiting(self) -> None:
        """Write the waiting answers, after an interrupt: earlier prompts will not be answered."""
        for index in sorted(self._waiting):
            self._write(index, self._waiting.pop(index))

    def _write(self, index: int, output: RequestOutput) -> None:
        request = self._requests[index]
        is_alone = len(self._requests) == len(output.outputs) == 1
        for completion in output.outputs:
            if self._as_json:
                line = as_json(index, request, output, completion)
            elif is_alone:
                line = completion.text
            else:
                line = f"{_heading(index, request, output, completion)}\n{completion.text}"
            print_answer(line)
        self.num_written += 1


def _heading(index: int, request: Request, output: RequestOutput, completion: CompletionOutput) -> str:
    name = next(iter(request.names.values()), request.prompt if isinstance(request.prompt, str) else index)
    name = textwrap.shorten(str(name), MAX_HEADING, placeholder=" ...")
    return f"--- {name}" + (f" [{completion.index}]" if len(output.outputs) > 1 else "")


def as_json(index: int, request: Request, output: RequestOutput, completion: CompletionOutput) -> str:
    """Encode one sample of an answer as a JSON object.

    Args:
        index: index of the prompt in the run.
    """
    metrics = output.metrics
    record: dict[str, Any] = {
        **request.names,
        "request_id": str(index),
        "index": completion.index,
        "prompt": request.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "seconds_in_queue": _seconds(metrics.arrival_time, metrics.scheduled_time),
        "seconds_to_first_token": _seconds(metrics.arrival_time, metrics.first_token_time),
        "seconds": _seconds(metrics.arrival_time, metrics.finished_time),
        "error": output.error,
    }
    if completion.logprobs is not None:
        record["logprobs"] = [list(_ranked(report)) for report in completion.logprobs]
    if output.prompt_logprobs is not None and completion.index == 0:
        reports = output.prompt_logprobs
        record["prompt_logprobs"] = [report and list(_ranked(report)) for report in reports]
    return json.dumps(record, ensure_ascii=False)


def _ranked(report: TokenLogprobs) -> Iterator[dict[str, Any]]:
    for token_id, (logprob, rank) in report.items():
        yield {"token_id": token_id, "logprob": logprob, "rank": rank}


def _seconds(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 6)
