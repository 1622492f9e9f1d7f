"""Logprobs of tokens, computed on the logits' device; a few numbers per row are sent to the host.

They describe the model's raw distribution over the tokens that can be sampled, in float32, before temperature,
penalties and filters. A prompt token without a logit (a head smaller than the embedding) has -inf, ranked last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.device import find_kernel, to_device, to_host
from nanovllm.fast.fast_draws import total_masses
from nanovllm.features.embeddings.embeddings import EmbeddedRows
from nanovllm.features.logprobs.draws import DrawnLogprob
from nanovllm.layout import BatchLayout
from nanovllm.outputs import Logprob, TokenLogprobs
from nanovllm.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.fast.kernels.cpp_sampling import RowKernels

MOST_BY_KERNEL = 32  # top tokens per row; for more, a GPU sorts
ROWS_AT_ONCE = 64  # rows of logits per piece of a prompt, in float32 and in the model's dtype


@dataclass(frozen=True, slots=True)
class Measured:
    """Logprobs of some rows: of the chosen token, then of the top k.

    token_ids: [num_rows, 1 + k] int64.
    logprobs: [num_rows, 1 + k] float32.
    ranks: [num_rows] int64, of the chosen token.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,
        token_ids: Tensor,
        num_top: int,
        *,
        by_kernel: bool = True,
        row_kernels: RowKernels | None = None,
    ) -> Measured:
        """Compute logprobs of the chosen tokens and the top num_top.

        Args:
            logits: [num_rows, vocab_size], any float dtype.
            token_ids: [num_rows]; below 0 for none, vocab_size and above for tokens without a logit.
        """
        if row_kernels is not None and row_kernels.can_read(logits):
            chosen = token_ids.clamp(min=0)
            if (stats := row_kernels.measure(logits, chosen, num_top)) is not None:
                return cls(*_logprobs(logits, chosen[:, None], *stats))
        if by_kernel and logits.is_cuda and num_top <= MOST_BY_KERNEL and (kernel := _kernel()) is not None:
            return cls(*kernel(logits, token_ids, num_top))
        parts = [
            _measure(rows.float(), chosen, num_top)
            for rows, chosen in zip(logits.split(ROWS_AT_ONCE), token_ids.split(ROWS_AT_ONCE), strict=True)
        ]
        return cls(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    @staticmethod
    def num_words(num_rows: int, num_top: int) -> int:
        """Number of words of `from_words`."""
        return num_rows * (5 + 3 * num_top)

    @classmethod
    def from_words(cls, words: Tensor, num_rows: int, num_top: int) -> Measured:
        """Views of one int32 tensor [at least num_words], on a device or the host."""
        size = num_rows * (1 + num_top)
        token_ids, ranks, logprobs = words[: cls.num_words(num_rows, num_top)].split((2 * size, 2 * num_rows, size))
        return cls(
            token_ids.view(torch.int64).view(num_rows, -1),
            logprobs.view(torch.float32).view(num_rows, -1),
            ranks.view(torch.int64),
        )

    def to_host(self) -> Measured:
        """Copy to the host, asynchronously; complete when the device has finished its earlier work."""
        return Measured(*(to_host(tensor) for tensor in (self.token_ids, self.logprobs, self.ranks)))

    def rows(self, num_top: Iterable[int]) -> Iterator[TokenLogprobs]:
        """Each row's report, with its requested number of top tokens."""
        lists = self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist()
        for token_ids, logprobs, rank, count in zip(*lists, num_top, strict=True):
            report = {token_ids[0]: Logprob(logprobs[0], rank)}
            for place in range(1, count + 1):
                report.setdefault(token_ids[place], Logprob(logprobs[place], place))
            yield report


@dataclass(frozen=True, slots=True)
class PackedMeasured:
    """`Measured` as words written by a captured graph; only the first `count` rows are valid."""

    words: Tensor  # int32; see `Measured.from_words`
    num_rows: int
    num_top: int
    count: int

    def to_host(self) -> Measured:
        """Copy to the host in one transfer."""
        words = to_host(self.words[: Measured.num_words(self.num_rows, self.num_top)])
        whole = Measured.from_words(words, self.num_rows, self.num_top)
        return Measured(*(part[: self.count] for part in (whole.token_ids, whole.logprobs, whole.ranks)))


@cache
def _kernel() -> Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]] | None:
    return find_kernel("logprobs", "measure")


