"""Distinguishes rows without a token due to the request's options from rows with non-finite logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanovllm.core.batch import NON_FINITE, NOTHING_LEFT
from nanovllm.process.device import to_device


def emptied_rows(logits: Tensor, rows: list[int], *, are_kept: bool) -> Callable[[Tensor], None]:
    """A function that replaces NON_FINITE by NOTHING_LEFT in drawn tokens [num_rows], in place.

    Args:
        logits: [num_rows, vocab_size], as returned by the model.
        rows: rows that options may mask.
        are_kept: whether the logits are not overwritten before the draw. Then a CPU reads them only for rows without a
            token, which is rare; a GPU would have to synchronise.
    """
    if not rows:
        return lambda token_ids: None
    if are_kept and logits.device.type == "cpu":
        return lambda token_ids: _mark_few(token_ids, logits, rows)
    places = to_device(rows, logits.device)
    is_sound = logits[places].amax(dim=-1).isfinite() if len(rows) < len(logits) else logits.amax(dim=-1).isfinite()
    return lambda token_ids: _mark(token_ids, places, is_sound)


def _mark(token_ids: Tensor, places: Tensor, is_sound: Tensor) -> None:
    chosen = token_ids[places]
    token_ids[places] = chosen.masked_fill_(is_sound & (chosen == NON_FINITE), NOTHING_LEFT)


def _mark_few(token_ids: Tensor, logits: Tensor, rows: list[int]) -> None:
    lacking = [row for row, token_id in zip(rows, token_ids[rows].tolist(), strict=True) if token_id == NON_FINITE]
    if lacking:
        _mark(token_ids, torch.tensor(lacking), logits[lacking].amax(dim=-1).isfinite())
