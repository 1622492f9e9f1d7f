"""Penalties, masks and log-probabilities in a captured head: their buffers, at fixed addresses."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.device import find_kernel
from nanovllm.fast.gpu.late_draw import LateDraw
from nanovllm.fast.gpu.mask_buffer import build_mask_buffer
from nanovllm.fast.gpu.step_inputs import Packing
from nanovllm.features.costs.buckets import HeadShape, round_up
from nanovllm.features.logprobs.logprobs import MOST_BY_KERNEL, Measured, PackedMeasured, StepLogprobs
from nanovllm.features.penalties.penalties import (
    PENALTY_INPUTS,
    LatestTokens,
    clear_entries,
    penalty_entries,
    write_tokens,
)
from nanovllm.sampler import DrawInputs
from nanovllm.sequence import Sequence

_LEAST_TOKENS = 2**20  # fewest tokens of the buffer; it grows when a step needs more, and graphs are captured anew
_NUM_TOPS = [0, 5, 20, MOST_BY_KERNEL]  # a graph measures so many of the most probable tokens


class DrawExtras(NamedTuple):
    """Options of a step's rows that a captured graph applies in addition to `draw`.

    num_top: logprobs of the drawn token and of this many top tokens; None: no logprobs.
    has_masks: True if rows have masks of structured outputs.
    """

    penalises: bool = False
    num_top: int | None = None
    has_masks: bool = False


def draw_extras(sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> DrawExtras | None:
    """The extras of these rows for a captured graph; None if they need `Sampler.sample`."""
    penalises = False
    num_top = None
    has_masks = False
    for sequence, position in zip(sequences, positions, strict=True):
        params = sequence.params
        if sequence.changes_logits:
            if params.needs_host_sampler:
                return None
            penalises = penalises or params.penalises
            has_masks = has_masks or params.structured_output is not None
        if position - sequence.num_prompt_tokens < params.min_tokens or (params.reports_draws and params.changes_draws):
            return None
        if params.logprobs is not None:
            num_top = max(num_top or 0, params.logprobs)
    return DrawExtras(penalises, num_top, has_masks)


class HeadExtras:
    """The buffers of one engine's heads, allocated when a step first needs them.

    Invariant: a head of any number of samples may read them, whatever number the last step had: rows of all samples
    have one place, and each step writes all of them.
    """

    def __init__(self, max_samples: int, device: torch.device) -> None:
        self._max_samples = max_samples
        self._device = device
        self.draw_inputs: Callable[[SequenceABC[Sequence], SequenceABC[int]], DrawInputs | None]
        self.draw_inputs = DrawInputs.from_sequences
        self._penalise = find_kernel("penalties", "penalise")
        self._measure = find_kernel("logprobs", "measure")
        self._masks = build_mask_buffer(max_samples, device)
        self._packing = Packing(PENALTY_INPUTS, {"samples": max_samples})
        self._penalties: Tensor | None = None  # buffer of packed penalties
        self._words: Tensor | None = None  # buffer of `Measured`
        # Draw of the step launched last: a step that is undone drops it.
        self._late_draw: Callable[[], LateDraw | None] = lambda: None

    def needed(self, sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> DrawExtras | None:
        """The head's work for these rows besides the draw; None if they need the host's sampler."""
        extras = draw_extras(sequences, positions)
        if extras is None or (extras.penalises and self._penalise is None):
            return None
        if extras.has_masks and self._masks is None:
            return None
        if extras.num_top is None:
            return extras
        if extras.num_top > MOST_BY_KERNEL or self._measure is None:
            return None
        return extras._replace(num_top=round_up(_NUM_TOPS, extras.num_top))

    def begin_draw(
        self,
        head: HeadShape,
        sequences: SequenceABC[Sequence],
        positions: SequenceABC[int],
        draw: Callable[[], Tensor],
        report: StepLogprobs | None,
    ) -> Any:
        """Draw; late, while threads fill masks: the host packs the next step meanwhile.

        Args:
            draw: launches the draw, after `upload`.
            report: log-probabilities of the step, see `PendingTokens`.
        """
        # Penalties are sent by `upload`, from tokens that the host knows by then.
        if not head.has_masks or self._masks is None or head.penalises or not self._masks.begin(sequences, positions):
            return draw()
        late_draw = LateDraw(draw, report, on_drop=self._masks.wait)  # another step may use the matchers then
        self._late_draw = weakref.ref(late_draw)
        return late_draw

    def launch_late_draw(self) -> None:
        """Launch the draw of the step before, if it is late and the step was not undone."""
        if (late_draw := self._late_draw()) is not None:
            late_draw.launch()

    def drop_late_draw(self) -> None:
        """Forget a draw that is not launched yet, of a step that was undone."""
        self._late_draw = lambda: None
        if self._masks is not None:
            self._masks.wait()

    def upload(
        self,
        head: HeadShape,
        sequences: SequenceABC[Sequence],
        positions: SequenceABC[int],
        latest: Callable[[], LatestTokens],
        errors: dict[Sequence, str],
    ) -> bool:
        """Send the head's inputs; returns whether the penalties' buffer moved: captured heads are stale.

        Args:
            errors: takes the errors of grammars.
        """
        if head.has_masks:
            assert self._masks is not None
            self._masks.upload(sequences, positions, errors)
        return head.penalises and self._upload_penalties(head, sequences, positions, latest())

    def _upload_penalties(
        self, head: HeadShape, sequences: SequenceABC[Sequence], positions: SequenceABC[int], latest: LatestTokens
    ) -> bool:
        rows = [row for row, sequence in enumerate(sequences) if sequence.params.penalises]
        own, num_tokens = penalty_entries(rows, sequences, positions, latest)
        num_words = self._packing.num_words + num_tokens
        is_new = self._penalties is None or num_words > len(self._penalties)
        if is_new:
            capacity = max(_LEAST_TOKENS, 1 << num_tokens.bit_length())
            with torch.inference_mode(False):
                self._penalties = torch.zeros(
                    self._packing.num_words + capacity, dtype=torch.int32, device=self._device
                )
        assert self._penalties is not None
        # PyTorch's allocator reuses pinned memory only when the copy from it is done.
        buffer = torch.empty(num_words, dtype=torch.int32, device="cpu", pin_memory=True)
        to = self._packing.views(buffer.numpy())
        clear_entries(to.entries)
        to.entries[rows] = own
        write_tokens(own, rows, sequences, to.tokens)
        self._penalties[:num_words].copy_(buffer, non_blocking=True)
        return is_new

    def clear(self) -> None:
        """Give all rows the values of samples without options, for a head that no step waits for."""
        if self._penalties is not None:
            clear_entries(self._packing.views(self._penalties).entries)
        if self._masks is not None:
            self._masks.clear()

    def penalised(self, logits: Tensor, previous: Tensor) -> Tensor:
        """A copy of logits [num_samples, vocab_size] in float32, with the penalties of the uploaded step.

        Args:
            previous: tokens that the step before sampled.
        """
        assert self._penalties is not None and self._penalise is not None
        changed = logits.to(torch.float32, copy=True)
        inputs = self._packing.views(self._penalties)
        self._penalise(changed, inputs.entries[: len(logits)], inputs.tokens, previous)
        return changed

    def draw_options(self, head: HeadShape) -> dict[str, Any]:
        """Keyword arguments of `Sampler.draw`."""
        if not head.has_masks:
            return {"has_filters": head.has_filters}
        assert self._masks is not None
        return {"has_filters": head.has_filters, "masks": self._masks.views(head.num_samples)}

    def measure(self, logits: Tensor, token_ids: Tensor, num_top: int) -> None:
        """Store the log-probabilities of drawn tokens [num_samples] for `measured`."""
        assert self._measure is not None
        if self._words is None:
            with torch.inference_mode(False):
                num_words = Measured.num_words(self._max_samples, MOST_BY_KERNEL)
                self._words = torch.zeros(num_words, dtype=torch.int32, device=self._device)
        to = Measured.from_words(self._words, len(logits), num_top)
        for part, values in zip(
            (to.token_ids, to.logprobs, to.ranks), self._measure(logits, token_ids, num_top), strict=True
        ):
            part.copy_(values)

    def measured(self, head: HeadShape, count: int) -> PackedMeasured:
        """Log-probabilities computed by the last head, for the first `count` samples."""
        assert self._words is not None and head.num_top is not None
        return PackedMeasured(self._words, head.num_samples, head.num_top, count)
