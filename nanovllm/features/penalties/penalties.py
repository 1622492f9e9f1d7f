"""Changes to logits before sampling: allowed tokens, bad words, biases, penalties, logits processors."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.device import find_kernel, to_device
from nanovllm.features.packed_steps import StepInput
from nanovllm.features.token_masks import has_kernels, keep_bits, keep_bits_by_kernel, token_masks
from nanovllm.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.fast.kernels.cpp_sampling import RowKernels

PENALTY_FIELDS = 8  # numbers that describe a row to the kernel
PENALTY_INPUTS = (  # arguments of the kernel `penalise`
    StepInput("entries", np.int32, ("samples", PENALTY_FIELDS)),
    StepInput("tokens", np.int32, None),
)


@dataclass(frozen=True, slots=True)
class LatestTokens:
    """The newest token of each sampled row, which the host may not have read yet.

    token_ids: [num_rows] int64; -1 - i refers to entry i of `previous`.
    previous: tokens sampled by the previous step, on the device.
    """

    token_ids: NDArray[np.int64]
    previous: Tensor | None


def change_logits(
    logits: Tensor,
    sequences: SequenceABC[Sequence],
    positions: SequenceABC[int],
    latest: LatestTokens | None,
    errors: dict[Sequence, str] | None = None,
    *,
    by_kernels: bool = True,
    row_kernels: RowKernels | None = None,
) -> Tensor:
    """Apply each request's options to its row; rows without such options cost nothing.

    The order is: allowed tokens, structured output, bad words, biases, penalties (repetition, frequency, presence; so
    far as in vLLM), and last the request's logits processors. Repetition (Keskar et al. 2019) divides positive logits
    of tokens in prompt or output, and multiplies negative ones; frequency is subtracted once per occurrence of a token
    in the output, presence once.

    No state is kept between steps: tokens of penalised rows are sent in each step, so preempted, repeated and undone
    steps need no special handling. That costs a copy of the tokens. A bad word costs a comparison on the host.

    Args:
        logits: [num_rows, vocab_size], any float dtype; overwritten if it is float32.
        sequences, positions: sequence and position of each row, as in `Sampler.sample`.
        latest: tokens that are still on the device; None if the host knows all tokens.
        errors: dict that receives errors of logits processors; the row of such a request is set to -inf.
        by_kernels: True takes kernels of `fast/kernels/` on a GPU, where they exist; their first call compiles them.
        row_kernels: kernels for a CPU (`fast.kernels.cpp_sampling.RowKernels`); None takes torch.

    Returns logits, in float32 if any row was changed.
    """
    rows = [row for row, sequence in enumerate(sequences) if sequence.changes_logits]
    if not rows:
        return logits
    logits = logits.float()
    errors = {} if errors is None else errors
    step = _Step(sequences, positions, latest, errors, by_kernels and logits.is_cuda, row_kernels)
    for applies, apply in _CHANGES:
        chosen = [row for row in rows if applies(sequences[row])]
        if chosen:
            apply(logits, chosen, step)
    return logits


@dataclass(frozen=True, slots=True)
class _Step:
    """Arguments of `change_logits` besides the logits."""

    sequences: SequenceABC[Sequence]
    positions: SequenceABC[int]
    latest: LatestTokens | None
    errors: dict[Sequence, str]
    by_kernels: bool
    row_kernels: RowKernels | None


@cache
def _kernel(name: str) -> Callable[..., None] | None:
    """A function of `fast/kernels/penalties.py`, for logits on a GPU."""
    return find_kernel("penalties", name)


def _keep_allowed(logits: Tensor, rows: list[int], step: _Step) -> None:
    lists = [step.sequences[row].params.allowed_token_ids for row in rows]
    arrays = {id(token_ids): np.asarray(token_ids, np.int64) for token_ids in lists}  # requests may share long ones
    allowed = _flat_places([arrays[id(token_ids)] for token_ids in lists], logits)
    indices = to_device(rows, logits.device)
    if step.by_kernels and (kernel := _kernel("keep_allowed")) is not None:
        is_allowed = torch.zeros(len(rows), logits.shape[1], dtype=torch.int8, device=logits.device)
        is_allowed.view(-1).index_fill_(0, allowed, 1)
        kernel(logits, indices, is_allowed)
        return
    mask = logits.new_full((len(rows), logits.shape[1]), -torch.inf)  # a sum keeps NaN, which a fill would hide
    mask.view(-1).index_fill_(0, allowed, 0.0)
    logits[indices] += mask


def _keep_form(logits: Tensor, rows: list[int], step: _Step) -> None:
    masks = token_masks([step.sequences[row] for row in rows], [step.positions[row] for row in rows], step.errors)
    if step.row_kernels is not None:
        step.row_kernels.keep_bits(logits, rows, masks)
    else:
        (keep_bits_by_kernel if step.by_kernels and has_kernels() else keep_bits)(logits, rows, masks)


def _forbid_bad_words(logits: Tensor, rows: list[int], step: _Step) -> None:
    """Forbid tokens that would complete a bad word, across prompt and output, as in `transformers`."""
    vocab_size = logits.shape[1]
    device = logits.device
    latest = step.latest
    sure: list[int] = []  # indices into the flattened logits
    unsure: list[tuple[int, int, int]] = []  # (index, entry of `previous`, its token id that would complete the word)
    for row in rows:
        position = step.positions[row]
        for *beginning, last in step.sequences[row].bad_words:
            if last >= vocab_size:  # no logit: never drawn
                continue
            place = row * vocab_size + last
            # The host may not have read the newest token yet.
            known = step.sequences[row].history(max(0, position - len(beginning)), position).tolist()
            if len(beginning) > position or known != beginning[: len(known)]:
                continue
            if len(known) == len(beginning):
                sure.append(place)
            elif latest is not None:
                unsure.append((place, -1 - int(latest.token_ids[row]), beginning[-1]))
    flat = logits.view(-1)
    if sure:  # a sum keeps NaN, which a fill would hide
        places = to_device(sure, device)
        flat.scatter_add_(0, places, flat.new_full(places.shape, -torch.inf))
    if unsure and latest is not None and latest.previous is not None:
        places, in_flight, needed = to_device(unsure, device).unbind(dim=1)
        is_complete = latest.previous[in_flight] == needed
        flat.scatter_add_(0, places, flat.new_zeros(places.shape).masked_fill_(is_complete, -torch.inf))


def _run_all_processors(logits: Tensor, rows: list[int], step: _Step) -> None:
    for row in rows:
        _run_processors(logits[row], step.sequences[row], step.positions[row], step.errors)


def _run_processors(row: Tensor, sequence: Sequence, position: int, errors: dict[Sequence, str]) -> None:
    """Apply the request's logits processors to a row [vocab_size], in place; each gets copies."""
    token_ids = sequence.token_ids[:position].tolist()
    try:
        for processor in sequence.params.logits_processors:
            result = processor(list(token_ids), row.clone())
            if not isinstance(result, Tensor) or result.shape != row.shape:
                what = f"a tensor of shape {list(result.shape)}" if isinstance(result, Tensor) else repr(result)
                raise TypeError(f"it returned {what}; it must return logits of shape {list(row.shape)}")
            row.copy_(result)
    except Exception as error:  # fails only this request
        row.fill_(-torch.inf)
        errors[sequence] = (
            f"request {sequence.request_id!r}: its logits processor failed ({type(error).__name__}: {error})"
        )


