"""Tensor parallelism on a pair of GPUs: collectives, the same tokens as on one, an end by a dead rank, and speed.

    PYTHONPATH=. python bench/machines/tensor_parallel.py collectives equality death speed
    PYTHONPATH=. python bench/machines/tensor_parallel.py equality death        both ranks on one GPU, if there is one

Each stage prints its figures as it goes. Speed is that of Qwen3-8B's shape on one GPU and on two: one request, 64
requests and W1. Its weights are drawn on the GPUs themselves, since writing and reading 16 GB takes minutes.
Without GPUs every stage runs with processes on a CPU: `speed --shape tiny --requests 4` tries the script itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import statistics
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from random_models import SHAPES, NoText, device  # beside this file
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.core.errors import EngineDeadError
from nanovllm.execution import workers
from nanovllm.model import loader, sharded_loading
from nanovllm.model.loader import LoadedModel
from nanovllm.model.ranks import Ranks
from nanovllm.model.sharding import shard_model
from nanovllm.tools.workloads.workloads import Workload, random_requests, w1

BEGIN = time.perf_counter()


def note(*words: Any) -> None:
    print(f"[{time.perf_counter() - BEGIN:5.1f} s]", *words, flush=True)


# ----------------------------------------------------------------------------------------------- weights on the spot


def draw_weights(source: str, config: Any, ranks: Ranks | None = None) -> LoadedModel:
    """In place of `loader.load_weights`: random weights of the folder's config, the same on every rank."""
    own_device = torch.device(device()) if ranks is None else ranks.device
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(own_device), torch.inference_mode(False):
            model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(source)).eval()
    finally:
        torch.set_default_dtype(before)
    head = None if ranks is None else shard_model(model, ranks)
    if own_device.type == "cuda":
        torch.cuda.empty_cache()
    return LoadedModel(model, None, is_live=False, identity=source, head=head)


def draw_shards(source: str, tokenizer: Any, config: Any, ranks: Ranks) -> LoadedModel:
    """In place of `sharded_loading.load_sharded`."""
    return dataclasses.replace(draw_weights(source, config, ranks), tokenizer=None if ranks.rank else tokenizer)


def draw_weights_everywhere() -> None:
    loader.load_weights, sharded_loading.load_sharded = draw_weights, draw_shards
    patch = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import tensor_parallel as t; "
        "t.sharded_loading.load_sharded = t.draw_shards\n"
    )
    workers.ENTRY = patch + workers.ENTRY.removeprefix(patch)


def folder_of(shape: str) -> str:
    folder = Path(tempfile.mkdtemp(prefix=f"nanovllm-{shape}-"))
    Qwen3Config(**SHAPES[shape], dtype=torch.bfloat16, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return str(folder)


# --------------------------------------------------------------------------------------------------------- stages


def microseconds(run: Any, *, count: int = 100) -> float:
    """Of one of many in a CUDA graph; on a CPU of one of many."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        for _ in range(count):
            run()
        return 1e6 * (time.perf_counter() - begin) / count
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(count):
            run()
        graph.capture_end()
        times = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def run_collectives(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, False)
    ranks = Ranks(rank, 2, torch.device("cuda", rank) if device() == "cuda" else torch.device("cpu"), store)
    one_shot = ranks._one_shot
    if rank == 0:
        note("all-reduces by number of values:", "NCCL's" if one_shot is None else one_shot.choice)
    ways = [("nccl", ranks._reduce, 1 << 30)]
    if one_shot is not None:
        ways += [("push", one_shot.push, 1 << 16), ("pull", one_shot.pull, 1 << 20)]
    for num_rows in (1, 4, 16, 64, 256, 512, 1024):
        states = torch.randn(num_rows, 4096, device=ranks.device, dtype=torch.bfloat16)
        everyone = ranks.all_gather(states).float().sum(0).to(torch.bfloat16)
        figures = {}
        for name, way, most in ways:
            if states.numel() > most:
                continue
            right = bool(torch.equal(way(states), everyone))
            ranks.barrier()
            figures[name] = f"{microseconds(partial(way, states)):.1f} us" + ("" if right else " WRONG")
        pairs = torch.zeros(num_rows, 2, dtype=torch.int32, device=ranks.device)
        figures["gather of pairs"] = f"{microseconds(partial(ranks.all_gather, pairs)):.1f} us"
        if rank == 0:
            note(f"all-reduce of {num_rows} rows:", figures)
    ranks.barrier()
    ranks.abort()
    os._exit(0)  # without the end of the group, which waits for its peers


def stage_collectives() -> None:
    """Run by itself: it needs no engine."""
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=run_collectives, args=(rank, store.port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        if process.is_alive():
            note("a process hangs")
            process.kill()


def stage_equality() -> None:
    """Tokens of tiny models in float32: `transformers`', without and with CUDA graphs."""
    from tests.support.equality import prompts, reference
    from tests.support.tiny_models import save_tiny, tiny_model

    folder = Path(tempfile.mkdtemp())
    save_tiny(folder, "qwen3")
    module = tiny_model("qwen3").to(device())
    some = prompts()[:12]
    expected = [reference(module, prompt) for prompt in some]
    sampled = SamplingParams(seed=5, temperature=0.9, max_tokens=16)
    kinds = {"seeded": sampled, "top_p": dataclasses.replace(sampled, top_p=0.9),
             "logprobs": dataclasses.replace(sampled, logprobs=2, prompt_logprobs=1)}  # fmt: skip
    small = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512, "num_kv_blocks": 80}
    found: dict[int, dict[str, Any]] = {}
    for name, options in (("eager", {"enforce_eager": True}), ("graphs", {"attention_backend": "flex"})):
        for size in (2, 1):
            with LLM(folder, tensor_parallel_size=size, block_size=64, **small, **options) as llm:
                note(f"{name}, {size} GPUs: built")
                greedy = llm.generate(some, SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)
                tokens = [output.outputs[0].token_ids for output in greedy]
                equal = sum(one == other for one, other in zip(tokens, expected, strict=True))
                note(f"{name}, {size} GPUs: greedy, {equal} of {len(some)} as transformers")
                found[size] = {}
                for kind, params in kinds.items():
                    outputs = llm.generate(some, params, use_tqdm=False)
                    found[size][kind] = [output.outputs[0].token_ids for output in outputs]
                captured = [llm._engine.model_runner.capture_ahead() for _ in range(3)]
                again = llm.generate(some, kinds["seeded"], use_tqdm=False)
                alike = [output.outputs[0].token_ids for output in again] == found[size]["seeded"]
                note(f"{name}, {size} GPUs: captured {sum(captured)} more while idle; tokens the same: {alike}")
        equal_kinds = {kind: found[1][kind] == found[2][kind] for kind in kinds}
        note(f"{name}: sampled tokens of 1 and 2 GPUs alike:", equal_kinds)


