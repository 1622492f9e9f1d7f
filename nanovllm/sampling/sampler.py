"""Samples tokens from rows of logits: greedy, or Gumbel-max with noise that is a pure function of the request.

A token's noise depends only on (seed, position, token id). So with equal logits a request draws the same tokens in any
batch, whether chunked, preempted or resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import Any, Protocol

import torch
from torch import Tensor

from nanovllm.core.batch import ScheduledBatch, StepResults
from nanovllm.core.batch_layout import BatchLayout
from nanovllm.core.sequence import Sequence
from nanovllm.sampling.draw import DrawInputs, draw

Draw = Callable[[Tensor, SequenceABC[Sequence], SequenceABC[int]], Tensor]  # arguments and result: see `Sampler.sample`


class StepReport(StepResults, Protocol):
    """Results of a step besides its tokens, as the forward pass and the draw fill them."""

    @property
    def needs_logits(self) -> bool:
        """Whether any row needs logits."""

    def to_host(self) -> StepReport:
        """Copy all results to the host, asynchronously; they arrive with the step's tokens."""


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
        draw: draw of rows on any device, with the arguments of `draw.draw`; CUDA graphs capture it.
        draw_on_cpu: draw of logits on a CPU from their `DrawInputs`; None for `draw`.
        stage: options beyond temperature and filters; None refuses them.
    """

    def __init__(
        self,
        draw: Callable[..., Tensor] = draw,
        draw_on_cpu: Callable[[Tensor, DrawInputs], Tensor] | None = None,
        stage: LogitsStage | None = None,
    ) -> None:
        self.draw, self._draw_on_cpu = draw, draw_on_cpu
        self.stage = LogitsStage() if stage is None else stage

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
        if self._draw_on_cpu is not None and logits.device.type == "cpu":
            return self._draw_on_cpu(logits, inputs)
        return self.draw(logits, inputs.to_device(logits.device), has_filters=inputs.has_filters())
