"""Sequences, block managers with blocks of four tokens, and the invariants of a manager's books."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nanovllm.batch import NULL_BLOCK
from nanovllm.block_manager import BlockManager
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import NewRequest, Sequence

SIZE = 4
STEP = 1
A, B, C, D = ([n] * SIZE for n in range(1, 5))  # one block of tokens each


@dataclass(frozen=True, slots=True)
class MoreParams(SamplingParams):
    """Parameters with options that features may add."""

    min_tokens: int = 0
    is_plain: bool = True


def make_sequence(
    prompt: Iterable[int],
    given: SamplingParams | None = None,
    *,
    arrival: int = 0,
    priority: int = 0,
    arrival_time: float = 0.0,
    cache_salt: str = "",
    client: str = "",
    max_model_len: int = 64,
    eos_token_ids: Iterable[int] = (),
    seed: int = 0,
    params_class: type[SamplingParams] = SamplingParams,
    **params: object,
) -> Sequence:
    return Sequence(
        NewRequest(
            str(arrival),
            prompt,
            given or params_class(**params),
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
            client=client,
        ),
        arrival=arrival,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        seed=seed,
    )


def make_manager(num_free: int, **options: object) -> BlockManager:
    return BlockManager(num_free + 1, SIZE, **options)


def compute(manager: BlockManager, sequence: Sequence, num_tokens: int | None = None, *, step_id: int = STEP) -> int:
    """Compute the sequence up to `num_tokens` in one committed step, hits first; returns the number of blocks hit."""
    num_tokens = len(sequence.token_ids) if num_tokens is None else num_tokens
    hits = manager.lookup(sequence)
    manager.claim(sequence, hits)
    first = len(sequence.block_table)
    manager.allocate(sequence, manager.num_blocks_for(num_tokens) - first)
    manager.register(sequence, first, num_tokens // manager.block_size, step_id)
    manager.commit(step_id)
    sequence.num_computed_tokens = num_tokens
    return len(hits)


def release(manager: BlockManager, sequence: Sequence) -> None:
    manager.release(sequence)
    sequence.num_computed_tokens = 0


def computed(manager: BlockManager, tokens: list[int], **options: object) -> Sequence:
    sequence = make_sequence(tokens, **options)
    compute(manager, sequence)
    return sequence


def num_hits(manager: BlockManager, tokens: list[int], **options: object) -> int:
    return len(manager.lookup(make_sequence(tokens, **options)))


def check_blocks(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Every block is free or referenced, and a findable one holds the tokens of its entry behind its entry's prefix."""
    expected = [0] * manager.num_blocks
    for sequence in sequences:
        table = sequence.block_table
        assert len(table) == manager.num_blocks_for(sequence.num_computed_tokens), f"{sequence} holds {table}"
        assert len({*table}) == len(table), f"{sequence} holds a block twice"
        for index, block in enumerate(table):
            expected[block] += 1
            entry = manager.entry_of[block]
            if entry is not None:
                assert entry.tokens == sequence.block_tokens(index, manager.block_size), f"tokens of block {block}"
                if index == 0:
                    assert entry.parent == sequence.cache_salt, f"block {block} has another salt"
                elif (before := manager.entry_of[table[index - 1]]) is not None:
                    assert entry.parent == before.prefix_id, f"block {block} hangs on another prefix"
    assert manager.ref_counts == expected, "reference counts are not those of the block tables"
    free = {block for block in range(1, manager.num_blocks) if expected[block] == 0}
    assert expected[NULL_BLOCK] == 0 and {*manager.free_blocks} == free, "a block is lost, or free and referenced"
    of_id = {entry.prefix_id: entry for entry in manager.entries.values()}
    assert len(of_id) == len(manager.entries), "two contents share a prefix id"
    assert manager.holders.keys() == of_id.keys(), "an entry without blocks, or blocks without an entry"
    held = {block: of_id[prefix_id] for prefix_id, blocks in manager.holders.items() for block in blocks}
    found = {block: entry for block, entry in enumerate(manager.entry_of) if entry is not None}
    assert held == found and manager.num_findable_blocks == len(found), "a findable block that no entry names"
    assert all(entry.block_hash == name for name, entry in manager.entries.items()), "an entry under another hash"
