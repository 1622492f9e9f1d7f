"""A model without weights, which checks the reads of every step of a scheduler.

It draws each token as a pure function of all tokens before it, and keeps a KV cache with the hash of its prefix in each
slot, so that every read of every step is compared with the hash that the sequence should find there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise

from nanovllm.batch import NON_FINITE, NULL_BLOCK, ScheduledBatch, ScheduledSequence
from nanovllm.features.groups.cache_groups import CacheGroups
from nanovllm.features.groups.state_kinds import FULL, StateKind
from nanovllm.features.policies.mock_states import (
    UNWRITTEN,
    MockBlocks,
    MockStates,
    Poison,
    check,
    empty_prefix,
    extend_prefix,
)
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence

VOCAB_SIZE = 8


def tables_of(sequence: Sequence) -> list[list[int]]:
    """The sequence's block table in each group."""
    tables = sequence.group_tables
    return [sequence.block_table, *(tables.further if tables else ())]


def generate_alone(sequence: Sequence) -> list[int]:
    """The output of a request alone: no cache, no batch, one token per step."""
    prefix = empty_prefix(sequence.cache_salt)
    for token_id in sequence.token_ids[: sequence.num_prompt_tokens]:
        prefix = extend_prefix(prefix, token_id)
    output: list[int] = []
    while sequence.num_prompt_tokens + len(output) < sequence.max_num_tokens:
        output.append(prefix % VOCAB_SIZE)
        if output[-1] in sequence.stop_token_ids:
            break
        prefix = extend_prefix(prefix, output[-1])
    return output


@dataclass
class _OnDevice:
    """State of a sequence on the device: its tokens, and the hash of each prefix."""

    token_ids: list[int]
    prefixes: list[int]


