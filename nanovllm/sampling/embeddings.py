"""Hidden states of sampled rows, in place of the tokens that would be drawn from them: embeddings by the last token.

A request for its embedding computes its prompt like any other and ends with the step that computes the last row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.core.batch import EMBEDDED, NON_FINITE, ScheduledBatch
from nanovllm.core.sequence import Sequence
from nanovllm.process.device import to_host


class EmbeddedRows:
    """The sampled rows of a step whose hidden states are wanted, and these states once they are there.

    Args:
        places: of these rows in the order of `ScheduledBatch.sampling`.
        sequences: one each.
        is_all: whether no other row is sampled, so that no logits are needed.
    """

    def __init__(self, places: list[int], sequences: list[Sequence], *, is_all: bool) -> None:
        self.places = places
        self.is_all = is_all
        self._sequences = sequences
        self._states: Tensor | None = None  # [num_embedded, hidden_size] float32

    @classmethod
    def from_batch(cls, batch: ScheduledBatch) -> EmbeddedRows | None:
        """None if no request of the step asks for it."""
        sampling = batch.sampling
        places = [place for place, sequence in enumerate(sampling) if sequence.params.embeds]
        if not places:
            return None
        return cls(places, [sampling[place] for place in places], is_all=len(places) == len(sampling))

    def without_sequences(self) -> EmbeddedRows:
        """The same rows for another rank, which computes their states with the first and records none."""
        return EmbeddedRows(self.places, [], is_all=self.is_all)

    def take(self, hidden_states: Tensor, sample_rows: Tensor) -> None:
        """Keep what is wanted of the hidden states [num_rows, hidden_size] of a step, of any float dtype.

        Args:
            sample_rows: [at least num_samples] int64, in the order of `ScheduledBatch.sampling`.
        """
        rows = sample_rows[torch.tensor(self.places, device=sample_rows.device)]
        self._states = hidden_states[rows].float()

    def to_host(self) -> None:
        """Send the states to the host; they are there with the step's tokens."""
        assert self._states is not None
        self._states = to_host(self._states)

    def record(self, token_ids: list[int]) -> None:
        """Give each sequence its state, and put EMBEDDED in place of its token, or NON_FINITE if the state is not."""
        assert self._states is not None
        for place, sequence, state in zip(self.places, self._sequences, self._states.numpy(), strict=True):
            is_sound = bool(torch.from_numpy(state).isfinite().all())
            token_ids[place] = EMBEDDED if is_sound else NON_FINITE
            if is_sound and not sequence.is_finished:
                sequence.embedding = state.copy()  # not a view that keeps the step's whole tensor