def _add_biases(logits: Tensor, rows: list[int], step: _Step) -> None:
    biases = [step.sequences[row].params.logit_bias for row in rows]
    row_of_each = np.repeat(rows, [len(bias) for bias in biases])
    token_ids = np.fromiter((token_id for bias in biases for token_id in bias), np.int64, len(row_of_each))
    values = np.fromiter((value for bias in biases for value in bias.values()), np.float32, len(row_of_each))
    places = to_device(row_of_each * logits.shape[1] + token_ids, logits.device)
    logits.view(-1).scatter_add_(0, places, to_device(values, logits.device))  # each place once


def _counts(tokens: list[Any], logits: Tensor) -> Tensor:
    """[num_rows, vocab_size] float32: occurrences of each token in each row's tokens.

    Prompts may hold tokens without a logit, which cannot be penalised.
    """
    vocab_size = logits.shape[1]
    counts = logits.new_zeros(len(tokens), vocab_size)
    places = _flat_places([row[row < vocab_size] for row in map(np.asarray, tokens)], logits)
    counts.view(-1).scatter_add_(0, places, counts.new_ones(len(places)))
    return counts


def _flat_places(tokens: list[Any], logits: Tensor) -> Tensor:
    """Each row's tokens as indices into a flattened [num_rows, vocab_size]."""
    lengths = [len(row) for row in tokens]
    flat = np.concatenate([np.asarray(row, np.int64) for row in tokens]) if tokens else np.zeros(0, np.int64)
    return to_device(flat + np.repeat(np.arange(len(tokens)) * logits.shape[1], lengths), logits.device)


def _count_in_flight(counts: Tensor, latest: NDArray[np.int64], previous: Tensor) -> None:
    rows = np.flatnonzero(latest < 0)
    if len(rows):
        # A row with non-finite logits ends when the step's result is read; until then any token will do.
        tokens = previous[to_device(-1 - latest[rows], counts.device)].clamp(min=0)
        places = to_device(rows * counts.shape[1], counts.device) + tokens
        counts.view(-1).scatter_add_(0, places, counts.new_ones(len(rows)))


def _penalise(logits: Tensor, rows: list[int], step: _Step) -> None:
    if step.row_kernels is not None:
        _penalise_by(step.row_kernels.penalise, logits, rows, step)
    elif step.by_kernels and (kernel := _kernel("penalise")) is not None:
        _penalise_by(kernel, logits, rows, step)
    else:
        _penalise_by_counts(logits, rows, step)


