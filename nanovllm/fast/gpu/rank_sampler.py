"""Sampling over logits sharded by vocabulary: each rank draws among its own tokens, and the best draw wins.

The maximum of (score, token) is associative, and noise is a function of the token's id: ranks gather eight bytes a row
and rank, and each takes the maximum. Filters need whole rows: these are gathered, and each rank draws the same. Rank 0
alone serves all other options and broadcasts the tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.batch import NON_FINITE
from nanovllm.device import find_kernel
from nanovllm.fast.fast_draws import best_on_cpu
from nanovllm.fast.gpu.head_extras import DrawExtras, HeadExtras, draw_extras
from nanovllm.features.embeddings.embeddings import EmbeddedRows
from nanovllm.features.logprobs.logprobs import PromptRows, StepLogprobs
from nanovllm.features.request_options import RequestOptions
from nanovllm.model import ModelBinding
from nanovllm.sampler import GAMMA_32, DrawInputs, DrawTensors, Sampler, signed_32
from nanovllm.sequence import Sequence

_UNKNOWN: Any = object()


class RankSampler(Sampler):
    """The sampler of one rank; all ranks sample the same step.

    Attributes:
        step_draws: draw inputs of the next step, None if its rows need more. Rank 0 sends them to the other ranks,
            which have no requests; only at start-up does each rank derive them from the same dummy requests.
    """

    stage: RequestOptions

    def __init__(self, binding: ModelBinding, *, compiles: bool, **parts: Any) -> None:
        super().__init__(**parts)
        assert binding.ranks is not None
        self._ranks = binding.ranks
        self._shards = binding.head_shards
        self._vocab_size = binding.vocab_size
        self.is_first = self._ranks.rank == 0
        # A report does not keep the sampler, which knows the binding's caches.
        self.stage.new_report = partial(RankLogprobs, sampler=weakref.proxy(self), by_kernel=compiles)
        self.step_draws: DrawInputs | None = _UNKNOWN
        self._draw_whole = self.draw
        self.draw = self._draw_on_gpu
        kernels: list[Any] = (
            [find_kernel("gumbel_draw", name) for name in ("best_of_shard", "best_of_pairs")] if compiles else []
        )
        self._draws_by_shards = self._shards is not None and all(kernels) and compiles
        self._best_of_shard: Callable[..., Tensor]
        self._best_of_pairs: Callable[..., Tensor]
        if self._draws_by_shards:
            self._best_of_shard, self._best_of_pairs = kernels

    def begin_step(self, sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> DrawInputs | None:
        """Draw inputs of the next step, for rank 0 to send."""
        self.step_draws = _UNKNOWN
        self.step_draws = self.draw_inputs(sequences, positions)
        return self.step_draws

    def draw_inputs(self, sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> DrawInputs | None:
        """The inputs of `draw` for these rows; None if they need `sample`."""
        if self.step_draws is not _UNKNOWN:
            return self.step_draws
        if draw_extras(sequences, positions) != DrawExtras():
            return None
        return DrawInputs.from_sequences(sequences, positions)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Logits [num_rows, vocab_size], gathered from the ranks' shards."""
        if self._shards is None:
            return logits
        return self._shards.whole(logits)[:, : self._vocab_size].contiguous()

    def sample(
        self,
        logits: Tensor,
        sequences: SequenceABC[Sequence],
        positions: SequenceABC[int],
        inputs: Any = None,
        report: Any = None,
    ) -> Tensor:
        draws = self.draw_inputs(sequences, positions)
        if draws is not None:
            if logits.device.type == "cpu":
                return self._draw_together_on_cpu(logits, draws)
            return self.draw(logits, draws.to_device(logits.device), has_filters=draws.has_filters())
        whole = self.whole_logits(logits)
        if self.is_first:
            token_ids = super().sample(whole, sequences, positions, inputs, report)
        else:
            token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        self._ranks.broadcast(token_ids)
        return token_ids

    def _draw(self, logits: Tensor, sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> Tensor:
        if logits.device.type == "cpu":
            return super()._draw(logits, sequences, positions)
        inputs = DrawInputs.from_sequences(sequences, positions)  # rank 0 alone gets here, with whole logits
        return self._draw_whole(logits, inputs.to_device(logits.device), has_filters=inputs.has_filters())

    def _own_tokens(self) -> tuple[int, int]:
        """First token id of this rank's shard, and its number of real tokens (without padding)."""
        assert self._shards is not None
        first = self._ranks.rank * self._shards.width
        return first, max(0, min(self._vocab_size - first, self._shards.width))

    def _draw_together_on_cpu(self, logits: Tensor, inputs: DrawInputs) -> Tensor:
        if self._shards is None or inputs.has_filters():
            scores, token_ids = best_on_cpu(self.whole_logits(logits), inputs)
            return token_ids.masked_fill_(~scores.isfinite(), NON_FINITE)
        first, count = self._own_tokens()
        own = logits[:, :count] if count else logits.new_full((len(logits), 1), -torch.inf)
        largest = self._ranks.all_gather(own.amax(dim=-1).float()).amax(dim=0)  # a NaN stays one
        scores, token_ids = best_on_cpu(own, inputs, largest=largest, first_token=first)
        pairs = self._ranks.all_gather(torch.stack([scores.view(torch.int32), token_ids.int()], dim=1))
        best, ranks = pairs[..., 0].contiguous().view(torch.float32).max(dim=0)  # [num_rows], the lowest of equal ranks
        return pairs[..., 1].gather(0, ranks[None])[0].long().masked_fill_(~best.isfinite(), NON_FINITE)

    def _draw_on_gpu(self, logits: Tensor, inputs: DrawTensors, *, has_filters: bool = True) -> Tensor:
        if has_filters or not self._draws_by_shards:
            return self._draw_whole(self.whole_logits(logits), inputs, has_filters=has_filters)
        first, count = self._own_tokens()
        pairs = self._best_of_shard(
            logits, inputs, gamma=signed_32(GAMMA_32), first_token=first, num_tokens=count
        )  # [num_rows, 2] int32: the score's bits and the token
        token_ids: Tensor = self._best_of_pairs(self._ranks.all_gather(pairs), non_finite=NON_FINITE)
        return token_ids


class RankExtras(HeadExtras):
    """Captured heads of several ranks only draw; rank 0's host sampler serves all other options."""

    def __init__(self, sampler: Any, max_samples: int, device: torch.device) -> None:
        super().__init__(max_samples, device)
        self.draw_inputs = sampler.draw_inputs

    def needed(self, sequences: SequenceABC[Sequence], positions: SequenceABC[int]) -> DrawExtras | None:
        return None if self.draw_inputs(sequences, positions) is None else DrawExtras()


class RankLogprobs(StepLogprobs):
    """Log-probabilities and embeddings of a step, computed by rank 0 from logits that all ranks gather."""

    def __init__(
        self, prompt: PromptRows | None, embedded: EmbeddedRows | None, *, sampler: RankSampler, by_kernel: bool
    ) -> None:
        super().__init__(prompt, embedded, by_kernel=by_kernel)
        self._sampler = sampler

    def add_prompt(self, logits: Tensor) -> None:
        whole = self._sampler.whole_logits(logits)
        if self._sampler.is_first:
            super().add_prompt(whole)
