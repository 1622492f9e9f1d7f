"""Cost model: the time of a step from its work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any, NamedTuple

from nanovllm.batch import ScheduledBatch
from nanovllm.features.costs.buckets import RowSizes
from nanovllm.features.groups.cache_pools import CacheGroup

FULL = CacheGroup()
# Candidate numbers of tokens at which dense layers turn from memory-bound to compute-bound.
KNEES = (4, 8, 16, 32, 64, 128, 256, 512)


class StepWork(NamedTuple):
    """Quantities that determine the time of a step.

    num_tokens: rows of the dense layers: new tokens, on a GPU padded to the bucket size.
    num_decodes, num_chunks: sequences by kind of attention.
    num_context_tokens: KV entries that decodes read; a prefix common to decodes with the same first block counts once,
        as a kernel may read it once. With cache groups: those in sight, each group's by its share of a token's bytes;
        a decode's recurrent state, read and written, counts as the tokens with as many bytes of K and V.
    num_shared_context_tokens: further entries if each decode counted its whole context.
    num_chunk_pairs: (query, key) pairs in the attention of chunks, likewise.
    num_samples: rows of the vocabulary projection and the sampler.
    """

    num_tokens: int
    num_decodes: int
    num_chunks: int
    num_context_tokens: int
    num_shared_context_tokens: int
    num_chunk_pairs: int
    num_samples: int

    @classmethod
    def from_batch(
        cls, batch: ScheduledBatch, block_size: int, sizes: RowSizes | None = None, groups: Sequence[CacheGroup] = ()
    ) -> StepWork:
        """Return the work of a batch.

        Args:
            sizes: buckets that the engine pads to, if any.
            groups: the model's cache groups; none for full attention alone.
        """
        num_decodes = batch.num_decodes
        num_tokens = batch.num_decodes
        num_pairs = 0
        num_samples = batch.num_decodes
        state_bytes = sum(group.kind.record_bytes or 0 for group in groups)
        groups = _paged(groups)
        num_single = num_decodes
        num_runs = 0
        run_rows = 0
        run_context = 0
        run_shared = 0
        for _, start, size, num_drawn, *_ in batch.entries[num_decodes:]:
            num_tokens += size
            num_samples += num_drawn
            pairs = _num_pairs(groups, start, size)
            if sizes is not None and 1 < num_drawn == size:  # decodes with common blocks: `runs_as_decodes`
                num_runs = num_runs + 1
                run_rows = run_rows + size
                run_context += _num_seen(groups, start + size)
                run_shared += pairs - _num_seen(groups, start + size)
                continue
            num_single += size == 1
            num_pairs += pairs
        decodes = batch.entries[:num_decodes]
        shared = context = 0
        if groups and not groups[0].kind.is_full:
            context = sum([_num_seen(groups, entry.start + 1) for entry in decodes])
        else:
            share = groups[0].block_bytes / sum(group.block_bytes for group in groups) if groups else 1
            shared = block_size * _num_shared_blocks([entry.block_table for entry in decodes])
            context = round(sum([_num_seen(groups, entry.start + 1) for entry in decodes]) - share * shared)
            shared = round(share * shared)
        if state_bytes and groups:
            context += round(num_decodes * 2 * state_bytes * block_size / sum(group.block_bytes for group in groups))
        num_chunks = sum([entry.num_new_tokens > 0 for entry in batch.entries[num_decodes:]]) - num_runs  # no forks
        if sizes is not None:
            num_single += run_rows
            _, num_tokens = sizes.padded(num_single, num_tokens - num_single)  # runs are laid out as decodes
        return cls(
            num_tokens, num_decodes + run_rows, num_chunks, context + run_context, shared + run_shared, num_pairs,
            num_samples,
        )  # fmt: skip

    def with_chunk(
        self, start: int, size: int, sizes: RowSizes | None = None, groups: Sequence[CacheGroup] = ()
    ) -> StepWork:
        """The work of decodes and a last chunk of `size` tokens; `sizes` and `groups` as above."""
        num_tokens = self.num_decodes + size if sizes is None else sizes.padded(self.num_decodes, size)[1]
        num_pairs = self.num_chunk_pairs + _num_pairs(_paged(groups), start, size)
        return self._replace(
            num_tokens=num_tokens,
            num_chunks=self.num_chunks + 1,
            num_chunk_pairs=num_pairs,
            num_samples=self.num_samples + 1,
        )

    @property
    def num_sequences(self) -> int:
        return self.num_decodes + self.num_chunks


def _paged(groups: Sequence[CacheGroup]) -> list[CacheGroup]:
    """The groups of K and V."""
    return [group for group in groups if group.kind.record_bytes is None and group.block_bytes]


def _num_seen(groups: Sequence[CacheGroup], num_tokens: int) -> int:
    return _weighted(groups, [group.kind.num_seen(num_tokens) for group in groups]) if groups else num_tokens


def _num_pairs(groups: Sequence[CacheGroup], start: int, size: int) -> int:
    return _weighted(groups, [group.kind.num_pairs(start, size) for group in groups or (FULL,)])


def _weighted(groups: Sequence[CacheGroup], counts: list[int]) -> int:
    """The groups' counts, each by its share of the bytes of a token."""
    if len(counts) == 1:
        return counts[0]
    num_bytes = [group.block_bytes for group in groups]
    mean: float = sum(map(mul, num_bytes, counts)) / sum(num_bytes)
    return round(mean)


