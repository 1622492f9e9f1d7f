"""What replicas cost and how fast a stream moves: a front before one engine process, two of them started, one killed.

    python bench/machines/replicas.py                          the default model
    python bench/machines/replicas.py --model tiny             a model so small that messages are most of a step
    python bench/machines/replicas.py --parts served kill --rounds 5
    python bench/machines/replicas.py --model 0.6b --requests 256 --tokens 256      random weights, on GPUs
    python bench/machines/replicas.py --model 0.6b --share-gpu --parts start kill   two replicas on one GPU

offline, served: tokens per second of the same requests, by one engine in this process and by one behind the front, in
    turn; the ratio of medians. CPU seconds are of this process, the front's alone in the second case. Of several GPUs
    the one behind the front has the last, so that both are there at once.
start: seconds until `LLM(...)` returns, each in a new process: one engine, and two replicas at once.
kill: kill -9 of one of the replicas while all requests stream; seconds from then to the next token of each stream that
    moves, with what they recompute.
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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from random_models import SHAPES, NoText, checkpoint  # beside this file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.features.llm import open_engine
from nanovllm.model.default_model import DEFAULT_MODEL, ensure_default_model
from nanovllm.replicas import opening
from nanovllm.replicas.replica import ReplicaResources
from nanovllm.streaming.engines import EngineInterface

PARTS = ("offline", "served", "start", "kill")
PROMPT_TOKENS = 100
GPU_CACHE_BYTES = 16 * 2**30  # of each engine: two may be on one GPU


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


def open_behind(*arguments: Any, **options: Any) -> EngineInterface:
    """`open_engine` of a process, whatever the front door asks for."""
    return open_engine(*arguments, **options | {"engine_process": True})


@contextmanager
def one_behind_a_front() -> Iterator[None]:
    """`LLM` and `AsyncLLM` put even a single engine into a process of its own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if (num_gpus := torch.cuda.device_count()) > 1:  # which it has counted for good: the engine here uses the first
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[-1] if visible else str(num_gpus - 1)
    try:
        with (
            mock.patch("nanovllm.features.llm.open_engine", open_behind),
            mock.patch.object(AsyncLLM, "_open", staticmethod(open_behind)),
        ):
            yield
    finally:
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        else:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)


def open_replicas(model: str, count: int, options: dict[str, Any]) -> AsyncLLM:
    """As a server opens them: they capture CUDA graphs while idle. A single one has its own process too."""
    with one_behind_a_front():
        return AsyncLLM(
            model, tokenizer=NoText(), data_parallel_size=count, prepares_when_idle=True, record_itl=True, **options
        )


def share_one_gpu() -> None:
    """Put every replica on the first GPU, where there is no second one: starts and pauses count, rates do not."""

    def shares(config: Any, **_: Any) -> list[ReplicaResources]:
        return [ReplicaResources(frozenset(os.sched_getaffinity(0)), {})] * config.data_parallel_size

    opening.split_host = shares


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """A GPU takes the checkpoint's dtype; a CPU computes in float32."""
    own: dict[str, Any] = {"dtype": "auto" if torch.cuda.is_available() else "float32"}
    own["max_model_len"] = 4096 if torch.cuda.is_available() else 1024
    if torch.cuda.is_available():
        own["kv_cache_memory_bytes"] = GPU_CACHE_BYTES
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
model, count, cache_bytes, is_shared = sys.argv[1:]
if int(is_shared) and int(count) > 1:  # as share_one_gpu
    import os
    from nanovllm.replicas import opening
    from nanovllm.replicas.replica import ReplicaResources
    share = ReplicaResources(frozenset(os.sched_getaffinity(0)), {})
    opening.split_host = lambda config, **_: [share] * config.data_parallel_size
options = {"kv_cache_memory_bytes": int(cache_bytes)} if int(cache_bytes) else {}
with LLM(model, max_model_len=1024, data_parallel_size=int(count), **options):
    print(time.perf_counter() - begin)
"""


def start(options: argparse.Namespace) -> None:
    took: dict[int, list[float]] = {1: [], 2: []}
    if options.shape is not None:  # any tokenizer: it is loaded, and not asked
        from tests.support.tiny_models import tiny_tokenizer

        tiny_tokenizer().save_pretrained(options.model)
    cache_bytes = GPU_CACHE_BYTES if torch.cuda.is_available() else 0
    rest = [str(cache_bytes), str(int(options.share_gpu))]
    for turn in range(-1, options.rounds):
        for count, each in took.items():
            command = [sys.executable, "-c", START, options.model, str(count), *rest]
            seconds = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
            print(f"start: {count} up after {seconds:.2f} s" + (", not counted" if turn < 0 else ""), flush=True)
            if turn >= 0:  # the first round compiles what later ones find
                each.append(seconds)
    one, two = (statistics.median(each) for each in took.values())
    print(
        f"start: one engine {one:.1f} s, two replicas {two:.1f} s, ratio {two / one:.2f}; imports included",
        flush=True,
    )


async def kill_one(llm: AsyncLLM, num_requests: int, *, victim: int = 0, seed: int = 5) -> list[float]:
    """Seconds from a kill -9 of a replica to the next token of each stream that moves; readers keep up."""
    shown: Counter[str] = Counter()
    gaps: dict[str, float] = {}
    killed_at = 0.0

    async def read(request_id: str, prompt: list[int]) -> None:
        long = SamplingParams(seed=1, max_tokens=1024 - 200, ignore_eos=True)
        async for output in llm.generate(prompt, long, request_id=request_id, output_kind="delta"):
            shown[request_id] += 1
            if killed_at and output.metrics.num_preemptions:  # its first token in the other replica
                gaps.setdefault(request_id, time.monotonic() - killed_at)

    names = {f"kill-{seed}-{number}": each for number, each in enumerate(prompts(num_requests, seed, 200))}
    tasks = [asyncio.create_task(read(*each)) for each in names.items()]
    while len(shown) < num_requests or min(shown.values()) < 8:
        await asyncio.sleep(0.005)
    moved = await llm.inspect(
        lambda pool: {
            request.new.request_id: len(request.new.prompt_token_ids) + len(request.samples[0].token_ids)
            for request in pool.replicas[victim].requests.values()
        }
    )
    killed_at = time.monotonic()
    os.kill(llm.replicas()[victim].process_id or 0, signal.SIGKILL)
    while not gaps.keys() >= moved.keys() and time.monotonic() < killed_at + 30.0:
        await asyncio.sleep(0.005)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    found = sorted(gaps.values())
    print(
        f"kill: {len(found)} of {len(moved)} moved streams, seconds to their next token: median "
        f"{statistics.median(found):.3f}, p99 {found[int(0.99 * (len(found) - 1))]:.3f}; {sum(moved.values())} tokens "
        "to recompute",
        flush=True,
    )
    return found


def kill(options: argparse.Namespace) -> None:
    async def kill_each_in_turn() -> None:
        async with AsyncLLM(options.model, data_parallel_size=options.replicas, **engine_options(options)) as llm:
            for turn in range(options.rounds):
                while any(replica.state != "up" for replica in llm.replicas()):
                    await asyncio.sleep(0.1)
                await kill_one(llm, options.requests, victim=turn % options.replicas, seed=turn)

    asyncio.run(kill_each_in_turn())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=2, help="for kill")
    parser.add_argument("--share-gpu", action="store_true", help="all replicas on the first GPU")
    options = parser.parse_args()
    if options.share_gpu:
        share_one_gpu()
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


if __name__ == "__main__":
    main()
