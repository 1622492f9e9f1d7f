"""Penalties at the tokens that occur, and all but allowed tokens forbidden, in place.

Penalties take a table of counts that is cleared, but neither the table nor the logits are read as a whole: each
occurrence takes its token's count out of the table, and the one that finds it there changes the logit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = tl.constexpr(1024)  # occurrences
_PART = tl.constexpr(4096)  # logits
_FIELDS = tl.constexpr(8)


@triton.jit
def occurrences(entry, tokens, previous, vocab_size):
    """(tokens, whether there is one with a logit, whether it is of the output): a block of an entry's tokens."""
    start, length, num_prompt = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    in_flight = tl.load(entry + 4)
    places = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    token = tl.load(tokens + start + places, mask=places < length, other=0)
    # A row whose logits were not finite ends when the step is read; until then any token will do.
    latest = tl.maximum(tl.load(previous + in_flight, mask=in_flight >= 0, other=0), 0).to(tl.int32)
    is_latest = (places == length) & (in_flight >= 0)
    token = tl.where(is_latest, latest, token)
    return token, ((places < length) | is_latest) & (token < vocab_size), places >= num_prompt


@triton.jit
def count_tokens(entries, tokens, previous, counts, vocab_size):
    """Add 2 to a row's count of a token for each time in its output, and set the lowest bit if the prompt has it."""
    entry = tl.program_id(0).to(tl.int64)
    token, is_there, is_output = occurrences(entries + entry * _FIELDS, tokens, previous, vocab_size)
    tl.atomic_add(counts + entry * vocab_size + token, 2, mask=is_there & is_output)
    tl.atomic_or(counts + entry * vocab_size + token, 1, mask=is_there & (is_output == 0))


@triton.jit
def penalise_tokens(logits, entries, tokens, previous, counts, stride, vocab_size):
    """Change the logit of each token that was counted, once."""
    entry = tl.program_id(0).to(tl.int64)
    at = entries + entry * _FIELDS
    token, is_there, _ = occurrences(at, tokens, previous, vocab_size)
    found = tl.atomic_xchg(counts + entry * vocab_size + token, 0, mask=is_there)
    is_first = is_there & (found != 0)
    repetition = tl.load(at + 5).to(tl.float32, bitcast=True)
    frequency = tl.load(at + 6).to(tl.float32, bitcast=True)
    presence = tl.load(at + 7).to(tl.float32, bitcast=True)
    to = logits + tl.load(at).to(tl.int64) * stride + token
    value = tl.load(to, mask=is_first, other=0.0)
    value = tl.where(value > 0, tl.div_rn(value, tl.zeros_like(value) + repetition), value * repetition)
    value -= frequency * (found >> 1).to(tl.float32)
    value -= tl.where(found > 1, presence, 0.0)
    tl.store(to, value, mask=is_first)


@triton.jit
def forbid_others(logits, rows, is_allowed, stride, vocab_size):
    """Add -inf to the logits of tokens that are not allowed."""
    entry = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * _PART + tl.arange(0, _PART)
    is_there = tokens < vocab_size
    allowed = tl.load(is_allowed + entry * vocab_size + tokens, mask=is_there, other=0)
    to = logits + tl.load(rows + entry) * stride + tokens
    # A NaN stays NaN, and infinity becomes one, so that the row still shows it.
    value = tl.load(to, mask=is_there, other=0.0) + tl.where(allowed != 0, 0.0, float("-inf"))
    tl.store(to, value, mask=is_there & (allowed == 0))


def penalise(logits: Tensor, entries: Tensor, tokens: Tensor, previous: Tensor, max_length: int) -> None:
    """Penalise rows of logits [num_rows, vocab_size] float32 in place.

    Args:
        entries: [num_entries, 8] int32, one for each penalised row: its row; where its tokens start, how many they are,
            how many of these are of the prompt; the place in `previous` of one more token of the output, or -1; the
            bits of its repetition, frequency and presence penalties, float32.
        tokens: flat, int32.
        previous: [num_sampled] int64.
        max_length: tokens of an entry at most, with those of `previous`.
    """
    vocab_size, stride = logits.shape[1], logits.stride(0)
    counts = torch.zeros(len(entries), vocab_size, dtype=torch.int32, device=logits.device)
    grid = (len(entries), -(-max_length // _BLOCK.value))
    with torch.cuda.device(logits.device):
        count_tokens[grid](entries, tokens, previous, counts, vocab_size)
        penalise_tokens[grid](logits, entries, tokens, previous, counts, stride, vocab_size)


def keep_allowed(logits: Tensor, rows: Tensor, is_allowed: Tensor) -> None:
    """Add -inf to some logits [num_rows, vocab_size] float32 of rows [num_entries] int64, in place.

    Args:
        is_allowed: [num_entries, vocab_size] int8, 0 for those tokens.
    """
    vocab_size = logits.shape[1]
    with torch.cuda.device(logits.device):
        forbid_others[len(rows), -(-vocab_size // _PART.value)](
            logits, rows, is_allowed, logits.stride(0), vocab_size, num_warps=8
        )
