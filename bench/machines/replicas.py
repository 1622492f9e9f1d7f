"""What replicas cost and how fast a stream moves: a front before one engine process, two of them started, one killed.

    python bench/machines/replicas.py                          the default model
    python bench/machines/replicas.py --model tiny             a model so small that messages are most of a step
    python bench/machines/replicas.py --parts served kill --rounds 5
    python bench/machines/replicas.py --model 0.6b --requests 256 --tokens 256      random weights, on GPUs

offline, served: tokens per second of the same requests, by one engine in this process and by one behind the front, in
    turn; the ratio of medians. CPU seconds are of this process, the front's alone in the second case. Of several GPUs
    the one behind the front has the last, so that both are there at once.
start: seconds until `LLM(...)` returns, each in a new process: one engine, and two replicas at once.
hits: prompt tokens found in prefix caches by conversations, with one engine and with two replicas.
kill: kill -9 of one of two replicas while all requests stream; seconds from then to the next token of each stream that
    moves, with what it recomputes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from random_models import SHAPES, NoText, checkpoint  # beside this file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import nanovllm.async_llm
import nanovllm.llm
from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.model.default_model import DEFAULT_MODEL, ensure_default_model
from nanovllm.replicas.opening import open_pool

PARTS = ("offline", "served", "start", "kill", "hits")
PROMPT_TOKENS = 100


def model_folder(name: str) -> str:
    """The default model, a folder, random weights of a real one's shape, or two small random layers."""
    if name == DEFAULT_MODEL:
        return str(ensure_default_model())
    if name != "tiny":
        return str(checkpoint(name)) if name in SHAPES else name
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = tempfile.mkdtemp(prefix="nanovllm-replicas-")
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ensure_default_model()).save_pretrained(folder)
    return folder


@contextmanager
def one_behind_a_front() -> Iterator[None]:
    """`LLM` and `AsyncLLM` put even a single engine into a process of its own."""
    doors = (nanovllm.llm, nanovllm.async_llm)
    before = [door.open_engine for door in doors]  # type: ignore[attr-defined]
    for door in doors:
        door.open_engine = open_pool  # type: ignore[attr-defined]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if (num_gpus := torch.cuda.device_count()) > 1:  # which it has counted for good: the engine here uses the first
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[-1] if visible else str(num_gpus - 1)
    try:
        yield
    finally:
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        else:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        for door, function in zip(doors, before, strict=True):
            door.open_engine = function  # type: ignore[attr-defined]


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """A GPU takes the checkpoint's dtype; a CPU computes in float32."""
    own: dict[str, Any] = {"dtype": "auto" if torch.cuda.is_available() else "float32"}
    own["max_model_len"] = 4096 if torch.cuda.is_available() else 1024
    if options.shape is not None:
        own["tokenizer"] = NoText()
    return own


def prompts(count: int, seed: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 512, (count, length), generator=generator).tolist()


def params(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=options.tokens, ignore_eos=True)


def offline(llm: LLM, options: argparse.Namespace, seed: int) -> int:
    outputs = llm.generate(prompts(options.requests, seed), params(options), use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def served(llm: AsyncLLM, options: argparse.Namespace, seed: int) -> int:
    async def read(prompt: list[int]) -> int:
        outputs = llm.generate(prompt, params(options), output_kind="delta")
        return sum([len(output.outputs[0].token_ids) async for output in outputs])

    async def read_all() -> int:
        return sum(await asyncio.gather(*map(read, prompts(options.requests, seed))))

    return asyncio.run(read_all())


def compare(
    name: str, door: Any, run: Callable[[Any, argparse.Namespace, int], int], options: argparse.Namespace
) -> None:
    """One engine here and one behind a front, in turn."""
    own = engine_options(options)
    here = door(options.model, **own)
    with one_behind_a_front():
        behind = door(options.model, **own)
    rates: dict[str, list[float]] = {"here": [], "behind": []}
    seconds: dict[str, list[float]] = {"here": [], "behind": []}
    for turn in range(-1, options.rounds):
        for place, llm in (("here", here), ("behind", behind)):
            begin, cpu = time.perf_counter(), time.process_time()
            num_tokens = run(llm, options, turn)
            if turn >= 0:  # the first round warms up
                rates[place].append(num_tokens / (time.perf_counter() - begin))
                seconds[place].append((time.process_time() - cpu) / num_tokens)
    medians = {place: statistics.median(each) for place, each in rates.items()}
    ratios = sorted(after / before for before, after in zip(rates["here"], rates["behind"], strict=True))
    print(
        f"{name}: {medians['here']:.0f} tokens/s here, {medians['behind']:.0f} behind the front, ratio of "
        f"medians {medians['behind'] / medians['here']:.3f} (turns {ratios[0]:.3f} to {ratios[-1]:.3f}); "
        f"the front takes {1e6 * statistics.median(seconds['behind']):.0f} us of CPU a token",
        flush=True,
    )
    for llm in (here, behind):
        asyncio.run(llm.close()) if isinstance(llm, AsyncLLM) else llm.close()


START = """
import sys, time
begin = time.perf_counter()
from nanovllm import LLM
with LLM(sys.argv[1], max_model_len=1024, data_parallel_size=int(sys.argv[2])):
    print(time.perf_counter() - begin)
"""


def start(options: argparse.Namespace) -> None:
    took: dict[int, list[float]] = {1: [], 2: []}
    if options.shape is not None:  # any tokenizer: it is loaded, and not asked
        from tests.support.tiny_models import tiny_tokenizer

        tiny_tokenizer().save_pretrained(options.model)
    for _ in range(options.rounds):
        for count, each in took.items():
            command = [sys.executable, "-c", START, options.model, str(count)]
            each.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]))
    one, two = (statistics.median(each) for each in took.values())
    print(
        f"start: one engine {one:.1f} s, two replicas {two:.1f} s, ratio {two / one:.2f}; imports included. "
        f"{[round(each, 2) for each in took[1]]}, {[round(each, 2) for each in took[2]]}",
        flush=True,
    )


