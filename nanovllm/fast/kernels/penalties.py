"""In-place penalties of occurring tokens, and masks of allowed tokens.

Penalties use a cleared table of counts; neither the table nor the logits are read as a whole: each occurrence swaps its
token's count with 0, and the one that gets a count changes the logit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = tl.constexpr(2048)  # occurrences per load
_PART = tl.constexpr(4096)  # logits
_FIELDS = tl.constexpr(8)


@triton.jit
def occurrences(entry, tokens, previous, first, vocab_size):
    """(tokens, whether each exists and has a logit, whether it is an output token) of an entry, from `first` on."""
    start, length, num_prompt = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    in_flight = tl.load(entry + 4)
    places = first + tl.arange(0, _BLOCK)
    token = tl.load(tokens + start + places, mask=places < length, other=0)
    # A row with non-finite logits ends when the step's result is read; until then any token will do.
    latest = tl.maximum(tl.load(previous + in_flight, mask=in_flight >= 0, other=0), 0).to(tl.int32)
    is_latest = (places == length) & (in_flight >= 0)
    token = tl.where(is_latest, latest, token)
    return token, ((places < length) | is_latest) & (token < vocab_size), places >= num_prompt


@triton.jit
def penalise_rows(logits, entries, tokens, previous, counts, stride, vocab_size):
    """Count an entry's tokens (2 per occurrence in the output, plus 1 if in the prompt), then change the logit of each
    token once and reset its count to 0.
    """
    entry = tl.program_id(0).to(tl.int64)
    at = entries + entry * _FIELDS
    counts += entry * vocab_size
    length = tl.load(at + 2)
    for first in range(0, length + 1, _BLOCK):
        token, is_there, is_output = occurrences(at, tokens, previous, first, vocab_size)
        tl.atomic_add(counts + token, 2, mask=is_there & is_output, sem="relaxed")
        tl.atomic_or(counts + token, 1, mask=is_there & (is_output == 0), sem="relaxed")
    tl.debug_barrier()  # all threads have counted
    repetition = tl.load(at + 5).to(tl.float32, bitcast=True)
    frequency = tl.load(at + 6).to(tl.float32, bitcast=True)
    presence = tl.load(at + 7).to(tl.float32, bitcast=True)
    logits += tl.load(at).to(tl.int64) * stride
    for first in range(0, length + 1, _BLOCK):
        token, is_there, _ = occurrences(at, tokens, previous, first, vocab_size)
        found = tl.atomic_xchg(counts + token, 0, mask=is_there, sem="relaxed")
        is_first = is_there & (found != 0)
        value = tl.load(logits + token, mask=is_first, other=0.0)
        value = tl.where(value > 0, tl.div_rn(value, tl.zeros_like(value) + repetition), value * repetition)
        value -= frequency * (found >> 1).to(tl.float32)
        value -= tl.where(found > 1, presence, 0.0)
        tl.store(logits + token, value, mask=is_first)


@triton.jit
def forbid_others(logits, rows, is_allowed, stride, vocab_size):
    """Add -inf to logits of tokens that are not allowed."""
    entry = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * _PART + tl.arange(0, _PART)
    is_there = tokens < vocab_size
    allowed = tl.load(is_allowed + entry * vocab_size + tokens, mask=is_there, other=0)
    to = logits + tl.load(rows + entry) * stride + tokens
    # NaN stays NaN and infinity becomes NaN, so the row is still detected as non-finite.
    value = tl.load(to, mask=is_there, other=0.0) + tl.where(allowed != 0, 0.0, float("-inf"))
    tl.store(to, value, mask=is_there & (allowed == 0))


def penalise(logits: Tensor, entries: Tensor, tokens: Tensor, previous: Tensor) -> None:
    """Penalise rows of logits [num_rows, vocab_size] float32 in place.

    Args:
        entries: [num_entries, 8] int32, one per penalised row: row; start of its tokens, their number, and the number
            of prompt tokens among them; index in `previous` of one more output token, or -1; bits of the float32
            repetition, frequency and presence penalties.
        tokens: flat, int32.
        previous: [num_sampled] int64.
    """
    vocab_size, stride = logits.shape[1], logits.stride(0)
    counts = torch.zeros(len(entries), vocab_size, dtype=torch.int32, device=logits.device)
    with torch.cuda.device(logits.device):
        penalise_rows[len(entries),](logits, entries, tokens, previous, counts, stride, vocab_size, num_warps=8)


def keep_allowed(logits: Tensor, rows: Tensor, is_allowed: Tensor) -> None:
    """Add -inf in place to logits [num_rows, vocab_size] float32 of forbidden tokens.

    Args:
        rows: [num_entries] int64.
        is_allowed: [num_entries, vocab_size] int8, 0 for forbidden tokens.
    """
    vocab_size = logits.shape[1]
    with torch.cuda.device(logits.device):
        forbid_others[len(rows), -(-vocab_size // _PART.value)](
            logits, rows, is_allowed, logits.stride(0), vocab_size, num_warps=8
        )
