"""What cache groups are worth, by counting alone: `python bench/micro/cache_groups.py`. Seconds, no model, no torch.

1. KV tokens that fit into one memory for Gemma 3's shape at 32k, with groups and with one table for all layers.
2. The prefix cache's hit rate in a round robin of long conversations on that model, in pools that hold the windows that
   matter and not all that ever fell behind one: with the tails that are kept, and with everything aged alike.
3. The host's time a step for full attention (a plain block manager), and for the same requests with groups.
"""

from __future__ import annotations

import argparse
import random
import time

from nanovllm.block_manager import BlockManager
from nanovllm.cache.cache_groups import CacheGroups
from nanovllm.cache.cache_pools import CachePools, cache_groups_of, resolve_pools
from nanovllm.cache.group_blocks import GroupBlocks
from nanovllm.cache.kinds import LayerTraits, Sight
from nanovllm.cache.state_kinds import FULL, StateKind
from nanovllm.core.config import EngineConfig
from nanovllm.core.sampling_params import SamplingParams
from nanovllm.core.sequence import NewRequest, Sequence
from nanovllm.scheduler import Scheduler

MEMORY = 40 * 2**30
BLOCK_SIZE = 64
GEMMA_3_4B = {"num_layers": 34, "full_every": 6, "window": 1024, "num_kv_heads": 4, "head_dim": 256}


def gemma_layers() -> list[LayerTraits]:
    shape = GEMMA_3_4B
    heads = {"num_heads": 8, "num_kv_heads": shape["num_kv_heads"]}
    widths = {"head_dim": shape["head_dim"], "value_dim": shape["head_dim"]}
    windows = [
        None if index % shape["full_every"] == shape["full_every"] - 1 else shape["window"]
        for index in range(shape["num_layers"])
    ]
    return [LayerTraits(**heads, **widths, sight=Sight(window)) for window in windows]


def resolved(max_model_len: int, **options: int) -> EngineConfig:
    limits = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "block_size": BLOCK_SIZE} | options
    return EngineConfig(max_model_len=max_model_len, **limits).resolve_limits("cpu", max_model_len)


def pools_of(layers: list[LayerTraits], config: EngineConfig) -> CachePools:
    block_bytes = [2 * layer.token_values * BLOCK_SIZE for layer in layers]  # bfloat16
    return resolve_pools(
        config, cache_groups_of(layers, block_bytes, config.max_model_len), 0, max_model_len_is_set=True
    )[1]


def tokens_that_fit() -> None:
    config = resolved(32_768, kv_cache_memory_bytes=MEMORY)
    layers = gemma_layers()
    grouped = pools_of(layers, config)
    one = MEMORY // (sum(2 * layer.token_values for layer in layers) * BLOCK_SIZE)
    tokens, tokens_before = (grouped.num_blocks[0] - 1) * BLOCK_SIZE, (one - 1) * BLOCK_SIZE
    longest, longest_before = grouped.num_longest(32_768, BLOCK_SIZE), tokens_before // 32_768
    print(
        f"Gemma 3 4B's shape at 32k in {MEMORY >> 30} GiB: {tokens:,} KV tokens with groups, {tokens_before:,} with "
        f"one table: {tokens / tokens_before:.2f} times; sequences of 32k: {longest} and {longest_before}"
    )


class AgedAlike(GroupBlocks):
    """Without retention: what falls behind a window ages in the free list like everything else."""

    def free_unseen(self, table: list[int], first: int, end: int, junctions: object) -> None:
        for index in range(first, end):
            block, table[index] = table[index], 0
            self.unpin([block])


def round_robin(*, keeps_tails: bool) -> float:
    """The hit rate over the prompt tokens of the last rounds."""
    num_conversations, num_rounds, num_first, num_more, num_answer = 16, 8, 12_000, 200, 100
    config = resolved(32_768, max_num_seqs=4)
    kinds = (FULL, StateKind(window=GEMMA_3_4B["window"]))
    num_full = num_conversations * (num_first + num_rounds * (num_more + num_answer)) // BLOCK_SIZE + 600
    window_blocks = kinds[1].max_blocks(32_768, BLOCK_SIZE)
    # Beside what runs: a window and a half a conversation, for the new turn's before the old one's is dropped.
    num_window = num_conversations * (window_blocks + 12) + 4 * (window_blocks + config.max_num_batched_tokens // 64)
    manager = CacheGroups(
        kinds, (num_full, num_window), BLOCK_SIZE, max_model_len=32_768, max_chunk_tokens=config.max_num_batched_tokens
    )
    if not keeps_tails:
        manager.groups[1].__class__ = AgedAlike
    scheduler = Scheduler(config, manager)
    choice, drawn = random.Random(0), iter(range(10**6, 10**8))
    histories = [[choice.randrange(10**6) for _ in range(num_first)] for _ in range(num_conversations)]
    arrival = 0
    for turn in range(num_rounds):
        if turn == 2:  # the first rounds fill the cache
            scheduler.stats.prefix_cache_queries = scheduler.stats.prefix_cache_hits = 0
        for history in histories:
            params = SamplingParams(max_tokens=num_answer, ignore_eos=True)
            sequence = Sequence(NewRequest(str(arrival), history, params), arrival=arrival, max_model_len=32_768)
            arrival += 1
            scheduler.add(sequence)
            while not sequence.is_finished:
                batch = scheduler.schedule()
                assert batch is not None
                scheduler.update(batch, [next(drawn) for _ in batch.sampling])
            history[:] = sequence.token_ids.tolist() + [choice.randrange(10**6) for _ in range(num_more)]
    return scheduler.stats.prefix_cache_hits / scheduler.stats.prefix_cache_queries


def seconds_per_step(manager: BlockManager) -> float:
    scheduler = Scheduler(resolved(4096, max_num_seqs=64), manager)
    for number in range(64):
        request = NewRequest(str(number), [number] * 200, SamplingParams(max_tokens=600, ignore_eos=True))
        scheduler.add(Sequence(request, arrival=number, max_model_len=4096))
    num_steps, begin = 0, time.perf_counter()
    while scheduler.running or scheduler.waiting:
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.update(batch, [7] * len(batch.sampling))
        num_steps += 1
    return (time.perf_counter() - begin) / num_steps


def grouped_manager() -> CacheGroups:
    kinds = (FULL, StateKind(window=1024))
    return CacheGroups(kinds, (4000, 2000), BLOCK_SIZE, max_model_len=4096, max_chunk_tokens=1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of the host's time, the least of which counts")
    rounds = range(parser.parse_args().rounds)
    tokens_that_fit()
    rates = [round_robin(keeps_tails=keeps_tails) for keeps_tails in (True, False)]
    print(f"hit rate in the round robin: {rates[0]:.3f} with kept tails, {rates[1]:.3f} where everything ages alike")
    plain = min(seconds_per_step(BlockManager(4000, BLOCK_SIZE)) for _ in rounds)
    grouped = min(seconds_per_step(grouped_manager()) for _ in rounds)
    print(
        f"64 requests, scheduling a step: {1e6 * plain:.0f} us with full attention, {1e6 * grouped:.0f} us with groups"
    )


if __name__ == "__main__":
    main()
