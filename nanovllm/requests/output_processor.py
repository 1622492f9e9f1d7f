"""Turns the tokens that a step gave into outputs: text, stop strings, and which requests have something to show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nanovllm.outputs import RequestOutput
from nanovllm.requests.request import Request
from nanovllm.sequence import Sequence


@dataclass(slots=True)
class TokenTimes:
    """How long the tokens of one step were awaited, in seconds.

    ttfts: of the sequences that got their first token, since their arrival.
    request_ttfts: likewise, but of several samples of a request only the first one's.
    itls: since a sequence's token before, with the number of tokens; sequences that decode together share a gap.
    """

    ttfts: list[float] = field(default_factory=list)
    request_ttfts: list[float] = field(default_factory=list)
    itls: dict[float, int] = field(default_factory=dict)

    def add_first(self, ttft: float, *, is_of_request: bool) -> None:
        self.ttfts.append(ttft)
        if is_of_request:
            self.request_ttfts.append(ttft)

    def add_next(self, itl: float) -> None:
        self.itls[itl] = self.itls.get(itl, 0) + 1


class OutputProcessor:
    """Reads the new tokens of an engine's requests.

    Args:
        requests: by id; the engine's own table, which it fills and empties.
    """

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self._requests = requests

    def advance(self, sequences: Iterable[Sequence], now: float, times: TokenTimes) -> list[tuple[Sequence, str]]:
        """Detokenise the new tokens; returns the unfinished sequences that end by their text, with the reason.

        Args:
            times: takes how long each token was awaited.
        """
        ended = []
        for sequence in sequences:
            request = self._requests[sequence.request_id]
            sample = request.samples[sequence.index]
            num_tokens = len(sequence.token_ids)
            if sample.num_seen_tokens == num_tokens:  # it failed
                continue
            sample.num_seen_tokens = num_tokens
            if sample.last_token_time is None:
                times.add_first(now - sequence.arrival_time, is_of_request=not request.has_token)
                request.has_token = True
            else:
                times.add_next(now - sample.last_token_time)
            try:
                stop = sample.advance(now)
            except Exception as error:  # it ends the sample that cannot be decoded, not its neighbours
                sample.fail_text(error)
                reason = "error"
            else:
                if stop is None:
                    continue
                sequence.stop_reason, reason = stop, "stop"
            if sequence.is_finished:  # its last token by length, or a stop token, completed the string
                sequence.finish_reason = reason
            else:
                ended.append((sequence, reason))
        return ended

    def outputs(self, sequences: Iterable[Sequence], now: float) -> list[RequestOutput]:
        """Outputs of the requests, among the owners of these sequences, that stream or have finished."""
        requests: dict[Request, None] = {}
        for sequence in sequences:  # most have nothing to show
            request = self._requests[sequence.request_id]
            if request.is_streamed or sequence.finish_reason is not None:
                requests[request] = None
        return [request.output(now) for request in requests if request.is_streamed or request.is_finished]
