"""The engine's loop without an engine: a scheduler, a block manager, and a mock model that notices every wrong read.

The mock model draws each token as a pure function of all tokens before it. Each slot of its KV cache holds the hash of
the prefix that it was computed for; so every read of every step is checked against what the sequence should find there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

from nanovllm.batch import NON_FINITE, NULL_BLOCK, ScheduledBatch, ScheduledSequence
from nanovllm.block_manager import BlockManager
from nanovllm.config import EngineConfig
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import SCHEDULING_KEY, Sequence
from tests.engine.blocks import check_blocks, make_sequence

VOCAB_SIZE = 8
MAX_IN_FLIGHT = 3
UNWRITTEN = None  # a slot that no successful step has written


def make_config(*, config_class: type[EngineConfig] = EngineConfig, **limits: float | None) -> EngineConfig:
    """A resolved config; limits that a test does not set are out of reach."""
    defaults = {
        "max_model_len": 64,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 64,
        "num_kv_blocks": 1025,
        "max_num_partial_prefills": 64,
        "max_long_partial_prefills": 64,
        "long_prefill_token_threshold": 1024,
    }
    return config_class(**(defaults | limits))


def make_scheduler(*, block_size: int = 4, enable_prefix_caching: bool = True, **limits: float | None) -> Scheduler:
    """A scheduler; its blocks may be smaller than the engine allows, for more boundaries in fewer tokens."""
    config = make_config(**limits)
    return Scheduler(
        config, BlockManager(config.num_kv_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
    )


def chunks(batch: ScheduledBatch) -> dict[str, tuple[int, int]]:
    """Return the positions that a batch computes, in batch order: request id -> (start, end)."""
    return {entry.sequence.request_id: (entry.start, entry.start + entry.num_new_tokens) for entry in batch.entries}


# ------------------------------------------------------------------------------------------------------ mock model


def extend_prefix(prefix: int, token_id: int) -> int:
    """The hash of a prefix that is one token longer (the finaliser of splitmix64, Steele et al. 2014)."""
    mixed = (prefix * 0x9E3779B97F4A7C15 + token_id + 1) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 31)


def empty_prefix(cache_salt: str) -> int:
    return crc32(cache_salt.encode()) + 1


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
class OnDevice:
    """What the device knows of a sequence: its tokens, those in flight too, and the hash of each prefix of them."""

    prefix: int
    token_ids: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)

    def learn(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.prefixes.append(extend_prefix(self.prefixes[-1] if self.prefixes else self.prefix, token_id))

    def unlearn(self) -> None:
        self.token_ids.pop()
        self.prefixes.pop()


@dataclass(eq=False)
class Poison:
    """The KV of a position where the model turned non-finite; who does not run when that is read never finds it."""

    readers: Collection[str] | None = None


class MockModel:
    """Executes batches in order of launch, like a device; fails where a batch is not valid."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.config = scheduler.config
        self.block_size = scheduler.block_size
        self.slots: list[int | Poison | None] = [UNWRITTEN] * (scheduler.block_manager.num_blocks * self.block_size)
        self.num_forked = 0  # entries that draw from the row of another sample
        self.num_shared_in_step = 0  # blocks that an entry reads and another one of the step wrote
        self._on_device: dict[str, OnDevice] = {}
        self._poisons: dict[str, list[Poison]] = {}

    def execute(self, batch: ScheduledBatch, non_finite: Collection[str] = ()) -> list[int]:
        """Copy, write all rows, read and sample; new positions of the requests in `non_finite` become NaN."""
        self._check_batch(batch)
        contents = [self._block(copy.source) for copy in batch.copies]  # read before any is written
        for copy, content in zip(batch.copies, contents, strict=True):
            self._set_block(copy.destination, content)
        written_by: dict[int, str] = {}
        for entry in batch.entries:
            self._write(entry, written_by)
        sampled = []
        is_bad = False
        for entry in batch.entries:
            request_id, state = entry.sequence.request_id, self._on_device[entry.sequence.request_id]
            if entry.num_new_tokens:  # else it draws from the row of the entry before
                is_bad = self._reads_poison(entry, written_by) or request_id in non_finite
            self.num_forked += not entry.num_new_tokens
            if is_bad:
                self._poison(entry)
            end = entry.start + entry.num_new_tokens
            assert entry.num_samples == (end == len(state.token_ids)), f"{request_id} samples where it should not"
            if entry.num_samples:
                sampled.append(NON_FINITE if is_bad else state.prefixes[-1] % VOCAB_SIZE)
                state.learn(sampled[-1])
        return sampled

    def fail(self, batch: ScheduledBatch) -> None:
        """Undo a failed batch: its slots are undefined, its tokens are gone. Call for the newest batch first."""
        for copy in batch.copies:
            self._set_block(copy.destination, [UNWRITTEN] * self.block_size)
        for entry in batch.entries:
            for position in range(entry.start, entry.start + entry.num_new_tokens):
                self.slots[self._slot(entry, position)] = UNWRITTEN
            if entry.num_samples:
                self._on_device[entry.sequence.request_id].unlearn()

    def report_non_finite(self, request_id: str, running: Iterable[Sequence]) -> None:
        """The scheduler knows of a non-finite result: from now on nobody may find the sequence's blocks."""
        readers = {sequence.request_id for sequence in running}
        for poison in self._poisons.pop(request_id, ()):
            poison.readers = readers if poison.readers is None else poison.readers

    def _check_batch(self, batch: ScheduledBatch) -> None:
        entries = batch.entries
        assert 0 < batch.num_tokens <= self.config.max_num_batched_tokens
        assert len({entry.sequence for entry in entries}) == len(entries) <= self.config.max_num_seqs
        assert [*batch.sampling] == [entry.sequence for entry in entries if entry.num_samples]
        assert all((entry.num_new_tokens, entry.num_samples) == (1, 1) for entry in entries[: batch.num_decodes])
        for number, entry in enumerate(entries):
            end = entry.start + entry.num_new_tokens
            if not entry.num_new_tokens:
                assert entries[number - 1].sequence in entry.sequence.samples, "an entry computes nothing"
            assert entry.num_samples or end % self.block_size == 0, f"a chunk ends at {end}, inside of a block"
            used = entry.block_table[: -(-end // self.block_size)]
            assert end <= min(self.config.max_model_len, len(used) * self.block_size)
            assert NULL_BLOCK not in used and len({*used}) == len(used)

    def _write(self, entry: ScheduledSequence, written_by: dict[int, str]) -> None:
        sequence = entry.sequence
        state = self._on_device.get(sequence.request_id)
        if state is None:
            state = self._on_device[sequence.request_id] = OnDevice(empty_prefix(sequence.cache_salt))
            for token_id in sequence.token_ids:
                state.learn(token_id)
        # A token drawn twice, lost or changed makes host and device differ.
        assert state.token_ids[: len(sequence.token_ids)] == sequence.token_ids.tolist()
        for position in range(entry.start, entry.start + entry.num_new_tokens):
            slot = self._slot(entry, position)
            assert slot not in written_by, f"slot {slot} is written twice in a step"
            written_by[slot] = sequence.request_id
            self.slots[slot] = state.prefixes[position]

    def _reads_poison(self, entry: ScheduledSequence, written_by: dict[int, str]) -> bool:
        """Check every slot that the entry attends to; returns whether one of them is poisoned."""
        request_id, is_bad = entry.sequence.request_id, False
        prefixes = self._on_device[request_id].prefixes
        for position in range(entry.start + entry.num_new_tokens):
            slot = self._slot(entry, position)
            content = self.slots[slot]
            if isinstance(content, Poison):
                is_bad = True
                assert content.readers is None or request_id in content.readers, f"{request_id} found NaN"
            else:
                assert content == prefixes[position], f"{request_id} reads at position {position} what is not its KV"
            self.num_shared_in_step += written_by.get(slot, request_id) != request_id
        return is_bad

    def _poison(self, entry: ScheduledSequence) -> None:
        for position in range(entry.start, entry.start + entry.num_new_tokens):
            poison = self.slots[self._slot(entry, position)] = Poison()
            self._poisons.setdefault(entry.sequence.request_id, []).append(poison)

    def _slot(self, entry: ScheduledSequence, position: int) -> int:
        index, offset = divmod(position, self.block_size)
        return entry.block_table[index] * self.block_size + offset

    def _block(self, block: int) -> list[int | Poison | None]:
        return self.slots[block * self.block_size : (block + 1) * self.block_size]

    def _set_block(self, block: int, content: list[int | Poison | None]) -> None:
        self.slots[block * self.block_size : (block + 1) * self.block_size] = content


# ------------------------------------------------------------------------------------------------------------ loop


class Launched(NamedTuple):
    batch: ScheduledBatch
    sampled: list[int]
    tables: list[list[int]]  # as they were at launch


class Loop:
    """The engine's calls of a scheduler, in any order; checks every invariant after each."""

    model_class: Any = MockModel

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.manager = scheduler.block_manager
        self.model = self.model_class(scheduler)
        self.sequences: list[Sequence] = []
        self.in_flight: deque[Launched] = deque()
        self.now = 0.0
        self.seen: Counter[str] = Counter()  # situations met, so that a fuzz can assert its coverage

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    def add(self, prompt: Iterable[int], **options: object) -> Sequence:
        return self.add_samples(1, prompt, **options)[0]

    def add_samples(self, n: int, prompt: Iterable[int], **options: object) -> list[Sequence]:
        """Add a request of n samples."""
        options = {"max_model_len": self.scheduler.config.max_model_len, "arrival_time": self.now} | options
        first = len(self.sequences)
        samples = [make_sequence(prompt, arrival=first + index, **options) for index in range(n)]
        self.sequences += samples
        for sequence in samples:
            sequence.samples = samples if n > 1 else ()
            self.scheduler.add(sequence)
        return samples

    def launch(self, non_finite: Collection[str] = ()) -> ScheduledBatch | None:
        """Schedule a batch and execute it; its tokens are read later."""
        was_running = list(self.scheduler.running)
        batch = self.scheduler.schedule()
        if batch is None:
            assert self.in_flight or not self.unfinished, "work is left, none is in flight, none is scheduled"
        else:
            self._check_preemptions(was_running, batch)
            tables = [[*entry.block_table] for entry in batch.entries]
            self.in_flight.append(Launched(batch, self.model.execute(batch, non_finite), tables))
        self.check()
        return batch

    def read(self) -> list[Sequence]:
        """Read the oldest launched batch's tokens; returns the sequences that advanced."""
        batch, sampled, tables = self.in_flight.popleft()
        for entry, table in zip(batch.entries, tables, strict=True):
            assert entry.block_table[: len(table)] == table, "a launched batch's block table changed"
        alive = [sequence for sequence in batch.sampling if not sequence.is_finished]
        self.seen["dropped in flight"] += len(batch.sampling) - len(alive)
        self.seen["preempted in flight"] += sum(not sequence.is_running for sequence in alive)
        num_findable = self.manager.num_findable_blocks
        advanced = self.scheduler.update(batch, sampled)
        assert advanced == alive, "update returns other sequences than those that advanced"
        self.seen["late registrations"] += max(0, self.manager.num_findable_blocks - num_findable)
        for sequence, token_id in zip(batch.sampling, sampled, strict=True):
            if token_id == NON_FINITE:
                self.model.report_non_finite(sequence.request_id, self.scheduler.running)
                self.seen["non-finite"] += sequence in alive
        self.check()
        return advanced

    def step(self) -> ScheduledBatch:
        """One step without overlap."""
        batch = self.launch()
        assert batch is not None, "nothing was scheduled"
        self.read()
        return batch

    def fail(self, index: int = 0, *, has_failed: bool = True) -> list[Sequence]:
        """Undo the batch in flight with this index, and those launched after it, as the engine does."""
        batches = [launched.batch for launched in [*self.in_flight][index:]]
        while len(self.in_flight) > index:
            self.model.fail(self.in_flight.pop().batch)
        affected = self.scheduler.rollback(batches[0], has_failed=has_failed)
        lost = self.manager.lost_blocks(batches)
        for sequence in [s for s in self.scheduler.running if not lost.isdisjoint(s.held_blocks())]:
            self.scheduler.preempt(sequence)
        self.check()
        return affected

    def abort(self, sequence: Sequence) -> None:
        self.seen["aborted in flight"] += sequence.num_in_flight_tokens > 0
        self.scheduler.finish(sequence, "abort")
        self.check()

    def drain(self, depth: int = 1) -> int:
        """Run to the end with at most `depth` batches in flight; returns the number of steps, which is bounded."""
        num_steps = 0
        # Older prefills may wait for younger decodes: twice the steps of serving one request after the other.
        limit = 2 * self.scheduler.config.max_model_len * (len(self.unfinished) + 1)
        while self.in_flight or self.unfinished:
            batch = self.launch()
            num_steps += batch is not None
            if self.in_flight and (batch is None or len(self.in_flight) >= depth):
                self.read()
            assert num_steps <= limit, f"{len(self.unfinished)} requests are starving"
        return num_steps

    # ------------------------------------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Check every invariant that holds between calls."""
        scheduler = self.scheduler
        running, waiting, config = scheduler.running, scheduler.waiting, scheduler.config
        check_blocks(self.manager, [*running, *waiting])
        may_want = {block_hash for sequence in waiting for block_hash in sequence.block_hashes}
        assert {*self.manager.wanted} <= may_want, "blocks are protected for a sequence that does not wait"
        assert [launched.batch for launched in self.in_flight] == list(scheduler.in_flight)
        assert all(sequence.is_running and not sequence.is_finished for sequence in running)
        assert not any(sequence.is_running or sequence.is_finished for sequence in waiting)
        assert len(running) + len(waiting) == len(self.unfinished) and len(running) <= config.max_num_seqs
        assert all([*queue] == sorted(queue, key=SCHEDULING_KEY) for queue in (running, waiting))
        in_flight = Counter(sequence for launched in self.in_flight for sequence in launched.batch.sampling)
        for sequence in self.sequences:
            assert sequence.num_in_flight_tokens == in_flight[sequence], f"{sequence} counts tokens in flight wrongly"
            assert sequence.is_finished or sequence.num_computed_tokens <= sequence.num_known_tokens
        lacking = [sequence.num_known_tokens - sequence.num_computed_tokens for sequence in running]
        num_long = sum(count > config.long_prefill_token_threshold for count in lacking)
        assert num_long <= config.max_long_partial_prefills
        assert sum(count > 1 for count in lacking) <= config.max_num_partial_prefills

    def _check_preemptions(self, was_running: list[Sequence], batch: ScheduledBatch) -> None:
        """Who lost its blocks is younger than all that kept theirs, but those of the step; and nobody was admitted."""
        preempted = [sequence for sequence in was_running if not sequence.is_running]
        placed = {entry.sequence for entry in batch.entries}
        assert placed.isdisjoint(preempted) and (not preempted or placed <= {*was_running})
        oldest = min((sequence.key for sequence in preempted), default=None)
        assert oldest is None or all(s.key < oldest or s in placed for s in self.scheduler.running)

    def check_outputs(self) -> None:
        """Check that every request ended with its tokens (an aborted one with a prefix), and that nothing leaked."""
        for sequence in self.sequences:
            expected, output = generate_alone(sequence), sequence.output_token_ids
            if sequence.finish_reason in ("abort", "error"):
                expected = expected[: len(output)]
            else:
                ends_by_token = bool(expected) and expected[-1] in sequence.stop_token_ids
                assert sequence.finish_reason == ("stop" if ends_by_token else "length")
                assert sequence.stop_reason == (expected[-1] if ends_by_token else None)
            assert output == expected, f"{sequence} generated {output}, alone it generates {expected}"
        for pool in self.manager.pools:
            assert len(pool.free_blocks) == pool.num_blocks - 1, "blocks leaked"


# ---------------------------------------------------------------------------------------------------- start states


def make_loop(**limits: float | None) -> Loop:
    return Loop(make_scheduler(**limits))


def prompt(length: int, first: int = 0) -> list[int]:
    """Tokens of a prefix that no prompt with another `first` shares."""
    return [first, *(position % 7 for position in range(length - 1))]


def running(loop: Loop) -> list[str]:
    return [sequence.request_id for sequence in loop.scheduler.running]


def waiting(loop: Loop) -> list[str]:
    return [sequence.request_id for sequence in loop.scheduler.waiting]


def update_with(loop: Loop, *token_ids: int) -> list[Sequence]:
    """Schedule a step and update it with the given tokens."""
    return loop.scheduler.update(loop.scheduler.schedule(), token_ids)


def two_that_outgrow_the_pool(**options: int) -> Loop:
    """Two running sequences of two and a half blocks each, in a pool of six; one needs a fourth block first."""
    loop = make_loop(num_kv_blocks=1 + 6, max_model_len=24)
    loop.add(prompt(10), max_tokens=14)
    loop.add(prompt(9, 1), max_tokens=15, **options)
    return loop


def run_until_preemption(loop: Loop) -> None:
    while not loop.scheduler.stats.num_preemptions:
        loop.step()


def preempted_with_a_token_in_flight() -> Loop:
    loop = two_that_outgrow_the_pool()
    while not loop.scheduler.stats.num_preemptions:
        if len(loop.in_flight) == 2:
            loop.read()
        loop.launch()
    assert loop.sequences[1].num_in_flight_tokens > 0
    return loop


def prefill_between_decodes_that_need_blocks() -> Loop:
    """Request 4 has a chunk of 8 of its 13 tokens in flight. Four decodes, two older and two younger than it,
    each need a new block; two blocks are free."""
    loop = make_loop(num_kv_blocks=1 + 8, max_model_len=32, max_num_batched_tokens=12, max_num_seqs=8)
    for number, priority in enumerate((0, 0, 2, 2)):
        loop.add(prompt(3, number), max_tokens=5, priority=priority)
    loop.step()
    loop.add(prompt(13, 4), max_tokens=2, priority=1)
    assert chunks(loop.launch()) == {"0": (3, 4), "1": (3, 4), "2": (3, 4), "3": (3, 4), "4": (0, 8)}
    assert loop.manager.num_free_blocks == 2
    return loop