def stage_death() -> None:
    """A rank killed while both GPUs wait for each other."""
    draw_weights_everywhere()
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512, "num_kv_blocks": 80}
    with LLM(folder_of("tiny"), tokenizer=NoText(), tensor_parallel_size=2, block_size=64, **options) as llm:
        note("built")
        processes = llm._engine.model_runner.workers._processes
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8), use_tqdm=False)
        os.kill(processes[0].pid, signal.SIGSTOP)
        begin = time.perf_counter()
        threading.Timer(2.0, lambda: os.kill(processes[0].pid, signal.SIGKILL)).start()
        try:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=400), use_tqdm=False)
            note("WRONG: it generated on without a rank")
        except Exception as error:
            note(f"{type(error).__name__} {time.perf_counter() - begin - 2:.1f} s after the kill: {str(error)[:300]}")
        try:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
            note("WRONG: it generates without a rank")
        except EngineDeadError:
            note("EngineDeadError from then on")


def seconds_of(llm: LLM, workload: Workload) -> float:
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=request.num_output_tokens)
        for request in workload.requests
    ]
    llm.reset_prefix_cache()
    begin = time.perf_counter()
    llm.generate([request.prompt_token_ids for request in workload.requests], params, use_tqdm=False)
    return time.perf_counter() - begin


def capture_all(llm: LLM) -> int:
    """Capture what a server captures while it is idle; returns how many graphs."""
    count = 0
    while llm._engine.model_runner.capture_ahead():  # type: ignore[union-attr]
        count += 1
    return count


def measure_speed(shape: str, size: int, num_requests: int, *, rounds: int = 2) -> dict[str, float]:
    """Of the shape on so many GPUs: ms a token of one request, seconds of 64 requests, tokens per second of W1."""
    draw_weights_everywhere()
    within = {"vocab": SHAPES[shape]["vocab_size"]}
    options = {"max_model_len": min(4096, SHAPES[shape]["max_position_embeddings"]), "max_num_seqs": 256}
    figures: dict[str, float] = {}
    with LLM(folder_of(shape), tokenizer=NoText(), tensor_parallel_size=size, dtype="bfloat16", **options) as llm:
        note(f"{size} GPUs: built, {llm.config.num_kv_blocks} blocks, {llm.config.attention_backend}")
        note(f"{size} GPUs: captured {capture_all(llm)} graphs while idle")
        one, short = (random_requests(requests=1, prompt=128, output=count, **within) for count in (257, 1))
        times = [1e3 * (seconds_of(llm, one) - seconds_of(llm, short)) / 256 for _ in range(3)]
        figures["ms a token"] = statistics.median(times)
        note(f"{size} GPUs: one request, ms a token:", [round(t, 3) for t in times])
        whole = w1().first(num_requests)
        if within["vocab"] < 10_000:
            whole = random_requests(requests=num_requests, prompt=(100, 1024), output=(100, 1024), **within)
        for _ in range(rounds):
            seconds = seconds_of(llm, whole)
            figures["W1, tokens/s"] = whole.num_output_tokens / seconds
            note(f"{size} GPUs: {whole.name}, {seconds:.2f} s, {whole.num_output_tokens / seconds:.0f} tokens/s")
        many = random_requests(requests=min(64, num_requests), prompt=512, output=256, **within)
        times = [seconds_of(llm, many) for _ in range(rounds)]
        figures["64 requests, s"] = statistics.median(times)
        note(f"{size} GPUs: {len(many.requests)} requests, s:", [round(t, 3) for t in times])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=("collectives", "equality", "death", "speed", "speed1", "speed2"))
    parser.add_argument("--shape", default="8b", choices=tuple(SHAPES))
    parser.add_argument("--requests", type=int, default=256, help="of W1")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if torch.cuda.device_count() == 1 and set(options.stages) <= {"equality", "death"}:
        import pytest

        from tests.support.shared_gpu import share_one_gpu

        share_one_gpu(pytest.MonkeyPatch())
    for stage in options.stages:
        note(stage)
        if stage.startswith("speed"):
            for size in (int(stage[5:]),) if stage[5:] else (1, 2):
                measure_speed(options.shape, size, options.requests, rounds=options.rounds)
        else:
            globals()[f"stage_{stage}"]()


if __name__ == "__main__":
    main()
