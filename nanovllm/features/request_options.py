"""Options of requests that a plain draw does not serve: changed logits, minimum lengths, log-probabilities, embeddings.

Rows without a token due to the request's options are distinguished from rows with non-finite logits.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import NON_FINITE, NOTHING_LEFT, ScheduledBatch
from nanovllm.device import to_device
from nanovllm.features.embeddings.embeddings import EmbeddedRows
from nanovllm.features.logprobs.draws import measure_draws
from nanovllm.features.logprobs.logprobs import PromptRows, StepLogprobs
from nanovllm.features.penalties.penalties import LatestTokens, change_logits
from nanovllm.layout import BatchLayout
from nanovllm.sampler import Draw, DrawInputs, LogitsStage
from nanovllm.sequence import Sequence


class RequestOptions(LogitsStage):
    """Serves every option of a request.

    Args:
        by_kernels: kernels of `fast/kernels/` are used on a GPU, if they exist; they are compiled at their first call.
        row_kernels: C++ kernels for CPUs.

    Attributes:
        new_report: builder of a step's report from its prompt rows and embedded rows.
    """

    def __init__(self, *, by_kernels: bool = True, row_kernels: Any = None) -> None:
        self.change_logits = partial(change_logits, by_kernels=by_kernels, row_kernels=row_kernels)
        self.new_report: Callable[[PromptRows | None, EmbeddedRows | None], StepLogprobs]
        self.new_report = partial(StepLogprobs, by_kernel=by_kernels, row_kernels=row_kernels)

    def begin_report(self, batch: ScheduledBatch, layout: BatchLayout) -> StepLogprobs:
        return self.new_report(PromptRows.from_layout(layout), EmbeddedRows.from_batch(batch))

    def inputs(self, layout: BatchLayout, sequences: SequenceABC[Sequence], previous: Tensor | None) -> LatestTokens:
        """Latest tokens of a step's sampled rows; some may have been read since the layout was made."""
        token_ids = layout.token_ids[layout.sample_rows]
        for row in np.flatnonzero(token_ids < 0).tolist():
            sequence = sequences[row]
            position = layout.sampled_positions[row]
            if sequence is not None and len(sequence.token_ids) >= position:  # None on other ranks
                token_ids[row] = sequence.token_ids[position - 1]
        return LatestTokens(token_ids, previous)

    def apply(
        self,
        draw: Draw,
        logits: Tensor,
        sequences: SequenceABC[Sequence],
        positions: SequenceABC[int],
        inputs: LatestTokens | None,
        report: StepLogprobs | None,
    ) -> Tensor:
        report = report or StepLogprobs()
        reported = []  # rows
        early = []
        limited = []
        for row, sequence in enumerate(sequences):
            params = sequence.params
            if params.logprobs is not None:
                reported.append(row)
            is_early = positions[row] - sequence.num_prompt_tokens < params.min_tokens
            if is_early:
                early.append(row)
            if is_early or params.forbids:
                limited.append(row)
        raw = None
        if reported:
            # Logits of other dtypes are copied before a change.
            changes_in_place = logits.dtype == torch.float32 and any(s.changes_logits for s in sequences)
            raw = _rows_of(logits, reported, copies=bool(early) or changes_in_place)
        mark_emptied = _emptied_rows(logits, limited, are_kept=logits.dtype != torch.float32 and not early)
        _suppress_stop_tokens(logits, sequences, early)
        logits = self.change_logits(logits, sequences, positions, inputs, report.errors)
        changed = [row for row in early if sequences[row].params.logits_processors]  # may have raised them again
        _suppress_stop_tokens(logits, sequences, changed)
        token_ids = draw(logits, sequences, positions)
        mark_emptied(token_ids)
        if raw is not None:
            num_top = max(sequences[row].params.logprobs or 0 for row in reported)
            report.add_sampled(reported, num_top, raw, token_ids[to_device(reported, logits.device)])
            _report_draws(report, logits, sequences, positions, token_ids)
        return token_ids


def _report_draws(
    report: StepLogprobs,
    logits: Tensor,
    sequences: SequenceABC[Sequence],
    positions: SequenceABC[int],
    token_ids: Tensor,
) -> None:
    """Report the numbers of draws that differ from the model's own distribution.

    Args:
        logits: [num_rows, vocab_size], after all changes before the temperature.
        token_ids: [num_rows], as drawn.
    """
    params = [sequence.params for sequence in sequences]
    rows = [row for row, own in enumerate(params) if own.reports_draws and own.changes_draws]
    if rows:
        inputs = DrawInputs.from_sequences([sequences[row] for row in rows], [positions[row] for row in rows])
        chosen = token_ids[to_device(rows, logits.device)]
        report.add_draws(rows, measure_draws(_rows_of(logits, rows), inputs.to_device(logits.device), chosen))


def _suppress_stop_tokens(logits: Tensor, sequences: SequenceABC[Sequence], early: list[int]) -> None:
    found = [(row, token_id) for row in early for token_id in sequences[row].stop_token_ids]
    if found:
        places = to_device(found, logits.device).unbind(1)
        logits.index_put_(places, logits.new_full((), -torch.inf))  # a Python number would synchronise with a GPU


def _rows_of(logits: Tensor, rows: list[int], *, copies: bool = False) -> Tensor:
    """Some rows of logits, as a copy; all rows are copied only if `copies`."""
    if len(rows) < len(logits):
        return logits[to_device(rows, logits.device)]
    return logits.clone() if copies else logits


def _emptied_rows(logits: Tensor, rows: list[int], *, are_kept: bool) -> Callable[[Tensor], None]:
    """A function that replaces NON_FINITE by NOTHING_LEFT in drawn tokens [num_rows], in place.

    Args:
        logits: [num_rows, vocab_size], as returned by the model.
        rows: rows that options may mask.
        are_kept: True if the logits are not overwritten before the draw. Then a CPU reads them only for rows without a
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
