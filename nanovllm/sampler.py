"""Turns rows of logits into tokens: greedy, or Gumbel-max with noise that is a pure function of the request.

The noise of a token depends on (seed, position, token id) alone, so a request draws the same tokens alone or in a
crowd, chunked, preempted or resumed, as far as its logits are equal.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

import torch
from torch import Tensor

from nanovllm.batch import NON_FINITE
from nanovllm.sequence import Sequence

# SplitMix64 (Steele, Lea and Flood 2014, with Stafford's "Mix13" finaliser): a generator whose i-th output is a mixed
# counter, so that any output can be computed by itself.
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK_64 = 2**64 - 1


def mix64(value: int) -> int:
    """SplitMix64's finaliser on a Python int, modulo 2**64."""
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK_64
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK_64
    return value ^ (value >> 31)


def request_seed(engine_seed: int, request_number: int) -> int:
    """The seed of a request that has none of its own: another for each request of an engine."""
    return mix64(mix64(engine_seed + _GAMMA) + (request_number + 1) * _GAMMA)


def noise_key(seed: int, position: int) -> int:
    """The key of one request's noise at one position."""
    return mix64(mix64(seed + _GAMMA) ^ mix64((position + 1) * _GAMMA))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shifted_right(values: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 values (torch shifts the sign in)."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every token of every row.

    Args:
        keys: [num_rows] int64, from `noise_key`.

    Returns [num_rows, vocab_size] float32. Gumbel is -log(E) for an exponential E = -log(1 - u). The large values,
    which decide, come from small u; u has 40 bits and float32 resolves small numbers finely, so that they are exact to
    the end of the range, 28.4 (a 24-bit uniform near 1 would end at 16.6).
    """
    counters = torch.arange(1, vocab_size + 1, device=keys.device) * _signed(_GAMMA)
    bits = keys[:, None] + counters
    bits = (bits ^ _shifted_right(bits, 30)).mul_(_signed(_MIX_1))
    bits = (bits ^ _shifted_right(bits, 27)).mul_(_signed(_MIX_2))
    bits ^= _shifted_right(bits, 31)
    uniform = _shifted_right(bits, 24).to(torch.float32).add_(0.5).mul_(2.0**-40).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


class Sampler:
    """Stateless: everything comes with the call."""

    def sample(self, logits: Tensor, sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> Tensor:
        """Draw one token per row.

        Args:
            logits: [num_rows, vocab_size], any float dtype; may be overwritten.
            sequences: whose rows they are.
            positions: the position of the token to be drawn, per row.

        Returns [num_rows] int64 on the logits' device; NON_FINITE where a row holds NaN or infinity.
        """
        self._suppress_stop_tokens(logits, sequences, positions)
        best, token_ids = logits.max(dim=-1)  # max passes a NaN on; a row of all -inf has no token to give
        rows = [row for row, sequence in enumerate(sequences) if not sequence.params.is_greedy]
        if rows:
            keys = [_signed(noise_key(sequences[row].seed, positions[row])) for row in rows]
            token_ids[rows] = self._draw(logits[rows], [sequences[row] for row in rows], torch.tensor(keys))
        return token_ids.masked_fill_(~best.isfinite(), NON_FINITE)

    @staticmethod
    def _suppress_stop_tokens(logits: Tensor, sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> None:
        rows, columns = [], []
        for row, sequence in enumerate(sequences):
            if positions[row] - sequence.num_prompt_tokens < sequence.params.min_tokens:
                rows += [row] * len(sequence.stop_token_ids)
                columns += list(sequence.stop_token_ids)
        if rows:
            logits[rows, columns] = float("-inf")

    @staticmethod
    def _draw(logits: Tensor, sequences: SequenceABC[Sequence], keys: Tensor) -> Tensor:
        """[num_rows] tokens drawn from the filtered distributions."""
        params = [sequence.params for sequence in sequences]
        device = logits.device
        logits = logits.float()
        # Relative to the best token, so that a low temperature drives the others to -inf and nothing overflows.
        logits = logits - logits.max(dim=-1, keepdim=True).values
        logits /= torch.tensor([p.temperature for p in params], device=device)[:, None]
        filtering = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0]
        if filtering:
            vocab_size = logits.shape[1]
            top_k = [params[row].top_k if params[row].top_k > 0 else vocab_size for row in filtering]
            logits[filtering] = keep_likely(
                logits[filtering],
                torch.tensor(top_k, device=device),
                torch.tensor([params[row].top_p for row in filtering], device=device),
                torch.tensor([params[row].min_p for row in filtering], device=device),
            )
        # On a CPU row by row, so that a row's noise is made and used within the processor's cache.
        size = 1 if device.type == "cpu" else len(logits)
        tokens = [
            (rows + gumbel_noise(row_keys, logits.shape[1])).argmax(dim=-1)
            for rows, row_keys in zip(logits.split(size), keys.to(device).split(size), strict=True)
        ]
        return torch.cat(tokens)


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set the logits of unlikely tokens to -inf: top-k, then top-p of what is left, then min-p (as `transformers`).

    Args:
        logits: [num_rows, vocab_size] float32, after the temperature.
        top_k: [num_rows] int64, at least 1. Tokens as probable as the k-th stay.
        top_p, min_p: [num_rows] float32.
    """
    ordered, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    kth = ordered.gather(1, (top_k.clamp(max=logits.shape[1]) - 1)[:, None])
    ordered = ordered.masked_fill(ordered < kth, float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    more_likely = probabilities.cumsum(dim=-1) - probabilities  # mass of the tokens before each one
    dropped = (more_likely >= top_p[:, None]) & (top_p < 1.0)[:, None]
    dropped |= probabilities < min_p[:, None] * probabilities[:, :1]
    dropped[:, 0] = False
    ordered = ordered.masked_fill(dropped, float("-inf"))
    return torch.empty_like(logits).scatter_(1, token_ids, ordered)
