"""Speed of one model on one GPU and on two: one request, 64 requests and W1, by default of Qwen3-8B's shape.

    python bench/machines/tensor_parallel.py
    python bench/machines/tensor_parallel.py --shape tiny --requests 4      tries it on a CPU

Weights are drawn on the GPUs themselves, since writing and reading 16 GB takes minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from random_models import SHAPES, NoText, device  # beside this file
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.execution import workers
from nanovllm.model import loader, sharded_loading
from nanovllm.model.loaded import LoadedModel
from nanovllm.model.ranks import Ranks
from nanovllm.model.sharding import shard_model
from nanovllm.tools.workloads.workloads import Workload, random_requests, w1

BEGIN = time.perf_counter()


def note(*words: Any) -> None:
    print(f"[{time.perf_counter() - BEGIN:5.1f} s]", *words, flush=True)


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
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shape", default="8b", choices=tuple(SHAPES))
    parser.add_argument("--requests", type=int, default=256, help="of W1")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    for size in options.sizes:
        measure_speed(options.shape, size, options.requests, rounds=options.rounds)


if __name__ == "__main__":
    main()
