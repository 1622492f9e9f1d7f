"""Samples tokens from rows of logits: greedy, or Gumbel-max with noise that is a pure function of the request.

A token's noise depends only on (seed, position, token id). So with equal logits a request draws the same tokens in any
batch, whether chunked, preempted or resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.core.batch import NON_FINITE, NOTHING_LEFT
from nanovllm.core.sequence import Sequence
from nanovllm.process.device import find_kernel, to_device
from nanovllm.sampling.draw import DrawInputs, draw, draw_on_cpu, floors_by_sort
from nanovllm.sampling.emptied_rows import emptied_rows
from nanovllm.sampling.filters import FILTERS
from nanovllm.sampling.logprobs import StepLogprobs
from nanovllm.sampling.noise import GAMMA_32, signed_32
from nanovllm.sampling.penalties import LatestTokens, change_logits


class Sampler:
    """Samples rows of logits; stateless with respect to requests.

    Args:
        compiles: use our GPU kernels.
        row_kernels: C++ kernels for CPUs, `kernels.cpp_sampling.RowKernels`.
    """

    def __init__(self, *, compiles: bool = False, row_kernels: Any = None) -> None:
        self._row_kernels = row_kernels
        self._change_logits = partial(change_logits, by_kernels=compiles, row_kernels=row_kernels)
        kernel = find_kernel("gumbel_draw", "draw_on_gpu") if compiles else None
        self.draw: Callable[..., Tensor] = draw
        if kernel is not None:
            self.draw = partial(kernel, gamma=signed_32(GAMMA_32), non_finite=NON_FINITE, nothing_left=NOTHING_LEFT)
            if FILTERS.keys() - (find_kernel("filter_floors", "FILTERS") or ()):
                self.draw = partial(self.draw, floors_of=floors_by_sort)

    def draw_inputs(self, sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> DrawInputs | None:
        """The inputs of `draw` for these rows; None if they need `sample`."""
        return DrawInputs.from_sequences(sequences, positions)

    def sample(
        self,
        logits: Tensor,
        sequences: SequenceABC[Sequence],
        positions: SequenceABC[int],
        latest: LatestTokens | None = None,
        report: StepLogprobs | None = None,
    ) -> Tensor:
        """Draw one token per row.

        Args:
            logits: [num_rows, vocab_size], any float dtype; may be overwritten.
            sequences: the sequence of each row.
            positions: position of the token to be drawn, per row.
            latest: the previous token of each row, which the host may not have read yet.
            report: receives requested logprobs, and errors of requests' logits processors.

        Returns [num_rows] int64 on the logits' device; NON_FINITE for a row with NaN or infinity, NOTHING_LEFT if the
        request's options forbid all tokens.
        """
        if all(sequence.is_plain for sequence in sequences):
            return self._draw(logits, sequences, positions)
        report = report or StepLogprobs()
        reported, early, limited = [], [], []  # rows
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
        mark_emptied = emptied_rows(logits, limited, are_kept=logits.dtype != torch.float32 and not early)
        self._suppress_stop_tokens(logits, sequences, early)
        logits = self._change_logits(logits, sequences, positions, latest, report.errors)
        changed = [row for row in early if sequences[row].params.logits_processors]  # may have raised them again
        self._suppress_stop_tokens(logits, sequences, changed)
        token_ids = self._draw(logits, sequences, positions)
        mark_emptied(token_ids)
        if raw is not None:
            num_top = max(sequences[row].params.logprobs or 0 for row in reported)
            report.add_sampled(reported, num_top, raw, token_ids[to_device(reported, logits.device)])
        return token_ids

    def _draw(self, logits: Tensor, sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> Tensor:
        """Draw from logits with all changes before the temperature applied."""
        if not sequences:  # a step of chunks alone
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        inputs = DrawInputs.from_sequences(sequences, positions)
        if logits.device.type == "cpu":
            return draw_on_cpu(logits, inputs, self._row_kernels)
        return self.draw(logits, inputs.to_device(logits.device), has_filters=inputs.has_filters())

    @staticmethod
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