def kill(options: argparse.Namespace) -> None:
    gaps: list[float] = []
    recomputed: list[int] = []
    own, count = engine_options(options), options.replicas
    with LLM(options.model, data_parallel_size=count, **own) as llm:
        for turn in range(options.rounds):
            while any(replica.state != "up" for replica in llm.replicas()):
                llm._engine.step()
            # Replicas run ahead of a slow reader.
            long = SamplingParams(seed=1, max_tokens=own["max_model_len"] - PROMPT_TOKENS - 24, ignore_eos=True)
            streams = [llm.stream(prompt, long) for prompt in prompts(options.requests, turn)]
            shown = {id(stream): next(stream) for stream in streams}
            for _ in range(options.tokens):
                for stream in streams:
                    shown[id(stream)] = next(stream)
            victim = turn % count
            moved = {
                request.new.request_id: PROMPT_TOKENS + len(request.samples[0].token_ids)
                for request in llm._engine.replicas[victim].requests.values()  # type: ignore[attr-defined]
            }
            recomputed += moved.values()
            os.kill(llm.replicas()[victim].process_id or 0, signal.SIGKILL)
            begin = time.perf_counter()
            waiting = {stream for stream in streams if shown[id(stream)].request_id in moved}
            while waiting:
                for stream in list(waiting):
                    output = next(stream)
                    if output.metrics.num_preemptions:  # its first token in the other replica
                        gaps.append(time.perf_counter() - begin)
                        waiting.discard(stream)
            for stream in streams:
                stream.close()
    gaps.sort()
    worst = gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]
    print(
        f"kill: {len(gaps)} moved streams, seconds to their next token: median {statistics.median(gaps):.3f}, p99 "
        f"{worst:.3f}, for {statistics.mean(recomputed):.0f} tokens each to recompute, "
        f"{sum(recomputed) // options.rounds} a kill",
        flush=True,
    )


def hit_rate(llm: LLM, options: argparse.Namespace) -> float:
    """Of conversations of four turns, all at once: a prompt is what was said before, and 60 tokens more."""
    llm.reset_prefix_cache()
    before = llm.stats()
    length = PROMPT_TOKENS * (4 if torch.cuda.is_available() else 1)  # a GPU has longer blocks
    said = prompts(options.requests, 77, length)
    for turn in range(4):
        outputs = llm.generate(said, params(options), use_tqdm=False)
        more = prompts(options.requests, 78 + turn)
        said = [
            [*asked, *output.outputs[0].token_ids, *new[:60]]
            for asked, output, new in zip(said, outputs, more, strict=True)
        ]
    stats = llm.stats()
    queries = stats.prefix_cache_queries - before.prefix_cache_queries
    return (stats.prefix_cache_hits - before.prefix_cache_hits) / queries


def hits(options: argparse.Namespace) -> None:
    rates = []
    for count in (1, options.replicas):
        with LLM(options.model, data_parallel_size=count, **engine_options(options)) as llm:
            rates.append(hit_rate(llm, options))
    print(
        f"hits: {rates[0]:.3f} of prompt tokens with one engine, {rates[1]:.3f} with {options.replicas} replicas",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=2, help="for kill and hits")
    options = parser.parse_args()
    options.shape = options.model if options.model in SHAPES and options.model != "tiny" else None
    options.model = model_folder(options.model)
    if "offline" in options.parts:
        compare("offline", LLM, offline, options)
    if "served" in options.parts:
        compare("served", AsyncLLM, served, options)
    if "start" in options.parts:
        start(options)
    if "kill" in options.parts:
        kill(options)
    if "hits" in options.parts:
        hits(options)


if __name__ == "__main__":
    main()
