"""Turns rows of logits into tokens: greedy, or Gumbel-max with noise that is a pure function of the request.

The noise of a token depends on (seed, position, token id) alone, so a request draws the same tokens alone or in a
crowd, chunked, preempted or resumed, as far as its logits are equal.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.batch import NON_FINITE, NOTHING_LEFT
from nanovllm.kernels.gumbel_draw import draw_on_gpu
from nanovllm.sampling.logprobs import StepReport
from nanovllm.sampling.penalties import LatestTokens, change_logits, to_device
from nanovllm.sampling_params import SamplingParams
from nanovllm.seeds import GAMMA, MIX_1, MIX_2
from nanovllm.sequence import Sequence

NUCLEUS_WIDTH = 1024  # most probable tokens that are looked at first
FILTERED_AT_ONCE = 128  # rows on a GPU: sorting a vocabulary takes 20 bytes of memory a token

# The noise of each token is made of the idea of SplitMix64 in 32 bits, at a third of the price: counters apart by the
# golden ratio, mixed by Wellons' `lowbias32` once with each half of the row's key.
_GAMMA_32 = 0x9E3779B9
_MIX_32 = (16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)  # shifts, and what follows them


def noise_keys(seeds: SequenceABC[int], positions: SequenceABC[int]) -> NDArray[np.int64]:
    """The keys of requests' noise: [n] from n seeds of 64 bits and the positions of the tokens to be drawn."""
    seed = np.array(seeds, np.uint64) + np.uint64(GAMMA)
    position = (np.array(positions, np.uint64) + np.uint64(1)) * np.uint64(GAMMA)
    return _mixed(_mixed(seed) ^ _mixed(position)).view(np.int64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix64` of an array."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(MIX_2)
    return values ^ (values >> np.uint64(31))


def _signed_32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def token_counters(vocab_size: int, device: torch.device) -> Tensor:
    """[vocab_size] int32: each token id's counter."""
    return torch.arange(1, vocab_size + 1, dtype=torch.int32, device=device) * _signed_32(_GAMMA_32)


def _mixed_32(values: Tensor) -> Tensor:
    """int32 values, mixed such that each bit of the outcome depends on all of theirs; overwritten."""
    for shift, factor in _MIX_32:
        values ^= (values >> shift) & ((1 << (32 - shift)) - 1)  # torch shifts the sign in
        if factor != 1:
            values *= _signed_32(factor)
    return values


def gumbel_noise(keys: Tensor, counters: Tensor) -> Tensor:
    """Standard Gumbel noise for every token of every row.

    Args:
        keys: [num_rows] int64, from `noise_keys`.
        counters: [vocab_size] int32, from `token_counters`.

    Returns [num_rows, vocab_size] float32. Gumbel is -log(E) for an exponential E = -log(1 - u). The large values,
    which decide, come from small u; u has 31 bits and float32 resolves small numbers finely, so that they are exact to
    the end of the range, 22.2 (a 24-bit uniform near 1 would end at 16.6).
    """
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    bits = _mixed_32(_mixed_32(counters + low[:, None]).add_(high[:, None]))
    uniform = ((bits >> 1) & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """What tokens are drawn with, besides their logits.

    noise_keys: [num_rows] int64, from `noise_keys`.
    inverse_temperatures: [num_rows] float32; 1 for greedy rows.
    noise_scales: [num_rows] float32: 1, or 0 for greedy rows.
    """

    noise_keys: NDArray[np.int64]
    inverse_temperatures: NDArray[np.float32]
    noise_scales: NDArray[np.float32]

    @classmethod
    def of(cls, sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> DrawInputs:
        """Args: as of `Sampler.sample`."""
        temperatures = np.array([sequence.params.temperature for sequence in sequences], np.float32)
        scales = (temperatures > 0).astype(np.float32)
        inverse = np.reciprocal(np.where(temperatures > 0, temperatures, np.float32(1.0)))
        return cls(noise_keys([sequence.seed for sequence in sequences], positions), inverse, scales)


def draw(
    logits: Tensor, noise_keys: Tensor, inverse_temperatures: Tensor, noise_scales: Tensor, *, compiles: bool = False
) -> Tensor:
    """One token per row of logits [num_rows, vocab_size] by the Gumbel-max rule; the others are as in `DrawInputs`.

    Returns [num_rows] int64; NON_FINITE where a row holds NaN or infinity. With `compiles`, on a GPU, in one pass.
    """
    if compiles:
        return draw_on_gpu(
            logits, noise_keys, inverse_temperatures, noise_scales, gamma=_signed_32(_GAMMA_32), non_finite=NON_FINITE
        )
    noise = gumbel_noise(noise_keys, token_counters(logits.shape[1], logits.device))
    scores = logits.float() * inverse_temperatures[:, None] + noise_scales[:, None] * noise
    best, token_ids = scores.max(dim=-1)
    return torch.where(best.isfinite(), token_ids, NON_FINITE)


class Sampler:
    """Keeps nothing about requests: everything comes with the call.

    Args:
        compiles: draw by a kernel of our own (on a GPU).
    """

    def __init__(self, *, compiles: bool = False) -> None:
        self.draw = partial(draw, compiles=compiles)

    def sample(
        self,
        logits: Tensor,
        sequences: SequenceABC[Sequence],
        positions: SequenceABC[int],
        latest: LatestTokens | None = None,
        report: StepReport | None = None,
    ) -> Tensor:
        """Draw one token per row.

        Args:
            logits: [num_rows, vocab_size], any float dtype; may be overwritten.
            sequences: whose rows they are.
            positions: the position of the token to be drawn, per row.
            latest: the token before it, per row, where the host may not know it yet.
            report: takes the log-probabilities that requests ask for, and the errors of their own functions.

        Returns [num_rows] int64 on the logits' device; NON_FINITE where a row holds NaN or infinity, NOTHING_LEFT where
        what its request forbids is all that there was.
        """
        report = report or StepReport()
        device = logits.device
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
        raw = logits[to_device(reported, device)] if reported else None  # a copy: what follows overwrites them
        is_sound = logits[to_device(limited, device)].amax(dim=-1).isfinite() if limited else None
        self._suppress_stop_tokens(logits, sequences, early)
        logits = change_logits(logits, sequences, positions, latest, report.errors)
        token_ids = self._sample_changed(logits, sequences, positions)
        if is_sound is not None:
            places = to_device(limited, device)
            chosen = token_ids[places]
            token_ids[places] = chosen.masked_fill_(is_sound & (chosen == NON_FINITE), NOTHING_LEFT)
        if raw is not None:
            report.add_sampled([sequences[row] for row in reported], raw, token_ids[to_device(reported, device)])
        return token_ids

    def _sample_changed(self, logits: Tensor, sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> Tensor:
        """Draw from logits that are as the requests want them before the temperature."""
        inputs = DrawInputs.of(sequences, positions)
        if logits.device.type == "cpu":
            return _sample_on_cpu(logits, sequences, inputs)
        for row, sequence in enumerate(sequences):
            if sequence.params.is_cold:  # relative to the best token, so that the noise is not lost to rounding
                logits[row] -= logits[row].max()
        filtered = [row for row, sequence in enumerate(sequences) if sequence.params.has_filters]
        device = logits.device
        for rows in (filtered[i : i + FILTERED_AT_ONCE] for i in range(0, len(filtered), FILTERED_AT_ONCE)):
            places = to_device(rows, device)
            chosen = logits[places]
            inverse = to_device(inputs.inverse_temperatures[rows], device)
            scaled = _scaled(chosen, inverse, [sequences[row].params for row in rows])
            logits[places] = chosen.masked_fill_(scaled == -torch.inf, -torch.inf)
        arrays = inputs.noise_keys, inputs.inverse_temperatures, inputs.noise_scales
        return self.draw(logits, *(to_device(array, device) for array in arrays))

    @staticmethod
    def _suppress_stop_tokens(logits: Tensor, sequences: SequenceABC[Sequence], early: list[int]) -> None:
        rows, columns = [], []
        for row in early:
            rows += [row] * len(sequences[row].stop_token_ids)
            columns += list(sequences[row].stop_token_ids)
        if rows:
            places = to_device(rows, logits.device), to_device(columns, logits.device)
            logits.index_put_(places, logits.new_full((), -torch.inf))  # assigned a Python number, it waits for a GPU


def _sample_on_cpu(logits: Tensor, sequences: SequenceABC[Sequence], inputs: DrawInputs) -> Tensor:
    """`draw` in a processor's way: greedy rows cost no noise, others are made and used row by row within its cache."""
    best, token_ids = logits.max(dim=-1)  # max passes a NaN on; a row of all -inf has no token to give
    rows = np.flatnonzero(inputs.noise_scales).tolist()
    if rows:
        chosen = logits if len(rows) == len(sequences) else logits[rows]
        inverse = torch.from_numpy(inputs.inverse_temperatures[rows])
        scores = _scaled(chosen, inverse, [sequences[row].params for row in rows])
        keys, counters = (
            torch.from_numpy(inputs.noise_keys[rows]),
            token_counters(logits.shape[1], logits.device),
        )
        pairs = zip(scores.split(1), keys.split(1), strict=True)
        token_ids[rows] = torch.cat([(row + gumbel_noise(key, counters)).argmax(dim=-1) for row, key in pairs])
    return token_ids.masked_fill_(~best.isfinite(), NON_FINITE)


def _scaled(logits: Tensor, inverse_temperatures: Tensor, params: list[SamplingParams]) -> Tensor:
    """Logits as `draw` scales them, float32, with -inf for the tokens that the requests' filters drop."""
    scaled = (logits.float() - logits.amax(dim=-1, keepdim=True).float()) * inverse_temperatures[:, None]
    return keep_likely(scaled, [p.top_k for p in params], [p.top_p for p in params], [p.min_p for p in params])


def keep_likely(logits: Tensor, top_k: list[int], top_p: list[float], min_p: list[float]) -> Tensor:
    """Set the logits of unlikely tokens to -inf: top-k, then top-p of what is left, then min-p (as `transformers`).

    Each filter comes down to the smallest logit that it keeps, so tokens as probable as the last one kept stay too,
    whatever their order. Rows that do not use a filter cost nothing for it.

    Args:
        logits: [num_rows, vocab_size] float32, after the temperature; overwritten.
        top_k: per row; all tokens if it is below 1.
        top_p, min_p: per row.
    """
    vocab_size, device = logits.shape[1], logits.device
    rows = [row for row, k in enumerate(top_k) if 0 < k < vocab_size]
    if rows:
        counts = to_device([top_k[row] for row in rows], device)
        largest = logits[to_device(rows, device)].topk(max(top_k[row] for row in rows)).values
        _drop_below(logits, rows, largest.gather(1, counts[:, None] - 1))
    rows = [row for row, p in enumerate(top_p) if p < 1.0]
    if rows:
        shares = to_device([top_p[row] for row in rows], device)
        _drop_below(logits, rows, _nucleus_floor(logits[to_device(rows, device)], shares))
    rows = [row for row, p in enumerate(min_p) if p > 0.0]
    if rows:
        shares = to_device([min_p[row] for row in rows], device)[:, None]
        _drop_below(logits, rows, logits[to_device(rows, device)].amax(dim=-1, keepdim=True) + shares.log())
    return logits


def _drop_below(logits: Tensor, rows: list[int], floor: Tensor) -> None:
    """Set what lies below floor [len(rows), 1] to -inf, in place."""
    if len(rows) == len(logits):
        logits.masked_fill_(logits < floor, float("-inf"))
    else:
        places = to_device(rows, logits.device)
        chosen = logits[places]
        logits[places] = chosen.masked_fill_(chosen < floor, float("-inf"))


def _nucleus_floor(logits: Tensor, top_p: Tensor) -> Tensor:
    """[num_rows, 1]: the logit of the token with which the mass of the most probable ones reaches top_p [num_rows]."""
    vocab_size = logits.shape[1]
    total = logits.logsumexp(dim=-1, keepdim=True)
    # A nucleus is nearly always small, and finding the largest few costs a CPU a tenth of a sort. A GPU sorts fast, and
    # asking which rows need more would make the host wait for it.
    width = min(vocab_size, NUCLEUS_WIDTH) if logits.device.type == "cpu" else vocab_size
    floor, is_reached = _crossing(logits.topk(width).values, total, top_p[:, None])
    if width < vocab_size and not is_reached.all():
        rows = (~is_reached[:, 0]).nonzero()[:, 0]
        ordered = logits[rows].sort(dim=-1, descending=True).values
        floor[rows] = _crossing(ordered, total[rows], top_p[rows, None])[0]
    return floor


def _crossing(ordered: Tensor, total: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the ordered logits whose cumulative mass reaches top_p (else the last), and whether one does."""
    reached = (ordered - total).exp_().cumsum(dim=-1)
    num_before = (reached < top_p).sum(dim=-1, keepdim=True)  # tokens that leave something lacking
    last = ordered.shape[1] - 1
    return ordered.gather(1, num_before.clamp(max=last)), num_before <= last
