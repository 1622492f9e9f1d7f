"""One token per row of logits, by the Gumbel-max rule: the inputs of the draw, and the draw on any device."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from operator import attrgetter
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from nanovllm.core.batch import NON_FINITE
from nanovllm.core.sampling_params import COLD_TEMPERATURE
from nanovllm.core.sequence import Sequence
from nanovllm.process.device import to_device
from nanovllm.sampling.filters import FILTERED_AT_ONCE, FILTERS, keep_likely_by_sort
from nanovllm.sampling.noise import gumbel_noise, noise_keys, token_counters

# The largest that counts: its inverse is a normal number, where 0 x -inf would be NaN.
_MAX_TEMPERATURE = float(2**126)


# Types of the inputs of `draw` besides the logits, in their order in a packed step.
DRAW_DTYPES: dict[str, type[np.generic]] = {
    "noise_keys": np.int64,
    "inverse_temperatures": np.float32,
    "noise_scales": np.float32,
    **{name: stage.dtype for name, stage in FILTERS.items()},
    "is_cold": np.int32,
}
_options = attrgetter("temperature", *FILTERS)
_Fields: Any = cast(Any, namedtuple("_Fields", list(DRAW_DTYPES)))  # dynamic: opaque to type checkers


class DrawTensors(_Fields):
    """Inputs of `draw` besides the logits, [num_rows] each, on the logits' device. A row of zeros is greedy.

    noise_keys: from `noise.noise_keys`.
    inverse_temperatures: unused in greedy rows.
    noise_scales: 1, or 0 for greedy rows.
    top_k and so on: inputs of the filters, 0 where a filter is off.
    is_cold: 1 for low temperatures: logits are taken relative to the row's maximum, so that noise is not rounded away.
    """

    __slots__ = ()

    @property
    def filters(self) -> list[Any]:
        """Inputs of the filters, in order of application."""
        return [getattr(self, name) for name in FILTERS]


class DrawInputs(DrawTensors):
    """Inputs of `draw` on the host, as NumPy arrays."""

    __slots__ = ()

    @classmethod
    def from_sequences(cls, sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> DrawInputs:
        """Inputs for sequences and positions as in `Sampler.sample`."""
        # Runs in every step: a flat iterator of plain attributes is the fastest way to fill an array.
        values = itertools.chain.from_iterable(map(_options, [sequence.params for sequence in sequences]))
        num_options = 1 + len(FILTERS)
        table = np.fromiter(values, np.float64, num_options * len(sequences)).reshape(-1, num_options).T
        temperatures, has_noise = table[0], table[0] > 0
        seeds = [sequence.seed for sequence in sequences] if has_noise.any() else None
        inverse = np.reciprocal(np.where(has_noise, temperatures, 1.0).clip(max=_MAX_TEMPERATURE).astype(np.float32))
        return cls(
            np.zeros(len(sequences), np.int64) if seeds is None else noise_keys(seeds, positions),
            inverse,
            has_noise.astype(np.float32),
            *(
                (stage.encode(option) * has_noise).astype(stage.dtype)
                for stage, option in zip(FILTERS.values(), table[1:], strict=True)
            ),
            (has_noise & (temperatures < COLD_TEMPERATURE)).astype(np.int32),
        )

    def has_filters(self) -> bool:
        """Whether any row has a filter or is cold."""
        return any(values.any() for values in (*self.filters, self.is_cold))

    def to_device(self, device: torch.device) -> DrawTensors:
        """Copy to a device in one asynchronous transfer."""
        words = to_device(np.concatenate([values.view(np.int32) for values in self]), device)
        parts = words.split([values.nbytes // 4 for values in self])
        return DrawTensors(*(p.view(torch.from_numpy(v).dtype) for p, v in zip(parts, self, strict=True)))


def draw(logits: Tensor, inputs: DrawTensors, *, has_filters: bool = True) -> Tensor:
    """Draw one token per row of logits [num_rows, vocab_size] by the Gumbel-max rule, after the filters.

    There is no synchronisation and no data-dependent shape, so a CUDA graph can capture it.

    Args:
        has_filters: False if no row has a filter and none is cold: saves a sort.

    Returns [num_rows] int64; NON_FINITE for a row with NaN or infinity.
    """
    return torch.cat([_draw_piece(rows, own, has_filters) for rows, own in pieces(logits, inputs)])


def pieces(logits: Tensor, inputs: DrawTensors) -> Iterator[tuple[Tensor, DrawTensors]]:
    for rows, *own in zip(*(tensor.split(FILTERED_AT_ONCE) for tensor in (logits, *inputs)), strict=True):
        yield rows, DrawTensors(*own)


def _draw_piece(logits: Tensor, inputs: DrawTensors, has_filters: bool) -> Tensor:
    if has_filters:
        scores, _ = levels_of(logits, inputs)
        keep_likely_by_sort(scores, inputs.filters)
    else:
        scores = logits.float() * inputs.inverse_temperatures.where(inputs.noise_scales > 0, 1.0)[:, None]
    noise = gumbel_noise(inputs.noise_keys, token_counters(logits.shape[1], logits.device))
    best, token_ids = (scores + inputs.noise_scales[:, None] * noise).max(dim=-1)
    return torch.where(best.isfinite(), token_ids, NON_FINITE)


def levels_of(logits: Tensor, inputs: DrawTensors) -> tuple[Tensor, Tensor]:
    """Levels (logits - offset) / temperature in float32, and offsets: maxima of rows with filters or cold, else 0."""
    logits = logits.float()
    is_relative = torch.stack([values > 0 for values in (*inputs.filters, inputs.is_cold)]).any(dim=0)
    offsets = logits.amax(dim=-1).masked_fill(~is_relative, 0.0)
    inverse = inputs.inverse_temperatures.where(inputs.noise_scales > 0, 1.0)
    return (logits - offsets[:, None]) * inverse[:, None], offsets
