"""What open streams cost a step: N requests that decode at once, each for a client that reads along or does not.

    python bench/machines/async_streams.py                     the default model, 500 clients
    python bench/machines/async_streams.py --model tiny        a model so small that the host's work is most of a step
    python bench/machines/async_streams.py --clients 100 --rounds 5 --json streams.json

Clients that are "final" await one output at the end; "delta" and "cumulative" ones take one for each token. The figure
is the time from one step to the next while all requests decode, which holds all that the engine's thread does and
waits for. The ways take turns on one engine; medians over all steps of all rounds, and their tenth percentile, which a
machine with other work to do disturbs less. CPU time is of the thread that reads, and of the one that steps without
the threads that compute for it, per token.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nanovllm import AsyncLLM, SamplingParams, StepRecord
from nanovllm.model.default_model import DEFAULT_MODEL, ensure_default_model

WAYS = ("final", "delta", "cumulative")


def model_and_tokenizer(name: str) -> tuple[Any, Any]:
    """The default model, or two small random layers under its tokenizer and vocabulary of a few thousand."""
    if name != "tiny":
        return name, None
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=4096, num_hidden_layers=2, max_position_embeddings=4096, eos_token_id=None, **sizes)
    return LlamaForCausalLM(config).eval(), str(ensure_default_model())


@dataclass(slots=True)
class Tally:
    """What was measured of one way."""

    seconds: list[float] = field(default_factory=list)  # from step to step
    num_outputs: int = 0
    num_tokens: int = 0
    reading: float = 0.0  # CPU seconds
    stepping: float = 0.0

    def row(self) -> dict[str, float]:
        return {
            "steps": len(self.seconds),
            "p10_ms": statistics.quantiles(self.seconds, n=10)[0] * 1e3,
            "median_ms": statistics.median(self.seconds) * 1e3,
            "outputs": self.num_outputs,
            "reading_us": self.reading / self.num_tokens * 1e6,
            "stepping_us": self.stepping / self.num_tokens * 1e6,
        }


async def serve(llm: AsyncLLM, records: list[StepRecord], arguments: argparse.Namespace, kind: str) -> Tally:
    """One round: as many clients as are asked for, all at once."""
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)

    async def client(number: int) -> int:
        prompt = [17 + number % 4000, 99, 7, 30]
        return len([output async for output in llm.generate(prompt, params, output_kind=kind)])

    async def stepping() -> float:
        return await llm._run(lambda _: time.thread_time())

    gc.collect()
    records.clear()
    count = arguments.clients
    tally = Tally(num_tokens=count * arguments.tokens, reading=-time.thread_time(), stepping=-await stepping())
    tally.num_outputs = sum(await asyncio.gather(*map(client, range(count))))
    tally.stepping += await stepping()
    tally.reading += time.thread_time()
    for before, after in pairwise(records):
        if before.num_decode_tokens == after.num_decode_tokens == count:
            tally.seconds.append(after.time - before.time)
    return tally


async def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    records: list[StepRecord] = []
    model, tokenizer = model_and_tokenizer(arguments.model)
    limits = {"max_num_seqs": arguments.clients, "max_model_len": 512, "kv_cache_memory_bytes": 4 * 2**30}
    totals = {way: Tally() for way in WAYS}
    async with AsyncLLM(model, tokenizer=tokenizer, on_step=records.append, **limits) as llm:
        await serve(llm, records, arguments, "delta")  # kernels are compiled, memory is touched
        for _ in range(arguments.rounds):
            for way in WAYS:
                tally = await serve(llm, records, arguments, way)
                for name in (f.name for f in fields(Tally)):
                    setattr(totals[way], name, getattr(totals[way], name) + getattr(tally, name))
    return {way: tally.row() for way, tally in totals.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a model, or 'tiny' (default %(default)s)")
    parser.add_argument("--clients", type=int, default=500, help="requests at once (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=100, help="that each generates (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments))
    print(f"{arguments.model}, {arguments.clients} clients of {arguments.tokens} tokens, {arguments.rounds} rounds")
    print(f"{'way':<12}{'steps':>7}{'p10 ms':>9}{'slower':>9}{'median ms':>11}{'slower':>9}", end="")
    print(f"{'outputs':>9}{'reading us':>12}{'stepping us':>13}")
    for way, row in rows.items():
        print(f"{way:<12}{row['steps']:>7}", end="")
        for name, width in (("p10_ms", 9), ("median_ms", 11)):
            print(f"{row[name]:>{width}.2f}{(row[name] / rows['final'][name] - 1) * 100:>+8.1f}%", end="")
        print(f"{row['outputs']:>9}", end="")
        print(f"{row['reading_us']:>12.1f}{row['stepping_us']:>13.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