class MockModel(MockBlocks):
    """Executes batches in order of launch, like a device; raises AssertionError for an invalid batch."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.config = scheduler.config
        self.block_size = scheduler.block_size
        manager = scheduler.block_manager
        self.kinds = [group.kind for group in manager.groups] if isinstance(manager, CacheGroups) else [FULL]
        self.states = [
            MockStates(number, pool, self.block_size)
            for number, (kind, pool) in enumerate(zip(self.kinds, manager.pools, strict=True))
            if kind.record_bytes is not None
        ]
        # The cache of each group of K and V; the others are `states`.
        self.slots: dict[int, list[int | Poison | None]] = {
            number: [UNWRITTEN] * (pool.num_blocks * self.block_size)
            for number, (kind, pool) in enumerate(zip(self.kinds, manager.pools, strict=True))
            if kind.record_bytes is None
        }
        # (step id, sequence) -> its block table in each group.
        self._tables: dict[tuple[int, Sequence], list[list[int]]] = {}
        self.num_forked = 0  # entries that draw from the row of another sample
        self.num_shared_in_step = 0  # Entries that read a slot written by another entry of the same step
        self._on_device: dict[Sequence, _OnDevice] = {}
        self._num_drawn: dict[tuple[int, Sequence], int] = {}  # step and sequence -> tokens that count
        self._poisons: dict[Sequence, list[Poison]] = {}

    def execute(self, batch: ScheduledBatch, non_finite: Collection[str] = ()) -> list[int]:
        """Write, read and sample; new positions of the requests in `non_finite` become NaN."""
        for entry in batch.entries:
            key = batch.step_id, entry.sequence
            self._tables[key] = [entry.block_table, *tables_of(entry.sequence)[1:]]
        self._check_batch(batch)
        for entry in batch.drafted:
            state = self._state_of(entry.sequence)
            known = entry.sequence.token_ids
            check(state.token_ids == known.tolist(), f"{entry.sequence} has drafts and tokens in flight")
            seen = entry.sequence.history(0, entry.start + entry.num_new_tokens).tolist()
            check(seen == [*known, *entry.draft], f"the rows of {entry.sequence} see other tokens than its drafts")
            self._learn(state, entry.draft, state.prefixes[-1])
        self._copy(batch)
        written_by: dict[tuple[int, int], Sequence] = {}
        for entry in batch.entries:
            self._write(batch, entry, written_by)
        poisoned_states = self._read_states(batch)
        sampled: list[int] = []
        poisoned = False
        for entry in batch.entries:
            sequence = entry.sequence
            state = self._on_device[sequence]
            end = entry.start + entry.num_new_tokens
            if entry.num_new_tokens:  # an entry without rows draws from the row of the entry before
                poisoned = self._reads_poison(batch, entry, written_by)
                poisoned |= sequence.request_id in non_finite or sequence in poisoned_states
            if poisoned:
                self._poison(batch, entry)
            self._write_states(batch, entry, poisoned)
            if entry.num_samples:
                check(end == len(state.token_ids), f"{sequence} samples, but a known token is not computed")
                drawn = [
                    NON_FINITE if poisoned else self.draw(sequence, state.prefixes[index - 1], index)
                    for index in range(end - entry.num_samples + 1, end + 1)
                ]
                self._num_drawn[batch.step_id, sequence] = self._take(state, drawn)
                sampled += drawn
            else:
                check(end < len(state.token_ids), f"{sequence} computed its last known token and does not sample")
        return sampled

    def draw(self, sequence: Sequence, prefix: int, position: int) -> int:
        """The token at a position of a sequence, behind a prefix."""
        return prefix % VOCAB_SIZE

    def _take(self, state: _OnDevice, drawn: list[int]) -> int:
        """Go on by the draws that equal the drafts, and the next one; returns their number. By none after NaN."""
        drafts = state.token_ids[len(state.token_ids) - len(drawn) + 1 :]
        if drafts:
            del state.token_ids[-len(drafts) :], state.prefixes[-len(drafts) :]
            if NON_FINITE in drawn:
                return 0
        num_equal = next((i for i, draft in enumerate(drafts) if draft != drawn[i]), len(drafts))
        self._learn(state, drawn[: num_equal + 1], state.prefixes[-1])
        return num_equal + 1

    def _copy(self, batch: ScheduledBatch) -> None:
        """Copy blocks; all sources are read before any destination is written."""
        found = [self.block(group, source) for group, source, _ in batch.copies]
        for (group, _, block), content in zip(batch.copies, found, strict=True):
            self.set_block(group, block, content)

    def fail(self, batch: ScheduledBatch) -> None:
        """Undo a failed batch: its slots are undefined, its tokens are gone. Call for the newest batch first."""
        for group, _, block in batch.copies:
            if block >= 0:
                self.set_block(group, block, [UNWRITTEN] * self.size_of(group))
        for entry in batch.entries:
            state = self._on_device[entry.sequence]
            for position in range(entry.start, entry.start + entry.num_new_tokens):
                for number, slot in self._slots(batch, entry, position):
                    self.slots[number][slot] = UNWRITTEN
            if num_drawn := self._num_drawn.pop((batch.step_id, entry.sequence), 0):
                del state.token_ids[-num_drawn:], state.prefixes[-num_drawn:]
        for states in self.states:
            states.fail(batch)

    def report_non_finite(self, sequence: Sequence, running: Iterable[Sequence]) -> None:
        """Report a non-finite sequence to the scheduler: its blocks must no longer be findable."""
        running = list(running)
        for poison in self._poisons.pop(sequence, ()):
            if not poison.is_known:
                poison.is_known = True
                poison.holders = {other for other in running if poison.block in tables_of(other)[poison.group]}

    def _check_batch(self, batch: ScheduledBatch) -> None:
        entries = batch.entries
        block_size = self.block_size
        check(0 < batch.num_tokens <= self.config.max_num_batched_tokens, f"{batch.num_tokens} tokens in a step")
        check(len(entries) <= self.config.max_num_seqs, f"{len(entries)} sequences in a step")
        check(len({id(entry.sequence) for entry in entries}) == len(entries), "a sequence is in a step twice")
        drawn = [entry.sequence for entry in entries for _ in range(entry.num_samples)]
        check([*batch.sampling] == drawn, "sampling is out of order")
        check(len(drawn) <= self.config.max_num_seqs, f"{len(drawn)} tokens are drawn in a step")
        check(all(entry.num_samples == 1 for entry in entries[: batch.num_decodes]), "a decode does not draw one token")
        check(entries[0].num_new_tokens > 0, "the first entry computes nothing")
        for before, entry in pairwise(entries):
            self.num_forked += not entry.num_new_tokens
            is_fork = before.num_samples == entry.num_samples == 1 and before.sequence in entry.sequence.samples
            check(entry.num_new_tokens > 0 or is_fork, "an entry computes nothing")
        for entry in entries:
            end = entry.start + entry.num_new_tokens
            check(
                bool(entry.num_samples) or end % block_size == 0,
                f"a chunk ends at {end}, inside a block and a sequence",
            )
            check(end <= self.config.max_model_len, f"position {end - 1} is beyond max_model_len")
            for kind, table in zip(self.kinds, self._tables[batch.step_id, entry.sequence], strict=True):
                check(len(table) * block_size >= end, f"{end} tokens in {len(table)} blocks")
                if kind.record_bytes is not None:
                    continue
                used = table[self._first_seen(kind, entry) // block_size : -(-end // block_size)]
                check(NULL_BLOCK not in used, "the null block is in a block table")
                check(len(set(used)) == len(used), "a block is in a table twice")

    @staticmethod
    def _first_seen(kind: StateKind, entry: ScheduledSequence) -> int:
        """The first position that the entry's first token sees."""
        in_window = 0 if kind.window is None else entry.start - kind.window + 1
        return max(0, in_window, 0 if kind.chunk is None else entry.start - entry.start % kind.chunk)

    def _slots(self, batch: ScheduledBatch, entry: ScheduledSequence, position: int) -> list[tuple[int, int]]:
        """The slot of a position in each group of K and V, with the group's number."""
        index, offset = divmod(position, self.block_size)
        tables = self._tables[batch.step_id, entry.sequence]
        return [(number, tables[number][index] * self.block_size + offset) for number in self.slots]

    def _read_states(self, batch: ScheduledBatch) -> set[Sequence]:
        """Check the states that the batch goes on from; returns the sequences that read poison."""
        poisoned = set()
        for states in self.states:
            for entry in batch.entries:
                sequence = entry.sequence
                table = self._tables[batch.step_id, sequence][states.number]
                if states.read(entry, table, self._on_device[sequence].prefixes):
                    poisoned.add(sequence)
        return poisoned

    def _write_states(self, batch: ScheduledBatch, entry: ScheduledSequence, poisoned: bool) -> None:
        sequence = entry.sequence
        end = entry.start + entry.num_new_tokens
        for states in self.states:
            table = self._tables[batch.step_id, sequence][states.number]
            state = Poison(states.number, NULL_BLOCK)
            slot = states.write(batch, entry, table, state if poisoned else self._on_device[sequence].prefixes[end - 1])
            if poisoned:
                state.block = slot
                self._poisons.setdefault(sequence, []).append(state)

    def _write(
        self, batch: ScheduledBatch, entry: ScheduledSequence, written_by: dict[tuple[int, int], Sequence]
    ) -> None:
        sequence = entry.sequence
        state = self._state_of(entry.sequence)
        # A token drawn twice, lost or changed makes host and device differ.
        known = sequence.token_ids.tolist()
        check(state.token_ids[: len(known)] == known, f"{sequence} and the device know different tokens")
        for position in range(entry.start, entry.start + entry.num_new_tokens):
            for number, slot in self._slots(batch, entry, position):
                check((number, slot) not in written_by, f"slot {slot} is written twice in a step")
                written_by[number, slot] = sequence
                self.slots[number][slot] = state.prefixes[position]

    def _state_of(self, sequence: Sequence) -> _OnDevice:
        state = self._on_device.get(sequence)
        if state is None:
            state = self._on_device[sequence] = _OnDevice([], [])
            self._learn(state, sequence.token_ids, empty_prefix(sequence.cache_salt))
        return state

    @staticmethod
    def _learn(state: _OnDevice, token_ids: Iterable[int], prefix: int) -> None:
        for token_id in token_ids:
            prefix = extend_prefix(prefix, token_id)
            state.token_ids.append(token_id)
            state.prefixes.append(prefix)

    def _reads_poison(
        self, batch: ScheduledBatch, entry: ScheduledSequence, written_by: dict[tuple[int, int], Sequence]
    ) -> bool:
        """Check every slot that the entry attends to in any group; returns whether one of them is poisoned."""
        sequence = entry.sequence
        block_size = self.block_size
        prefixes = self._on_device[sequence].prefixes
        end = entry.start + entry.num_new_tokens
        poisoned = shared = False
        for number in self.slots:
            table = self._tables[batch.step_id, sequence][number]
            for index in range(self._first_seen(self.kinds[number], entry) // block_size, -(-end // block_size)):
                first = index * block_size
                count = min(block_size, end - first)
                slot = table[index] * block_size
                shared |= written_by.get((number, slot), sequence) != sequence
                found = self.slots[number][slot : slot + count]
                if found != prefixes[first : first + count]:
                    poisoned |= self._is_poison(entry, found, first, f"group {number}, block {table[index]}")
        self.num_shared_in_step += shared
        return poisoned

    def _is_poison(self, entry: ScheduledSequence, found: list[int | Poison | None], first: int, place: str) -> bool:
        """Whether poison was found at a position from `first` on; the others must hold the KV."""
        sequence = entry.sequence
        poisoned = False
        for position, content in enumerate(found, first):
            if isinstance(content, Poison):
                poisoned = True
                check(
                    content.may_be_read_by(entry.sequence),
                    f"{sequence} found block {content.block}, whose owner had turned non-finite",
                )
            else:
                check(
                    content == self._on_device[sequence].prefixes[position],
                    f"{sequence} reads at position {position} what is not its KV (chunk {entry.start} of "
                    f"{entry.num_new_tokens}, {place}, {'another' if content else 'nothing'} there)",
                )
        return poisoned

    def _poison(self, batch: ScheduledBatch, entry: ScheduledSequence) -> None:
        for position in range(entry.start, entry.start + entry.num_new_tokens):
            for number, slot in self._slots(batch, entry, position):
                poison = Poison(number, slot // self.block_size)
                self.slots[number][slot] = poison
                self._poisons.setdefault(entry.sequence, []).append(poison)
