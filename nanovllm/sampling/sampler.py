"""Samples tokens from rows of logits: greedy, or Gumbel-max with noise that is a pure function of the request.

A token's noise depends only on (seed, position, token id). So with equal logits a request draws the same tokens in any
batch, whether chunked, preempted or resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from nanovllm.core.batch import NON_FINITE, NOTHING_LEFT, ScheduledBatch
from nanovllm.core.batch_layout import BatchLayout
from nanovllm.core.sequence import Sequence
from nanovllm.process.device import find_kernel
from nanovllm.sampling.draw import DrawInputs, draw, draw_on_cpu, floors_by_sort
from nanovllm.sampling.filters import FILTERS
from nanovllm.sampling.noise import GAMMA_32, signed_32

Draw = Callable[[Tensor, SequenceABC[Sequence], SequenceABC[int]], Tensor]  # arguments and result: see `Sampler.sample`


class StepReport(Protocol):
    """Results of a step besides its tokens."""

    @property
    def needs_logits(self) -> bool:
        """Whether any row needs logits."""

    def to_host(self) -> StepReport:
        """Copy all results to the host, asynchronously; they arrive with the step's tokens."""

    def record(self, sequences: SequenceABC[Sequence], token_ids: list[int]) -> None:
        """Write results into the sequences of the step's samples, right before `Scheduler.update`."""


class LogitsStage:
    """Serves options beyond temperature and filters; this stage serves none, and refuses them."""

    def begin_report(self, batch: ScheduledBatch, layout: BatchLayout) -> StepReport:
        """The report of a step in which some sequence is not plain."""
        raise _refused([entry.sequence for entry in batch.entries])

    def inputs(self, layout: BatchLayout, sequences: SequenceABC[Sequence], previous: Tensor | None) -> Any:
        """Inputs of `apply` for these sampled rows; `previous` has the tokens of the step before, on the device."""

    def apply(
        self,
        draw: Draw,
        logits: Tensor,
        sequences: SequenceABC[Sequence],
        positions: SequenceABC[int],
        inputs: Any,
        report: Any,
    ) -> Tensor:
        """Tokens of these rows as `Sampler.sample` returns them, by `draw` of changed logits."""
        raise _refused(sequences)


def _refused(sequences: SequenceABC[Sequence]) -> ValueError:
    asking = next(sequence for sequence in sequences if not sequence.is_plain)
    return ValueError(
        f"request {asking.request_id!r} has options besides temperature and filters, which this engine was built "
        "without; leave them out."
    )


class Sampler:
    """Samples rows of logits; stateless with respect to requests.

    Args:
        compiles: use our GPU kernels.
        row_kernels: C++ kernels for CPUs, `kernels.cpp_sampling.RowKernels`.
        build_stage: builder of the stage, called with `by_kernels` and `row_kernels`; None builds a `LogitsStage`.
    """

    def __init__(
        self,
        *,
        compiles: bool = False,
        row_kernels: Any = None,
        build_stage: Callable[..., LogitsStage] | None = None,
    ) -> None:
        self._row_kernels = row_kernels
        self.stage = LogitsStage() if build_stage is None else build_stage(by_kernels=compiles, row_kernels=row_kernels)
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
        inputs: Any = None,
        report: Any = None,
    ) -> Tensor:
        """Draw one token per row.

        Args:
            logits: [num_rows, vocab_size], any float dtype; may be overwritten.
            sequences: the sequence of each row.
            positions: position of the token to be drawn, per row.
            inputs: the stage's `inputs`; None if the host knows all tokens.
            report: the stage's report; None for plain sequences, or if nobody reads it.

        Returns [num_rows] int64 on the logits' device; NON_FINITE for a row with NaN or infinity, NOTHING_LEFT if the
        request's options forbid all tokens.
        """
        if all(sequence.is_plain for sequence in sequences):
            return self._draw(logits, sequences, positions)
        return self.stage.apply(self._draw, logits, sequences, positions, inputs, report)

    def _draw(self, logits: Tensor, sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> Tensor:
        """Draw from logits with all changes before the temperature applied."""
        if not sequences:  # a step of chunks alone
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        inputs = DrawInputs.from_sequences(sequences, positions)
        if logits.device.type == "cpu":
            return draw_on_cpu(logits, inputs, self._row_kernels)
        return self.draw(logits, inputs.to_device(logits.device), has_filters=inputs.has_filters())
