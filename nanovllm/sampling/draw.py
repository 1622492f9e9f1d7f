"""One token per row of logits, by the Gumbel-max rule: the inputs of the draw, and its form in torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceABC
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.core.batch import NON_FINITE
from nanovllm.core.sampling_params import COLD_TEMPERATURE
from nanovllm.core.sequence import Sequence
from nanovllm.core.step_inputs import StepInput
from nanovllm.process.device import to_device
from nanovllm.sampling.filters import FILTERED_AT_ONCE, keep_likely_by_sort
from nanovllm.sampling.noise import gumbel_noise, noise_keys, token_counters

_MAX_TOP_K = 2**31 - 1
# The largest that counts: its inverse is a normal number, where 0 x -inf would be NaN.
_MAX_TEMPERATURE = float(2**126)


class DrawTensors(NamedTuple):
    """The inputs of `draw` besides the logits, tensors on their device. A row of zeros is a greedy one.

    noise_keys: [num_rows] int64, from `noise.noise_keys`.
    inverse_temperatures: [num_rows] float32; unused in greedy rows.
    noise_scales: [num_rows] float32: 1, or 0 for greedy rows.
    top_k: [num_rows] int32; 0, or vocab_size and more, for no filter.
    top_p, min_p: [num_rows] float32; 0 for no filter.
    is_cold: [num_rows] int32; 1 where logits count from the row's largest one, so that the noise is not rounded away.
    """

    noise_keys: Any
    inverse_temperatures: Any
    noise_scales: Any
    top_k: Any
    top_p: Any
    min_p: Any
    is_cold: Any


_DTYPES: tuple[type[np.generic], ...] = np.int64, np.float32, np.float32, np.int32, np.float32, np.float32, np.int32
DRAW_INPUTS = tuple(StepInput(n, dtype, ("samples",)) for n, dtype in zip(DrawTensors._fields, _DTYPES, strict=True))


class DrawInputs(DrawTensors):
    """The same on the host, as NumPy arrays."""

    @classmethod
    def from_sequences(cls, sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> DrawInputs:
        """The arguments are those of `Sampler.sample`."""
        # Every step comes here: a flat iterator of plain attributes is the fastest way into an array.
        values = itertools.chain.from_iterable(
            (p.temperature, p.top_k if p.top_k < _MAX_TOP_K else 0, p.top_p, p.min_p)
            for p in [sequence.params for sequence in sequences]
        )
        temperatures, top_k, top_p, min_p = np.fromiter(values, np.float64, 4 * len(sequences)).reshape(-1, 4).T
        has_noise = temperatures > 0
        inverse = np.reciprocal(np.where(has_noise, temperatures, 1.0).clip(max=_MAX_TEMPERATURE).astype(np.float32))
        top_p = np.maximum(top_p.astype(np.float32), np.finfo(np.float32).tiny)  # 0 is no filter
        return cls(
            noise_keys([sequence.seed for sequence in sequences], positions),
            inverse,
            has_noise.astype(np.float32),
            (np.maximum(top_k, 0) * has_noise).astype(np.int32),
            np.where(top_p < 1, top_p, np.float32(0)) * has_noise.astype(np.float32),
            (min_p * has_noise).astype(np.float32),
            (has_noise & (temperatures < COLD_TEMPERATURE)).astype(np.int32),
        )

    def has_filters(self) -> bool:
        """Whether any row needs more than its logits over its temperature."""
        return any(values.any() for values in (self.top_k, self.top_p, self.min_p, self.is_cold))

    def to_device(self, device: torch.device) -> DrawTensors:
        """One copy, for which the host does not wait."""
        words = to_device(np.concatenate([values.view(np.int32) for values in self]), device)
        parts = words.split([values.nbytes // 4 for values in self])
        return DrawTensors(*(p.view(torch.from_numpy(v).dtype) for p, v in zip(parts, self, strict=True)))


def draw(logits: Tensor, inputs: DrawTensors, *, has_filters: bool = True) -> Tensor:
    """One token per row of logits [num_rows, vocab_size] by the Gumbel-max rule, of those that the filters leave.

    The host does not wait and no shape depends on values, so a graph can capture it.

    Args:
        has_filters: False where no row has any, and none is cold: spares a sort.

    Returns [num_rows] int64; NON_FINITE where a row holds NaN or infinity.
    """
    pieces = zip(*(tensor.split(FILTERED_AT_ONCE) for tensor in (logits, *inputs)), strict=True)
    return torch.cat([_draw_piece(rows, DrawTensors(*own), has_filters) for rows, *own in pieces])


def _draw_piece(logits: Tensor, inputs: DrawTensors, has_filters: bool) -> Tensor:
    scores = logits.float()
    has_noise = inputs.noise_scales > 0
    if has_filters:
        is_relative = (inputs.top_k > 0) | (inputs.top_p > 0) | (inputs.min_p > 0) | (inputs.is_cold > 0)
        scores = scores - scores.amax(dim=-1).masked_fill(~is_relative, 0.0)[:, None]
    scores = scores * inputs.inverse_temperatures.where(has_noise, 1.0)[:, None]
    if has_filters:
        scores = keep_likely_by_sort(scores, inputs.top_k, inputs.top_p, inputs.min_p)
    noise = gumbel_noise(inputs.noise_keys, token_counters(logits.shape[1], logits.device))
    best, token_ids = (scores + inputs.noise_scales[:, None] * noise).max(dim=-1)
    return torch.where(best.isfinite(), token_ids, NON_FINITE)


class DrawExtras(NamedTuple):
    """What some rows ask for beside `draw`.

    num_top: log-probabilities of the drawn token and so many of the most probable ones; None for none.
    has_masks: of the tokens that structured outputs allow.
    """

    penalises: bool = False
    num_top: int | None = None
    has_masks: bool = False


def draw_extras(sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> DrawExtras | None:
    """What these rows ask for within a captured graph; None if they need `Sampler.sample`."""
    penalises, num_top, has_masks = False, None, False
    for sequence, position in zip(sequences, positions, strict=True):
        params = sequence.params
        if params.changes_logits:
            if params.needs_host_sampler:
                return None
            penalises = penalises or params.penalises
            has_masks = has_masks or params.structured_output is not None
        if position - sequence.num_prompt_tokens < params.min_tokens:
            return None
        if params.logprobs is not None:
            num_top = max(num_top or 0, params.logprobs)
    return DrawExtras(penalises, num_top, has_masks)
