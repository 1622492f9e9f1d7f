"""Turns rows of logits into tokens: greedy, or Gumbel-max with noise that is a pure function of the request.

The noise of a token depends on (seed, position, token id) alone, so a request draws the same tokens alone or in a
crowd, chunked, preempted or resumed, if its logits are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.batch import NON_FINITE, NOTHING_LEFT
from nanovllm.device import find_kernel, to_device
from nanovllm.sampling.filters import FILTERED_AT_ONCE, keep_likely
from nanovllm.sampling.logprobs import StepLogprobs
from nanovllm.sampling.noise import GAMMA_32, gumbel_noise, noise_keys, signed_32, token_counters
from nanovllm.sampling.penalties import LatestTokens, change_logits
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """The inputs of sampling besides the logits.

    noise_keys: [num_rows] int64, from `noise_keys`.
    inverse_temperatures: [num_rows] float32; 1 for greedy rows.
    noise_scales: [num_rows] float32: 1, or 0 for greedy rows.
    """

    noise_keys: NDArray[np.int64]
    inverse_temperatures: NDArray[np.float32]
    noise_scales: NDArray[np.float32]

    @classmethod
    def from_sequences(cls, sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> DrawInputs:
        """The arguments are those of `Sampler.sample`."""
        temperatures = np.array([sequence.params.temperature for sequence in sequences], np.float32)
        scales = (temperatures > 0).astype(np.float32)
        inverse = np.reciprocal(np.where(temperatures > 0, temperatures, np.float32(1.0)))
        return cls(noise_keys([sequence.seed for sequence in sequences], positions), inverse, scales)


def draw(logits: Tensor, noise_keys: Tensor, inverse_temperatures: Tensor, noise_scales: Tensor) -> Tensor:
    """One token per row of logits [num_rows, vocab_size] by the Gumbel-max rule; the others are as in `DrawInputs`.

    Returns [num_rows] int64; NON_FINITE where a row holds NaN or infinity.
    """
    noise = gumbel_noise(noise_keys, token_counters(logits.shape[1], logits.device))
    scores = logits.float() * inverse_temperatures[:, None] + noise_scales[:, None] * noise
    best, token_ids = scores.max(dim=-1)
    return torch.where(best.isfinite(), token_ids, NON_FINITE)


def needs_logits_only(sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> bool:
    """Whether `draw` alone samples these rows, as within a captured graph; else they need `Sampler.sample`."""
    return not any(
        sequence.params.changes_logits
        or sequence.params.has_filters
        or sequence.params.is_cold
        or sequence.params.logprobs is not None
        or position - sequence.num_prompt_tokens < sequence.params.min_tokens
        for sequence, position in zip(sequences, positions, strict=True)
    )


class Sampler:
    """Samples rows of logits; keeps no state about requests.

    Args:
        compiles: draw by a kernel of our own (on a GPU).
    """

    def __init__(self, *, compiles: bool = False) -> None:
        kernel = find_kernel("gumbel_draw", "draw_on_gpu") if compiles else None
        self.draw: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = draw
        if kernel is not None:  # reads the logits once
            self.draw = partial(kernel, gamma=signed_32(GAMMA_32), non_finite=NON_FINITE)

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
            sequences: whose rows they are.
            positions: the position of the token to be drawn, per row.
            latest: the token before it, per row, where the host may not know it yet.
            report: takes the log-probabilities that requests ask for, and the errors of their own functions.

        Returns [num_rows] int64 on the logits' device; NON_FINITE where a row holds NaN or infinity, NOTHING_LEFT where
        the request's own rules leave no token.
        """
        report = report or StepLogprobs()
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
        inputs = DrawInputs.from_sequences(sequences, positions)
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
    """`draw` on a CPU: greedy rows need no noise; that of others is made row by row, within the processor's cache."""
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
