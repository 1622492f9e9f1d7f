"""Log-probabilities in the formats of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanovllm.outputs import TokenLogprobs
from nanovllm.server.token_text import TokenText

LOWEST = -9999.0  # replaces minus infinity, which JSON cannot encode


def format_chat_logprobs(
    token_text: TokenText, token_ids: list[int], reports: Sequence[TokenLogprobs], num_top: int
) -> dict[str, Any]:
    """Format the chat endpoint's logprobs: an entry per token with its `num_top` most probable alternatives."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text.text(token_id)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": token_text.byte_values(token_id)}

    content = []
    for token_id, report in zip(token_ids, reports, strict=True):
        ranked = sorted(report.items(), key=lambda item: item[1].rank)[:num_top]
        top = [entry(other, theirs.logprob) for other, theirs in ranked]
        content.append(entry(token_id, report[token_id].logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Logprobs of /v1/completions for one choice; text_offset continues over the chunks of a stream."""

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text
        self._offset = 0

    def report(self, token_ids: list[int], reports: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Format the logprobs of the next tokens."""
        tokens = [self._token_text.text(token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if report is None else max(report[token_id].logprob, LOWEST)
                for token_id, report in zip(token_ids, reports, strict=True)
            ],
            "top_logprobs": [None if report is None else self._top(report) for report in reports],
            "text_offset": offsets,
        }

    def _top(self, report: TokenLogprobs) -> dict[str, float]:
        """Map text to log-probability: the sampled token, then the most probable; the first of equal texts counts."""
        top: dict[str, float] = {}
        for token_id, theirs in report.items():
            top.setdefault(self._token_text.text(token_id), max(theirs.logprob, LOWEST))
        return top
