"""Limits at which a middle ends before the model ends it: time and least indentation, with llama.cpp's meaning."""

from __future__ import annotations

from nanovllm.outputs import OutputKind, RequestOutput
from nanovllm.serving.streaming.streams import OutputStream


class MiddleLimits:
    """Limits of one middle, applied to its text as it grows.

    Args:
        seconds: time limit from the first token on; the line that ends after it is the last. None: no limit.
        indent: least number of spaces and tabs before each line but the first; 0: no limit.
    """

    def __init__(self, seconds: float | None, indent: int) -> None:
        self._seconds = seconds
        self._indent = indent
        self._width: int | None = None  # width of the current line's indentation so far; None after the indentation

    @property
    def is_set(self) -> bool:
        return self._seconds is not None or self._indent > 0

    def end_in(self, text: str, elapsed: float) -> int | None:
        """Index in the new text at which the middle ends; None if it goes on.

        Args:
            elapsed: seconds since the first token.
        """
        for index, letter in enumerate(text):
            if self._width is not None and letter not in " \t":
                if self._width < self._indent:  # blank lines too, as in llama.cpp
                    return index
                self._width = None
            if letter == "\n":
                if self._seconds is not None and elapsed > self._seconds:
                    return index + 1
                self._width = 0
            elif self._width is not None:
                self._width += 1
        return None


class LimitedStream(OutputStream):
    """Outputs of a request up to its limits, whole or as deltas. Closing it aborts the request."""

    def __init__(self, deltas: OutputStream, limits: MiddleLimits, kind: OutputKind) -> None:
        self._deltas = deltas
        self._limits = limits
        self._kind = kind
        self._whole: RequestOutput | None = None
        self._has_ended = False

    async def __anext__(self) -> RequestOutput:
        while not self._has_ended:
            output = await anext(self._deltas)
            self._cut(output)
            self._has_ended = output.finished
            if self._kind is OutputKind.DELTA:
                return output
            if self._whole is None:
                self._whole = output
            else:
                self._whole.extend(output)
            if self._has_ended:
                return self._whole
        raise StopAsyncIteration

    async def aclose(self) -> None:
        await self._deltas.aclose()

    def _cut(self, output: RequestOutput) -> None:
        metrics = output.metrics
        first = metrics.first_token_time
        last = metrics.last_token_time
        elapsed = 0.0 if first is None or last is None else last - first
        for completion in output.outputs:
            end = self._limits.end_in(completion.text, elapsed)
            if end is not None:
                completion.text = completion.text[:end]
                completion.finish_reason = "length"
                completion.stop_reason = None
                output.finished = True
                metrics.finished_time = metrics.finished_time or last