def _penalise_by(kernel: Callable[..., None], logits: Tensor, rows: list[int], step: _Step) -> None:
    """Penalise by a kernel; its entries and the rows' tokens are sent in one copy."""
    entries, num_tokens = penalty_entries(rows, step.sequences, step.positions, step.latest)
    words = np.empty(entries.size + num_tokens, np.int32)
    words[: entries.size] = entries.ravel()
    write_tokens(entries, rows, step.sequences, words[entries.size :])
    packed = to_device(words, logits.device)
    previous = None if step.latest is None else step.latest.previous
    if previous is None:
        previous = packed.new_empty(1, dtype=torch.int64)  # no entry points into it
    kernel(logits, packed[: entries.size].view(-1, PENALTY_FIELDS), packed[entries.size :], previous)


def penalty_entries(
    rows: list[int], sequences: SequenceABC[Sequence], positions: SequenceABC[int], latest: LatestTokens | None
) -> tuple[NDArray[np.int32], int]:
    """Entries [len(rows), PENALTY_FIELDS] of the kernel `penalise`, and the number of tokens that they refer to."""
    entries = np.full((len(rows), PENALTY_FIELDS), -1, np.int32)
    floats = np.empty((len(rows), 3), np.float32)
    start = 0
    for place, row in enumerate(rows):
        sequence = sequences[row]
        params = sequences[row].params
        first = 0 if params.repetition_penalty != 1.0 else sequence.num_prompt_tokens  # others: output only
        length = min(positions[row], len(sequence.token_ids) + len(sequence.draft)) - first
        entries[place, :4] = row, start, length, sequence.num_prompt_tokens - first
        floats[place] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        start += length
    if latest is not None and latest.previous is not None:
        newest = latest.token_ids[rows]
        entries[:, 4] = np.where(newest < 0, -1 - newest, -1)
    entries[:, 5:] = floats.view(np.int32)
    return entries, start


def clear_entries(entries: Any) -> None:
    """Make entries [n, PENALTY_FIELDS] of the kernel `penalise`, an array or a tensor, refer to no token."""
    entries[:] = 0
    entries[:, 4] = -1  # no token in flight


def write_tokens(
    entries: NDArray[np.int32], rows: list[int], sequences: SequenceABC[Sequence], to: NDArray[np.int32]
) -> None:
    """Write the tokens that these rows' entries refer to."""
    for row, (_, start, length, num_prompt, *_) in zip(rows, entries.tolist(), strict=True):
        if length:
            sequence = sequences[row]
            token_ids = sequence.token_ids
            first = sequence.num_prompt_tokens - num_prompt
            if sequence.draft:
                token_ids = sequence.history(first, first + length)
                first = 0
            # A view for this line only, since an array cannot grow while it has views.
            to[start : start + length] = np.frombuffer(token_ids, np.int32, length, first * token_ids.itemsize)


def _penalise_by_counts(logits: Tensor, rows: list[int], step: _Step) -> None:
    places = to_device(rows, logits.device)
    sequences = [step.sequences[row] for row in rows]
    ends = [step.positions[row] for row in rows]
    outputs = [s.history(s.num_prompt_tokens, end) for s, end in zip(sequences, ends, strict=True)]
    counts = _counts(outputs, logits)
    if step.latest is not None and step.latest.previous is not None:
        _count_in_flight(counts, step.latest.token_ids[rows], step.latest.previous)
    in_prompt = _counts([s.token_ids[: s.num_prompt_tokens] for s in sequences], logits)
    logits[places] = _penalised(logits[places], counts, in_prompt, sequences)


def _penalised(logits: Tensor, counts: Tensor, in_prompt: Tensor, sequences: list[Sequence]) -> Tensor:
    def column(values: list[float]) -> Tensor:
        return to_device(np.array(values, np.float32), logits.device)[:, None]

    repetition = column([sequence.params.repetition_penalty for sequence in sequences])
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where((counts > 0) | (in_prompt > 0), penalised, logits)
    logits -= column([sequence.params.frequency_penalty for sequence in sequences]) * counts
    return logits - column([sequence.params.presence_penalty for sequence in sequences]) * (counts > 0)


# In order of application.
_CHANGES: tuple[tuple[Callable[[Sequence], Any], Callable[[Tensor, list[int], _Step], None]], ...] = (
    (lambda sequence: sequence.params.allowed_token_ids, _keep_allowed),
    (lambda sequence: sequence.matcher, _keep_form),
    (lambda sequence: sequence.bad_words, _forbid_bad_words),
    (lambda sequence: sequence.params.logit_bias, _add_biases),
    (lambda sequence: sequence.params.penalises, _penalise),
    (lambda sequence: sequence.params.logits_processors, _run_all_processors),
)