def _measure(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    chosen = token_ids.clamp(min=0)[:, None]
    last = logits.shape[1] - 1
    logits_of_chosen = logits.gather(1, chosen.clamp(max=last)).masked_fill_(chosen > last, -torch.inf)
    ranks = (logits > logits_of_chosen).sum(dim=-1) + 1
    largest = logits.amax(dim=-1)
    total = total_masses(logits, largest[:, None])[:, 0]
    return _logprobs(logits, chosen, _most_probable(logits, num_top), largest, total, ranks)


def _most_probable(logits: Tensor, num_top: int) -> Tensor:
    """Top token ids [num_rows, num_top]; on a CPU, lower ids first among equal logits (a GPU would synchronise)."""
    top = logits.topk(min(num_top + 1, logits.shape[1]))
    top_ids = top.indices[:, :num_top]
    if logits.device.type == "cpu":
        for row in (top.values[:, 1:] == top.values[:, :-1]).any(dim=-1).nonzero()[:, 0].tolist():
            token_ids = (~(logits[row] < top.values[row, num_top - 1])).nonzero()[:, 0]  # a NaN is largest
            order = logits[row, token_ids].sort(descending=True, stable=True).indices
            top_ids[row] = token_ids[order[:num_top]]
    return top_ids


def _logprobs(
    logits: Tensor, chosen: Tensor, top_ids: Tensor, largest: Tensor, total: Tensor, ranks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of `Measured`, from the largest logit and the sum of masses, [num_rows] each."""
    token_ids = torch.cat([chosen, top_ids], dim=1)
    last = logits.shape[1] - 1
    levels = logits.gather(1, token_ids.clamp(max=last)).float() - largest[:, None]
    return token_ids, (levels - total.log().float()[:, None]).masked_fill_(token_ids > last, -torch.inf), ranks


@dataclass(frozen=True, slots=True)
class PromptRows:
    """A step's rows for prompt logprobs: row p of a sequence gives the logprob of token p + 1.

    spans: sequences, each with its range of reported positions.
    rows: [num_rows] int64, rows of the flat batch.
    token_ids: [num_rows] int64, the prompt's next tokens.
    """

    spans: list[tuple[Sequence, int, int]]
    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]

    @classmethod
    def from_layout(cls, layout: BatchLayout) -> PromptRows | None:
        """The prompt rows of a step, or None. Only chunks have prompt rows: decodes are past their prompts."""
        spans = []
        rows = []
        token_ids = []
        for entry, first_row in zip(layout.chunks, layout.row_starts[layout.num_decodes : -1].tolist(), strict=True):
            sequence = entry.sequence
            first = max(entry.start + 1, sequence.params.prompt_logprobs_start)
            end = min(entry.start + entry.num_new_tokens + 1, sequence.num_prompt_tokens)
            if sequence.lacks_prompt_logprobs and first < end:
                spans.append((sequence, first, end))
                rows.append(np.arange(first - 1, end - 1) + (first_row - entry.start))
                token_ids.append(np.asarray(sequence.token_ids[first:end], np.int64))
        return cls(spans, np.concatenate(rows), np.concatenate(token_ids)) if spans else None

    @property
    def num_top(self) -> int:
        return max(sequence.params.prompt_logprobs or 0 for sequence, _, _ in self.spans)


class StepLogprobs:
    """Results of a step besides its tokens: logprobs, embeddings, errors of requests' logits processors.

    Args:
        by_kernel: True takes the kernel of `fast/kernels/` on a GPU, where it exists; its first call compiles it.
        row_kernels: kernels for a CPU (`fast.kernels.cpp_sampling.RowKernels`); None takes torch.
    """

    def __init__(
        self,
        prompt: PromptRows | None = None,
        embedded: EmbeddedRows | None = None,
        *,
        by_kernel: bool = True,
        row_kernels: RowKernels | None = None,
    ) -> None:
        self.prompt = prompt
        self.embedded = embedded
        self._measure = partial(Measured.from_logits, by_kernel=by_kernel, row_kernels=row_kernels)
        self.errors: dict[Sequence, str] = {}
        self._prompt_pieces: list[Measured] = []
        self._rows: SequenceABC[int] = ()  # the step's sampled rows with logprobs
        self._sampled: Measured | PackedMeasured | None = None
        self._drawn_rows: SequenceABC[int] = ()  # the step's sampled rows with numbers of the draw
        self._draws: Tensor | None = None

    @property
    def reads_rows(self) -> bool:
        """Whether it reads more from the forward pass than logits of sampled rows."""
        return self.prompt is not None or self.embedded is not None

    @property
    def reads_states(self) -> bool:
        """Whether it reads hidden states."""
        return self.embedded is not None

    @property
    def needs_logits(self) -> bool:
        """Whether any row needs logits: of its token, or of the prompt."""
        return self.prompt is not None or self.embedded is None or not self.embedded.is_all

    def take_states(self, hidden_states: Tensor, sample_rows: Tensor) -> None:
        """See `EmbeddedRows.take`."""
        if self.embedded is not None:
            self.embedded.take(hidden_states, sample_rows)

    def shift_prompt_rows(self, distance: int) -> None:
        """Shift the rows of chunks by the decodes' padding."""
        if self.prompt is not None:
            self.prompt = replace(self.prompt, rows=self.prompt.rows + distance)

    def prompt_rows_in_pieces(self, device: torch.device) -> Iterator[Tensor]:
        """Rows of the flat batch [num_rows] int64, piece by piece; `add_prompt` takes their logits in this order."""
        if self.prompt is not None:
            yield from to_device(self.prompt.rows, device).split(ROWS_AT_ONCE)

    def add_prompt(self, logits: Tensor) -> None:
        """Add logits [num_rows, vocab_size] of the next piece."""
        assert self.prompt is not None
        first = ROWS_AT_ONCE * len(self._prompt_pieces)
        token_ids = to_device(self.prompt.token_ids[first : first + len(logits)], logits.device)
        measured = self._measure(logits, token_ids, self.prompt.num_top)
        self._prompt_pieces.append(measured)

    def add_sampled(self, rows: SequenceABC[int], num_top: int, logits: Tensor, token_ids: Tensor) -> None:
        """Add logits [num_rows, vocab_size] of these sampled rows, and their drawn token_ids [num_rows]."""
        self._rows, self._sampled = rows, self._measure(logits, token_ids, num_top)

    def add_draws(self, rows: SequenceABC[int], draws: Tensor) -> None:
        """Add numbers of these sampled rows' draws, from `measure_draws`."""
        self._drawn_rows = rows
        self._draws = draws

    def add_measured(self, rows: SequenceABC[int], measured: PackedMeasured) -> None:
        """Add logprobs of these sampled rows, computed with the draw."""
        self._rows = rows
        self._sampled = measured

    def to_host(self) -> StepLogprobs:
        """Copy all results to the host, asynchronously; they arrive with the step's tokens."""
        self._prompt_pieces = [piece.to_host() for piece in self._prompt_pieces]
        if self._sampled is not None:
            self._sampled = self._sampled.to_host()
        if self._draws is not None:
            self._draws = to_host(self._draws)
        if self.embedded is not None:
            self.embedded.to_host()
        return self

    def record(self, sequences: SequenceABC[Sequence], token_ids: list[int]) -> None:
        """Write logprobs and errors into the sequences; call it right before `Scheduler.update`.

        Args:
            sequences, token_ids: the step's samples; tokens of embedded rows are replaced.
        """
        if self.embedded is not None:
            self.embedded.record(token_ids)
        for sequence, error in self.errors.items():
            if not sequence.is_finished:
                sequence.error = error
        if isinstance(self._sampled, Measured):
            self._record_sampled(self._sampled, sequences, token_ids)
        if self.prompt is not None:
            self._record_prompts(self.prompt)

    def _record_sampled(self, sampled: Measured, sequences: SequenceABC[Sequence], token_ids: list[int]) -> None:
        draws = {} if self._draws is None else dict(zip(self._drawn_rows, self._draws.tolist(), strict=True))
        reports = sampled.rows(sequences[row].params.logprobs or 0 for row in self._rows)
        for row, report in zip(self._rows, reports, strict=True):
            sequence = sequences[row]
            token_id = token_ids[row]
            if sequence.logprobs is not None and not sequence.is_finished and token_id >= 0:
                if sequence.params.reports_draws:
                    entry = report[token_id]
                    report[token_id] = DrawnLogprob.extending(entry, *draws.get(row, (entry.logprob, 0.0)))
                sequence.logprobs.append(report)

    def _record_prompts(self, prompt: PromptRows) -> None:
        counts = [
            sequence.params.prompt_logprobs or 0 for sequence, first, end in prompt.spans for _ in range(first, end)
        ]
        pieces = iter(self._prompt_pieces)
        starts = range(0, len(counts), ROWS_AT_ONCE)
        reports = [r for start in starts for r in next(pieces).rows(counts[start : start + ROWS_AT_ONCE])]
        place = 0
        for sequence, first, end in prompt.spans:
            if sequence.prompt_logprobs is not None:
                # A preempted prompt is recomputed, maybe before this was read: the same values come again.
                sequence.prompt_logprobs[first:end] = reports[place : place + end - first]
                for span in sequence.media.within(first, end) if sequence.media else ():  # pictures are not scored
                    sequence.prompt_logprobs[span.start : span.end] = [None] * span.length
            place += end - first
