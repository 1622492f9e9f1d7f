"""Log-probabilities of draws: under the distribution after penalties, temperature and filters, and the kept mass."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from nanovllm.outputs import Logprob
from nanovllm.sampler import DrawTensors, keep_likely_by_sort, levels_of, pieces


class DrawnLogprob(Logprob):
    """`Logprob` of a drawn token, with numbers of the draw.

    drawn: log-probability under the distribution that the token was drawn from.
    log_kept: log of the mass that filters keep; drawn + log_kept is the log-probability without them.
    """

    drawn: float
    log_kept: float

    @classmethod
    def extending(cls, entry: Logprob, drawn: float, log_kept: float) -> Self:
        """The entry with the numbers of its draw."""
        extended = cls(*entry)
        extended.drawn = drawn
        extended.log_kept = log_kept
        return extended


def measure_draws(logits: Tensor, inputs: DrawTensors, token_ids: Tensor) -> Tensor:
    """Numbers of each row's draw: (drawn, log_kept), see `DrawnLogprob`.

    Args:
        logits: [num_rows, vocab_size], any float dtype, after penalties.
        token_ids: [num_rows]; below 0 for none.

    Returns [num_rows, 2] float32.
    """
    results = []
    first = 0
    for rows, own in pieces(logits, inputs):
        levels, _ = levels_of(rows, own)
        chosen = levels.gather(1, token_ids[first : first + len(rows)].clamp(min=0)[:, None])[:, 0]
        whole = levels.logsumexp(dim=-1)
        keep_likely_by_sort(levels, own.filters)
        kept = levels.logsumexp(dim=-1)
        results.append(torch.stack([chosen - kept, kept - whole], dim=1))
        first += len(rows)
    return torch.cat(results)
