"""Embeddings: hidden states of sampled rows (the prompt's last token) in place of drawn tokens.

A request for an embedding computes its prompt like any other, and finishes in the step of its last row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.batch import EMBEDDED, NON_FINITE, ScheduledBatch
from nanovllm.device import to_host
from nanovllm.sequence import Sequence


class EmbeddedRows:
    """Sampled rows of a step with requested embeddings, and their hidden states after the forward pass.

    Args:
        places: indices of these rows in `ScheduledBatch.sampling`.
        sequences: the sequence of each row.
        is_all: True if no other row is sampled, so that the step needs no logits.
    """

    def __init__(self, places: list[int], sequences: list[Sequence], *, is_all: bool) -> None:
        self.places = places
        self.is_all = is_all
        self._sequences = sequences
        self._states: Tensor | None = None  # [num_embedded, hidden_size] float32

    @classmethod
    def from_batch(cls, batch: ScheduledBatch) -> EmbeddedRows | None:
        """The embedded rows of a step; None if there are none."""
        sampling = batch.sampling
        places = [place for place, sequence in enumerate(sampling) if sequence.params.embeds]
        if not places:
            return None
        return cls(places, [sampling[place] for place in places], is_all=len(places) == len(sampling))

    def without_sequences(self) -> EmbeddedRows:
        """These rows for another rank, which computes the states but records none."""
        return EmbeddedRows(self.places, [], is_all=self.is_all)

    def take(self, hidden_states: Tensor, sample_rows: Tensor) -> None:
        """Keep the embedded rows of a step's hidden states [num_rows, hidden_size], any float dtype.

        Args:
            sample_rows: [at least num_samples] int64, in the order of `ScheduledBatch.sampling`.
        """
        rows = sample_rows[torch.tensor(self.places, device=sample_rows.device)]
        self._states = hidden_states[rows].float()

    def to_host(self) -> None:
        """Copy the states to the host, asynchronously; they arrive with the step's tokens."""
        assert self._states is not None
        self._states = to_host(self._states)

    def record(self, token_ids: list[int]) -> None:
        """Set each sequence's embedding, and its token to EMBEDDED, or to NON_FINITE for a non-finite state."""
        assert self._states is not None
        for place, sequence, state in zip(self.places, self._sequences, self._states.numpy(), strict=True):
            is_sound = bool(torch.from_numpy(state).isfinite().all())
            token_ids[place] = EMBEDDED if is_sound else NON_FINITE
            if is_sound:
                sequence.embedding = state.copy()  # a view would keep the step's whole tensor alive
