"""Samples tokens from rows of logits: greedy, or Gumbel-max with noise that is a pure function of the request.

A token's noise depends only on (seed, position, token id). So with equal logits a request draws the same tokens in any
batch, whether chunked, preempted or resumed.
"""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceABC
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm import sampling_params
from nanovllm.batch import NON_FINITE, ScheduledBatch, StepResults
from nanovllm.device import to_device
from nanovllm.layout import BatchLayout
from nanovllm.sampling_params import COLD_TEMPERATURE, GAMMA, MIX_1, MIX_2
from nanovllm.sequence import Sequence

# SplitMix64's scheme in 32 bits, at a third of the cost: counters in steps of the golden ratio, mixed by Wellons'
# `lowbias32` once with each half of the row's key.
GAMMA_32 = 0x9E3779B9
_MIX_32 = (16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)  # (shift, factor) of each round


def noise_keys(seeds: SequenceABC[int], positions: SequenceABC[int]) -> NDArray[np.int64]:
    """Keys of the noise [n], from n 64-bit seeds and the positions of the tokens to be drawn."""
    seed = np.array(seeds, np.uint64) + np.uint64(GAMMA)
    position = (np.array(positions, np.uint64) + np.uint64(1)) * np.uint64(GAMMA)
    return _mixed(_mixed(seed) ^ _mixed(position)).view(np.int64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix64` of each element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(MIX_2)
    return values ^ (values >> np.uint64(31))


def signed_32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def token_counters(vocab_size: int, device: torch.device) -> Tensor:
    """Counters [vocab_size] int32 of the token ids."""
    return torch.arange(1, 1 + vocab_size, dtype=torch.int32, device=device) * signed_32(GAMMA_32)


def _mixed_32(values: Tensor) -> Tensor:
    """Mix int32 values in place, so that each output bit depends on all input bits."""
    for shift, factor in _MIX_32:
        values ^= (values >> shift) & ((1 << (32 - shift)) - 1)  # the mask makes torch's arithmetic shift a logical one
        if factor != 1:
            values *= signed_32(factor)
    return values


def gumbel_noise(keys: Tensor, counters: Tensor) -> Tensor:
    """Standard Gumbel noise for every token of every row.

    Args:
        keys: [num_rows] int64, from `noise_keys`.
        counters: [vocab_size] int32, from `token_counters`.

    Returns [num_rows, vocab_size] float32: -log(E) for an exponential E = -log(1 - u). The large values, which decide
    the draw, come from small u. u has 31 bits, and float32 resolves small numbers finely, so they are exact up to the
    maximum of 22.2 (with a 24-bit uniform near 1 it would be 16.6).
    """
    low = keys.to(torch.int32)
    high = (keys >> 32).to(torch.int32)
    bits = _mixed_32(_mixed_32(counters + low[:, None]).add_(high[:, None]))
    uniform = ((bits >> 1) & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


FILTERED_AT_ONCE = 128  # rows on a GPU without kernels: sorting a vocabulary takes 40 bytes per token

# Coefficients of e^x (polynomial of Cephes' expf, Moshier 1992), with each product and sum rounded to float32.
# `fast/kernels/csrc/sampling/rows.h` computes the same bits, so that both keep the same tokens.
_SERIES = 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1
_ROUNDING = 1.5 * 2**18  # float64 spacing at this number is 2^-34


def masses(levels: Tensor) -> Tensor:
    """Masses: probabilities relative to the best token's, e^level in float32, rounded to multiples of 2^-34.

    Sums over up to 2^19 tokens are thus exact, in any order.

    Args:
        levels: float32, logits minus their row's largest.

    Returns float64 of the same shape.
    """
    levels = levels.clamp(min=-32.0)  # masses below level -25 are 0
    whole = (levels * 1.44269504).add_(12582912.0).sub_(12582912.0)  # the sum with 1.5 * 2^23 rounds to an integer
    rest = levels.sub_(whole * 0.693359375).add_(whole * 2.12194440e-4)
    power = rest * 1.9875691500e-4
    for coefficient in _SERIES[:-1]:
        power.add_(coefficient).mul_(rest)
    power.add_(_SERIES[-1]).mul_(rest).mul_(rest).add_(rest).add_(1.0)
    scale = whole.int().add_(127).bitwise_left_shift_(23).view(torch.float32)
    return power.mul_(scale).double().add_(_ROUNDING).sub_(_ROUNDING)


def least_levels(min_p: Tensor) -> Tensor:
    """Smallest levels (logit minus the row's largest, float32) that min_p keeps; the same in any batch."""
    return min_p.double().log().float()


class Filter(NamedTuple):
    """A sampling stage after the temperature, in torch; kernels name the filters that they implement.

    Args:
        dtype: dtype of its inputs, one a row; 0 turns the filter off.
        encode: function of option values [num_rows] float64 -> inputs, any dtype.
        floor: function of (logits [num_rows, vocab_size] float32 after earlier filters in descending order,
            inputs [num_rows, 1]) -> smallest logit to keep [num_rows, 1], without synchronising with the device.
    """

    dtype: type[np.int32] | type[np.float32]
    encode: Callable[[NDArray[np.float64]], NDArray[Any]]
    floor: Callable[[Tensor, Tensor], Tensor]


def _top_k_floor(ordered: Tensor, top_k: Tensor) -> Tensor:
    last = ordered.shape[1] - 1
    return ordered.gather(1, (top_k - 1).clamp(0, last).long()).masked_fill(top_k > last + 1, -torch.inf)


def _top_p_floor(ordered: Tensor, top_p: Tensor) -> Tensor:
    """The logit at which the cumulative mass of the most probable tokens reaches top_p."""
    total = masses(ordered - ordered[:, :1]).sum(dim=-1, keepdim=True)
    return crossing(ordered, total * top_p)[0]


def crossing(ordered: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(first ordered logit at which the cumulative mass reaches the target, else the last; whether it is reached)."""
    reached = masses(ordered - ordered[:, :1]).cumsum(dim=-1)
    num_before = (reached < target).sum(dim=-1, keepdim=True)  # tokens before the target is reached
    last = ordered.shape[1] - 1
    return ordered.gather(1, num_before.clamp(max=last)), num_before <= last


_FILTERS = {
    "top_k": Filter(np.int32, lambda k: np.where((k > 0) & (k < 2**31 - 1), k, 0), _top_k_floor),
    "top_p": Filter(
        np.float32,
        lambda p: np.where(p.astype(np.float32) < 1, np.maximum(p, np.finfo(np.float32).tiny), 0),
        _top_p_floor,
    ),
    "min_p": Filter(np.float32, lambda p: p, lambda ordered, min_p: ordered[:, :1] + least_levels(min_p)),
}
FILTERS = {name: _FILTERS[name] for name in sampling_params.FILTERS}  # the order of application


def keep_likely_by_sort(logits: Tensor, inputs: list[Tensor]) -> Tensor:
    """Set logits of unlikely tokens to -inf, filter by filter, as in `transformers`.

    Tokens as probable as the last kept one are kept, too. No shape depends on data, so a CUDA graph can capture it.

    Args:
        logits: [num_rows, vocab_size] float32, after the temperature; overwritten.
        inputs: [num_rows] of each filter, 0 where it is off.

    Returns the smallest kept logit of each row, [num_rows, 1]; -inf keeps all.
    """
    ordered = logits.sort(dim=-1, descending=True).values
    floor = torch.full_like(logits[:, :1], -torch.inf)
    for stage, values in zip(FILTERS.values(), inputs, strict=True):
        own = stage.floor(ordered, values[:, None])
        floor = floor.maximum(own.where(values[:, None] > 0, -torch.inf))
        for left in (logits, ordered):
            left.masked_fill_(left < floor, -torch.inf)
    return floor


# Higher temperatures count as this one: its inverse is a normal float32. An inverse of 0 would make NaN of -inf.
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

    noise_keys: keys of the noise, from `noise_keys`.
    inverse_temperatures: 1 / temperature; unused in greedy rows.
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
        temperatures = table[0]
        has_noise = table[0] > 0
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


Draw = Callable[[Tensor, SequenceABC[Sequence], SequenceABC[int]], Tensor]  # arguments and result: see `Sampler.sample`


class StepReport(StepResults, Protocol):
    """Results of a step besides its tokens, such as log-probabilities; the forward pass and the draw fill them."""

    @property
    def needs_logits(self) -> bool:
        """Whether any row needs logits."""

    def to_host(self) -> StepReport:
        """Copy all results to the host, asynchronously; they arrive with the step's tokens."""


class LogitsStage:
    """The stage of sampling that serves options beyond temperature and filters; this default refuses them."""

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
        """Change the logits of these rows, then `draw`; returns tokens as `Sampler.sample` does."""
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
        draw: function with the arguments of `draw`, for rows on any device; CUDA graphs capture it.
        draw_on_cpu: function of logits on a CPU and their `DrawInputs`; None takes `draw`.
        stage: stage for options beyond temperature and filters; None refuses them.
    """

    def __init__(
        self,
        draw: Callable[..., Tensor] = draw,
        draw_on_cpu: Callable[[Tensor, DrawInputs], Tensor] | None = None,
        stage: LogitsStage | None = None,
    ) -> None:
        self.draw = draw
        self._draw_on_cpu = draw_on_cpu
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
