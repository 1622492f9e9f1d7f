"""Number of thought tokens of an answer, for its usage."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from nanovllm.serving.server.answers import harmony
from nanovllm.serving.server.answers.reasoning import HARMONY, ReasoningFormat


def num_thought_tokens(form: ReasoningFormat, tokenizer: Any, token_ids: Sequence[int], *, is_open: bool) -> int:
    """Count the tokens of the thought, its closing marker included.

    Args:
        is_open: True if the prompt opens the thought, so that the answer begins within it.
    """
    if form is HARMONY:
        return _in_channel(tokenizer, token_ids)
    if not is_open:
        begin = tokenizer.decode(list(token_ids[:24]), skip_special_tokens=False).lstrip()
        if not begin.startswith(form.open):
            return 0
    close_id = marker_id(tokenizer, form.close)
    if close_id is not None:
        return token_ids.index(close_id) + 1 if close_id in token_ids else len(token_ids)

    def is_closed(count: int) -> bool:
        return form.close in tokenizer.decode(list(token_ids[:count]), skip_special_tokens=False)

    return bisect_left(range(len(token_ids)), True, key=is_closed)


def marker_id(tokenizer: Any, marker: str) -> int | None:
    """Token id of a marker; None if the tokenizer splits it."""
    token_id = tokenizer.convert_tokens_to_ids(marker)
    if not isinstance(token_id, int) or token_id == getattr(tokenizer, "unk_token_id", None):
        return None
    return token_id


def _in_channel(tokenizer: Any, token_ids: Sequence[int]) -> int:
    message = marker_id(tokenizer, harmony.MESSAGE)
    ends = {marker_id(tokenizer, marker) for marker in harmony.ENDS}
    header: list[int] | None = []  # None within a message
    count = 0
    is_thought = False
    for token_id in token_ids:
        if header is None:
            count += is_thought
            if token_id in ends:
                header = []
        elif token_id == message:
            is_thought = "<|channel|>analysis" in tokenizer.decode(header, skip_special_tokens=False)
            header = None
        else:
            header.append(token_id)
    return count