def _num_shared_blocks(tables: Sequence[list[int]]) -> int:
    """Block reads saved by sharing a common prefix."""
    if len({table[0] for table in tables}) == len(tables):
        return 0
    groups: dict[int, list[list[int]]] = {}
    for table in tables:
        groups.setdefault(table[0], []).append(table)
    num_blocks = 0
    for group in groups.values():
        first = min(group)  # their common prefix is the group's
        last = max(group)
        pairs = enumerate(zip(first, last, strict=False))
        common = next((number for number, (a, b) in pairs if a != b), min(len(first), len(last)))
        num_blocks += (len(group) - 1) * common
    return num_blocks


@dataclass(frozen=True, slots=True)
class DeviceCost:
    """Seconds of a step between its launch and its tokens.

    fixed: every step: reading the weights, starting the kernels.
    per_token_below, per_token_above: dense work per new token up to the `knee`-th and after it. The first is about 0
        where reading the weights bounds small steps.
    per_decode, per_chunk: attention of one more sequence.
    per_context_token: load of one token's K and V for a decode.
    per_shared_context_token: load of a shared token for one more decode; 0 if the kernel loads it once.
    per_chunk_pair: one query with one key of a chunk.
    per_sample: vocabulary projection and sampling of one row.
    both: a step with decodes and chunks: each layer calls attention twice.
    """

    knee: int
    fixed: float = 0.0
    per_token_below: float = 0.0
    per_token_above: float = 0.0
    per_decode: float = 0.0
    per_chunk: float = 0.0
    per_context_token: float = 0.0
    per_shared_context_token: float = 0.0
    per_chunk_pair: float = 0.0
    per_sample: float = 0.0
    both: float = 0.0

    def seconds(self, work: StepWork) -> float:
        return float(sum(map(mul, self.coefficients, columns(work, self.knee))))

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Coefficients in the order of `columns`."""
        return (
            self.fixed,
            self.per_token_below,
            self.per_token_above,
            self.per_decode,
            self.per_chunk,
            self.per_context_token,
            self.per_shared_context_token,
            self.per_chunk_pair,
            self.per_sample,
            self.both,
        )


def columns(work: StepWork, knee: int) -> tuple[int, ...]:
    """Factors of the coefficients of `DeviceCost`, in their order."""
    below = min(work.num_tokens, knee)
    return (1, below, work.num_tokens - below, *work[1:], int(work.num_decodes > 0 and work.num_chunks > 0))


@dataclass(frozen=True, slots=True)
class HostCost:
    """Host seconds of a step: a fixed part, one per sequence, and more for each that has a chunk."""

    fixed: float = 0.0
    per_sequence: float = 0.0
    per_chunk: float = 0.0

    def seconds(self, num_sequences: int, num_chunks: int = 0) -> float:
        return self.fixed + self.per_sequence * num_sequences + self.per_chunk * num_chunks


@dataclass(frozen=True, slots=True)
class IntakeCost:
    """Host seconds of adding a request: a fixed part, and one per prompt token."""

    fixed: float = 0.0
    per_token: float = 0.0

    def seconds(self, num_prompt_tokens: int) -> float:
        return self.fixed + self.per_token * num_prompt_tokens


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of the parts of a step, and of adding a request.

    schedule: host time to schedule the step.
    device: device time of the step.
    update: host time from the arrival of its tokens to the start of the next step or the next added request.
    launch: host time to build the batch layout and launch the step on a GPU.
    launch_blocks: True if a launch computes the step, as on a CPU; overlap hides nothing, `device` is all of execute.
    head_start: last part of a launch, during which an idle device already computes; a step queued on a busy device
        takes this much longer than `device`.
    intake: host time to validate and queue a request between two steps; a server validates in another thread, which
        shares the interpreter.
    front_delay: time from a request's arrival to its engine: delay of a server's threads and of the front of several
        replicas. Engines cannot measure it: it is `RequestMetrics.queue_time` on an idle server, less the intake.
    """

    schedule: HostCost
    device: DeviceCost
    update: HostCost
    launch: HostCost = HostCost()
    launch_blocks: bool = True
    intake: IntakeCost = IntakeCost()
    head_start: float = 0.0
    front_delay: float = 0.0

    def step_cost(self, *, overlap: bool) -> DeviceCost:
        """Seconds of a whole step, the host's included, unless overlap hides them."""
        if overlap:
            return self.device
        hosts = (self.schedule, self.launch, self.update)
        device = self.device
        per_sequence = sum(host.per_sequence for host in hosts)
        per_chunk = sum(host.per_chunk for host in hosts)
        return replace(
            device,
            fixed=device.fixed + sum(host.fixed for host in hosts),
            per_decode=device.per_decode + per_sequence,
            per_chunk=device.per_chunk + per_sequence + per_chunk,
        )

    @classmethod
    def from_dict(cls, parts: dict[str, Any]) -> CostModel:
        """Cost model from its `dataclasses.asdict`; raises TypeError or KeyError for anything else."""
        kinds = {"schedule": HostCost, "device": DeviceCost, "update": HostCost, "launch": HostCost}
        made = {name: kind(**parts[name]) for name, kind in (kinds | {"intake": IntakeCost}).items()}
        return cls(**(parts | made))
