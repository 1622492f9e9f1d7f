"""Schedulers with many sequences past their prompts, for micro-benchmarks, and figures reported per unit of work."""

import random

from nanovllm.block_manager import BlockManager
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.sequence import NewRequest, Sequence
from tests.support.scheduling import shared_scheduler

BLOCK_SIZE = 64
MAX_MODEL_LEN = 4096


def make_sequence(arrival, prompt):
    return Sequence(NewRequest(str(arrival), prompt, SamplingParams()), arrival=arrival, max_model_len=MAX_MODEL_LEN)


def make_scheduler(num_seqs, num_kv_blocks):
    config = EngineConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=num_seqs * BLOCK_SIZE + num_seqs,
        max_num_seqs=num_seqs,
        num_kv_blocks=num_kv_blocks,
        max_num_partial_prefills=num_seqs,
        max_long_partial_prefills=num_seqs,
        long_prefill_token_threshold=MAX_MODEL_LEN,
    )
    return shared_scheduler(config, BlockManager(num_kv_blocks, BLOCK_SIZE))


def decoding(num_running, num_waiting=0):
    """Decoding sequences at different slots of their blocks."""
    scheduler = make_scheduler(num_running, 1 + (num_running + 1) * MAX_MODEL_LEN // BLOCK_SIZE)
    rng = random.Random(0)
    for arrival in range(num_running + num_waiting):
        scheduler.add(make_sequence(arrival, [rng.randrange(50_000) for _ in range(1 + arrival % BLOCK_SIZE)]))
    batch = scheduler.schedule()
    scheduler.update(batch, [7] * len(batch.sampling))
    assert len(scheduler.running) == num_running
    return scheduler


def report_per(benchmark, unit, count, function):
    benchmark.pedantic(function, rounds=1000, warmup_rounds=100)
    benchmark.extra_info[f"us per {unit}"] = round(benchmark.stats.stats.median * 1e6 / count, 3)
