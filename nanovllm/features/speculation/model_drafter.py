"""Drafts by a small model, which draws each token with the noise that the target will draw it with.

A token is argmax(logits / temperature + noise(seed, position, token id)). With equal noise two models draw the same
token where their distributions agree, so a draft is accepted nearly as often as rejection sampling would accept it
(Daliri et al. 2024, "Coupling without communication").

Each target sequence has a shadow: a sequence of the small model, with blocks in the small model's cache::

    target    [ known ...................... | accepted | new ]
    shadow    [ computed ................ | drafts before ]       cut to the common prefix, then computed to the end
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Any, Protocol

from nanovllm.batch import ScheduledBatch, ScheduledSequence
from nanovllm.block_manager import BlockManager
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.features.speculation.drafter import DraftRequest
from nanovllm.sequence import NewRequest, Sequence


@dataclass(slots=True)
class Shadow:
    """A target's sequence in the small model; its first `num_agreed` tokens are known to be the target's."""

    sequence: Sequence
    num_agreed: int = 0


class DraftRunner(Protocol):
    """The small model; see `ModelRunner`."""

    def execute(self, batch: ScheduledBatch) -> Any: ...
    def close(self) -> None: ...


class ModelDrafter:
    """Proposes the draws of a small model; prompts are computed a slice per step before their first draft.

    Args:
        config: configuration of the small model, resolved.
        block_manager: block manager of the small model's cache.
        runner: runner of the small model.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_manager: BlockManager,
        runner: DraftRunner,
    ) -> None:
        self._config = config
        self._manager = block_manager
        self._runner = runner
        self._shadows: OrderedDict[Sequence, Shadow] = OrderedDict()  # the one used longest ago first
        self._turn = 0  # number of the call of `propose`

    def propose(self, requests: SequenceABC[DraftRequest]) -> list[list[int]]:
        self._turn += 1
        try:
            return self._drafts(requests)
        except BaseException:  # tokens that shadows have placed may not be computed
            for target, shadow in list(self._shadows.items()):
                if shadow.sequence.placed_in_step == self._turn:
                    self.end(target)
            raise

    def _drafts(self, requests: SequenceABC[DraftRequest]) -> list[list[int]]:
        limits = {request.sequence: self._limit(request) for request in requests}
        drafts = self._compute_known([target for target, limit in limits.items() if limit > 0])
        while going := [target for target, token_ids in drafts.items() if len(token_ids) < limits[target]]:
            entries = []
            for target in going:
                shadow = self._shadows[target].sequence
                shadow.token_ids.append(drafts[target][-1])
                entry = self._place(shadow, 1)
                limits[target] = limits[target] if entry is not None else 0
                entries += [] if entry is None else [(target, entry)]
            for target, token_id in self._run(entries):
                if token_id < 0:
                    limits[target] = 0
                else:
                    drafts[target].append(token_id)
        return [drafts.get(request.sequence, []) for request in requests]

    def end(self, sequence: Sequence) -> None:
        """Drop the shadow of a target sequence that has ended."""
        if (shadow := self._shadows.pop(sequence, None)) is not None:
            self._manager.release(shadow.sequence)

    def end_all(self) -> DraftRunner:
        """Drop all shadows; returns the runner, for its cache to be given back."""
        for target in list(self._shadows):
            self.end(target)
        return self._runner

    def close(self) -> None:
        """Give the small model's memory back."""
        self._shadows.clear()
        self._runner.close()

    def _limit(self, request: DraftRequest) -> int:
        """Number of drafts for which the small model has positions."""
        return min(request.max_tokens, self._config.max_model_len - request.num_tokens)

    def _compute_known(self, targets: list[Sequence]) -> dict[Sequence, list[int]]:
        """Compute known tokens, within a step's budget; returns the first draft of each target that has all."""
        left = self._config.max_num_batched_tokens
        entries: list[tuple[Sequence, ScheduledSequence]] = []
        for target in targets:
            shadow = self._follow(target)
            size = min(left, len(shadow.token_ids) - shadow.num_computed_tokens)
            entry = self._place(shadow, size) if size and len(entries) < self._config.max_num_seqs else None
            if entry is not None:
                entries.append((target, entry))
                left -= size
        return {target: [token_id] for target, token_id in self._run(entries) if token_id >= 0}

    def _follow(self, target: Sequence) -> Sequence:
        """The target's shadow, cut to the tokens that both have, and extended by the target's other tokens."""
        shadow = self._shadows.pop(target, None) or Shadow(_shadow_of(target, self._config))
        self._shadows[target] = shadow  # the one used last
        sequence = shadow.sequence
        known = target.token_ids
        own = sequence.token_ids
        agreed = shadow.num_agreed
        while agreed < min(len(own), len(known)) and own[agreed] == known[agreed]:
            agreed += 1
        del own[agreed:]
        own.extend(known[agreed:])
        self._cut(sequence, min(agreed, len(known) - 1))  # the last one is computed for its logits
        shadow.num_agreed = len(known)
        return sequence

    def _cut(self, sequence: Sequence, num_tokens: int) -> None:
        if num_tokens < sequence.num_computed_tokens:
            sequence.num_computed_tokens = num_tokens
            self._manager.release(sequence, self._manager.num_blocks_for(num_tokens))

    def _place(self, sequence: Sequence, size: int) -> ScheduledSequence | None:
        """An entry for a shadow's next `size` tokens; None if it lacks blocks even after dropping all other shadows."""
        manager = self._manager
        start = sequence.num_computed_tokens
        end = start + size
        lacking = manager.num_blocks_for(end) - len(sequence.block_table)
        for target, other in list(self._shadows.items()):
            if lacking <= manager.num_free_blocks:
                break
            if other.sequence.placed_in_step != self._turn and other.sequence is not sequence:
                self.end(target)
        if lacking > manager.num_free_blocks:
            return None
        if lacking > 0:
            manager.allocate(sequence, lacking)
        sequence.num_computed_tokens = end
        sequence.placed_in_step = self._turn
        num_samples = int(end == len(sequence.token_ids))
        return ScheduledSequence(sequence, start, size, num_samples, sequence.block_table, start)

    def _run(self, entries: list[tuple[Sequence, ScheduledSequence]]) -> list[tuple[Sequence, int]]:
        """Compute entries, given with their targets; returns the token of each that draws."""
        if not entries:
            return []
        placed = sorted(entries, key=lambda pair: pair[1].num_new_tokens > 1 or not pair[1].num_samples)
        num_decodes = sum(entry.num_new_tokens == 1 and entry.num_samples == 1 for _, entry in placed)
        batch = ScheduledBatch(self._turn, tuple(entry for _, entry in placed), num_decodes)
        drawn = self._runner.execute(batch).result()
        return list(zip((target for target, entry in placed if entry.num_samples), drawn, strict=True))


def _shadow_of(target: Sequence, config: EngineConfig) -> Sequence:
    """A sequence with the target's sampling options and noise, without its grammar."""
    params = target.params
    own = SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p,
        repetition_penalty=params.repetition_penalty, frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty, logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids, ignore_eos=True,
    )  # fmt: skip
    prompt = target.token_ids[: target.num_prompt_tokens].tolist()
    new = NewRequest(target.request_id, prompt, own, bad_words=target.bad_words)
    return Sequence(new, arrival=0, max_model_len=config.max_model_len, seed=target.seed)
