"""Block managers with blocks of four tokens, and sequences computed in them."""

from nanovllm.block_manager import BlockManager
from nanovllm.core.sequence import Sequence
from tests.support.scheduling import make_sequence

SIZE = 4
STEP = 1


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


A, B, C, D = ([n] * SIZE for n in range(1, 5))  # one block of tokens each
