"""Prompts with a common beginning, and others that evict it; a block manager with a tier in host memory."""

from nanovllm.features.tiers.books import TierBooks
from nanovllm.features.tiers.costs import LoadCosts
from nanovllm.features.tiers.tiered_blocks import TieredBlocks
from tests.support.public_options import make_sequence

SHARED = list(range(40, 104))  # four blocks of 16
PROMPTS = [[*SHARED, *range(5, 16)], [*SHARED, *range(20, 29)]]
OTHERS = [list(range(first, first + 110)) for first in range(3, 120, 9)]  # enough to evict all else


def cached(outputs):
    return [output.num_cached_tokens for output in outputs]


def tiered_blocks(num_slots=100, *, num_blocks=6, costs=None):
    """A manager of blocks of four tokens, and the books of its tier: a byte a block."""
    manager, books = TieredBlocks(num_blocks, 4), TierBooks([1], num_slots)
    manager.attach(books, costs or LoadCosts(), root_seed="model")
    return manager, books


def store(manager, sequence, count):
    """Hold the first blocks of a prompt in the tier; returns their nodes."""
    nodes = [manager.root_of("")]
    for index in range(count):
        nodes.append(nodes[-1].child(sequence.block_tokens(index, 4)))
        manager.books.hold(nodes[-1], 0, manager.books.take_slot(0))
    return nodes[1:]


def leave_idle(manager, tokens, step_id):
    """The blocks of a request that a step has computed, and that has ended."""
    sequence = make_sequence(tokens)
    count = len(sequence.token_ids) // 4
    manager.allocate(sequence, count)
    manager.register(sequence, 0, count, step_id)
    manager.take_copies(step_id)
    manager.commit(step_id)
    manager.release(sequence)
