"""Log-probabilities in the formats of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanovllm.features.intake.token_texts import detokenizer_of
from nanovllm.outputs import TokenLogprobs
from nanovllm.requests import IncrementalDetokenizer
from nanovllm.serving.server.sse import compact
from nanovllm.serving.server.token_text import TokenText

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


def encode_prompt_logprobs(token_text: TokenText, reports: Sequence[TokenLogprobs | None]) -> str:
    """Encode a prompt's logprobs in vLLM's format: null, or {token id: {logprob, rank, decoded_token}}, per token.

    One JSON call per prompt token, so that other threads can run in between.
    """

    def entry(report: TokenLogprobs) -> str:
        return compact({
            str(token_id): {
                "logprob": max(theirs.logprob, LOWEST), "rank": theirs.rank, "decoded_token": token_text.text(token_id)
            }
            for token_id, theirs in report.items()
        })  # fmt: skip

    return f"[{','.join('null' if report is None else entry(report) for report in reports)}]"


class CompletionLogprobs:
    """Logprobs of /v1/completions for one choice, or for its echoed prompt; text_offset goes on over a stream's chunks.

    Tokens of one character have its offset.

    Args:
        tokenizer: None where each token's text is its id.
        offset: characters of the choice's text before the first token.
        skips_special_tokens: True if the text omits special tokens.
    """

    def __init__(
        self, token_text: TokenText, tokenizer: Any, *, offset: int = 0, skips_special_tokens: bool = True
    ) -> None:
        self._token_text = token_text
        self._offset = offset
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = detokenizer_of(tokenizer, skip_special_tokens=skips_special_tokens)

    def report(self, token_ids: list[int], reports: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Format the logprobs of the next tokens."""
        tokens = [self._token_text.text(token_id) for token_id in token_ids]
        offsets = [self._offset_of(token_id, token) for token_id, token in zip(token_ids, tokens, strict=True)]
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if report is None else max(report[token_id].logprob, LOWEST)
                for token_id, report in zip(token_ids, reports, strict=True)
            ],
            "top_logprobs": [None if report is None else self._top(report) for report in reports],
            "text_offset": offsets,
        }

    def _offset_of(self, token_id: int, token: str) -> int:
        """Add a token; returns its first character's offset in the text."""
        begin = self._offset
        if self._detokenizer is None:
            self._offset += len(token)
            return begin
        num_before = len(self._detokenizer.text)
        self._detokenizer.add(token_id)
        added = self._detokenizer.text[num_before:]
        self._offset += len(added)
        # Held-back bytes that this token turns out to leave invalid enter the text with it.
        return self._offset - len(token) if token and added.endswith(token) else begin

    def _top(self, report: TokenLogprobs) -> dict[str, float]:
        """Map text to log-probability: the sampled token, then the most probable; the first of equal texts counts."""
        top: dict[str, float] = {}
        for token_id, theirs in report.items():
            top.setdefault(self._token_text.text(token_id), max(theirs.logprob, LOWEST))
        return top
