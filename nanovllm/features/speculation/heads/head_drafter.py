"""Drafts by a head of the model: each token is drawn with the noise that the model will draw it with."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from nanovllm.attention import AttentionStep
from nanovllm.batch import ScheduledSequence
from nanovllm.block_manager import BlockManager
from nanovllm.device import to_device
from nanovllm.features.speculation.drafter import DraftRequest
from nanovllm.features.speculation.heads.head import HeadLayer, launches_of
from nanovllm.features.speculation.speculation import allocate_drafts
from nanovllm.layout import BatchLayout, build_layout
from nanovllm.model_runner import DirectExecutor, with_sampled
from nanovllm.sequence import Sequence


def open_heads(head: HeadLayer, runner: Any, manager: BlockManager) -> HeadDrafter:
    """The drafter of a head with allocated caches; each step of the runner writes the head's rows from now on."""
    head.allocate(manager.block_size)
    group = head.group_in(runner.pools)
    step: Any
    if isinstance(runner.executor, DirectExecutor):
        runner.launch_step = launches_of(head, runner.launch_step, manager.block_size, group)
        step = DirectSteps(head, runner).step
    else:
        step = runner.executor.draft_steps().step
    return HeadDrafter(head, runner, manager, group, step)


class HeadDrafter:
    """Proposes the draws of a head, one token after another, all requests together.

    Penalties and other changes of logits are left out: where they change a draw, its draft is rejected.

    Args:
        runner: runner of the model; its caches hold the head's K and V.
        group: cache group of the head's layer.
        step: function of a layout of one row a sequence, the sequences, the draws of the step before (None at first)
            and the states before the rows; returns draws [num_rows] and the head's states [num_rows, hidden_size].
    """

    def __init__(self, head: HeadLayer, runner: Any, manager: BlockManager, group: int, step: Any) -> None:
        self._head = head
        self._runner = runner
        self._manager = manager
        self._group = group
        self._step = step

    def propose(self, requests: SequenceABC[DraftRequest]) -> list[list[int]]:
        counts = {
            request.sequence: allocate_drafts(self._manager, request.sequence, request.max_tokens)
            for request in requests
        }
        drafts: dict[Sequence, list[int]] = {request.sequence: [] for request in requests}
        drawn_of: list[Sequence] = []
        drawn: Tensor | None = None
        found = []
        for depth in range(max(counts.values(), default=0)):
            going = [sequence for sequence, count in counts.items() if count > depth]
            if drawn is None:
                before = self._states_before(going)
            elif len(going) < len(drawn_of):
                before = before[torch.tensor([drawn_of.index(s) for s in going], device=before.device)]
            drawn, before = self._step(self._layout(going, depth, drawn_of), going, drawn, before)
            drawn_of = going
            found.append((going, drawn.clone()))
        for sequences, token_ids in found:
            for sequence, token_id in zip(sequences, token_ids.tolist(), strict=True):
                drafts[sequence].append(token_id)
        return [list(takewhile(lambda token_id: token_id >= 0, drafts[request.sequence])) for request in requests]

    def _states_before(self, sequences: list[Sequence]) -> Tensor:
        """The model's hidden states before the last known tokens, [num_sequences, hidden_size]."""
        block_size = self._manager.block_size
        places = [self._head.place(self._table(s), len(s.token_ids) - 1, block_size) for s in sequences]
        return self._head.kept(to_device(places, self._runner.device))

    def _table(self, sequence: Sequence) -> list[int]:
        if self._group == 0:
            return sequence.block_table
        table: list[int] = sequence.group_tables.further[self._group - 1]
        return table

    def _layout(self, sequences: list[Sequence], depth: int, drawn_of: list[Sequence]) -> BatchLayout:
        """The rows after the last known tokens and `depth` drafts; only the device knows the last one."""
        runner = self._runner
        in_flight = {sequence: index for index, sequence in enumerate(drawn_of)}
        layout = build_layout(
            [_entry(sequence, depth) for sequence in sequences],
            self._manager.block_size,
            in_flight,
            longest_first=runner.choice.uses_graphs,
        )
        laid_out: BatchLayout = runner.pools.lay_out(layout, self._manager.block_size)
        return laid_out


class DirectSteps:
    """Steps of a head alone, by its module."""

    def __init__(self, head: HeadLayer, runner: Any) -> None:
        self._head = head
        self._runner = runner
        self._kind_groups = runner.pools.kind_groups(runner.binding.layers)

    def step(
        self, layout: BatchLayout, sequences: list[Sequence], drawn: Tensor | None, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `HeadDrafter`."""
        runner = self._runner
        binding = runner.binding
        device = before.device
        layouts = layout, *layout.others
        if runner.backend.reads_whole_blocks:
            for group, of_group in enumerate(layouts):
                if len(of_group.blocks_to_clear):
                    blocks = torch.from_numpy(of_group.blocks_to_clear).to(device)
                    binding.caches.clear_blocks(blocks, runner.config.block_size, group=group)
        slots = [torch.from_numpy(layouts[group].slot_mapping).to(device) for group in self._kind_groups or (0,)]
        token_ids = torch.from_numpy(layout.token_ids).to(device)
        positions = torch.from_numpy(layout.positions).to(device)
        rows = torch.from_numpy(layout.sample_rows).to(device)
        if drawn is not None:
            token_ids = with_sampled(token_ids, drawn)
        logits, states = binding.compute_step(
            self._head.draft,
            AttentionStep(runner.backend.plan(layout), layout.num_tokens),
            token_ids,
            positions,
            torch.stack(slots) if self._kind_groups else slots[0],
            torch.empty_like(before).index_put_((rows,), before),
        )
        return runner.sampler._draw(logits[rows], sequences, layout.sampled_positions.tolist()), states[rows]


def _entry(sequence: Sequence, depth: int) -> ScheduledSequence:
    """The row after the last known token and `depth` drafts."""
    start = len(sequence.token_ids) - 1 + depth
    return ScheduledSequence(sequence, start, 1, 1, sequence.block_table, start)
