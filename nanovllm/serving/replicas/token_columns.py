"""A step's streamed tokens as columns of one message: most outputs bring one token and change nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from nanovllm.outputs import RequestOutput


class TokenColumns(Struct, array_like=True):
    """One more token of each of several requests with one sample; a row each.

    time: one time for all these tokens, in seconds; the front computes their latencies.
    """

    time: float
    placements: list[int]
    texts: list[str]
    token_ids: list[int]


class TokenSender:
    """Separates outputs of one more token from others, such as a first and a last one."""

    def __init__(self) -> None:
        # Request id -> preemptions and cached tokens, as last sent with its metrics.
        self._known: dict[str, Any] = {}

    def split(
        self, outputs: Sequence[RequestOutput], placements: Mapping[str, int]
    ) -> tuple[list[RequestOutput], TokenColumns | None]:
        """Outputs to be sent whole, and the others as columns."""
        whole: list[RequestOutput] = []
        columns: TokenColumns | None = None
        for output in outputs:
            request_id = output.request_id
            metrics = output.metrics
            runs = [run for completion in output.outputs for run in (completion.weight_versions or ())[-1:]]
            now = (metrics.num_preemptions, output.num_cached_tokens, runs)
            if not (self._known.get(request_id) == now and _is_one_token(output)):
                self._known[request_id] = now
                whole.append(output)
                continue
            time = metrics.last_token_time
            if columns is None:
                assert time is not None  # it has a token
                columns = TokenColumns(time, [], [], [])
            elif columns.time != time:
                whole.append(output)
                continue
            (completion,) = output.outputs
            columns.placements.append(placements[request_id])
            columns.texts.append(completion.text)
            columns.token_ids += completion.token_ids
        return whole, columns

    def forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)


def _is_one_token(output: RequestOutput) -> bool:
    """Whether an output adds one token to others, and nothing that columns lack."""
    if output.finished or len(output.outputs) != 1 or output.metrics.num_output_tokens < 2:
        return False
    completion = output.outputs[0]
    has_more = completion.logprobs is not None or output.prompt_logprobs is not None or output.error is not None
    return len(completion.token_ids) == 1 and completion.finish_reason is None and not has_more
