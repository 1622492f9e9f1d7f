"""Speed of one model on several GPUs: one request, 64 requests and W1, by default of Qwen3-8B's shape on 1 and 2.

    python bench/machines/tensor_parallel.py
    python bench/machines/tensor_parallel.py --shapes tiny --sizes 1 --requests 4      tries it on a CPU

Weights are drawn on the GPUs themselves, since writing and reading 16 GB takes minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import Figures, Option, Part, run_parts, seconds_of  # beside this file
from random_models import SHAPES, NoText, device
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanovllm import LLM
from nanovllm.defaults import LoadedModel
from nanovllm.features.ranks import workers
from nanovllm.features.ranks.ranks import Ranks
from nanovllm.features.ranks.sharding import shard_model
from nanovllm.models import loader, sharded_loading
from nanovllm.tools.workloads.workloads import Workload, random_requests, w1


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


def capture_all(llm: LLM) -> int:
    """Capture what a server captures while it is idle; returns how many graphs."""
    count = 0
    while llm._engine.model_runner.capture_ahead():  # type: ignore[union-attr]
        count += 1
    return count


def measure_speed(shape: str, size: int, options: argparse.Namespace) -> Figures:
    """Of the shape on so many GPUs: ms a token of one request, seconds of 64 requests, tokens per second of W1."""
    draw_weights_everywhere()
    vocab = SHAPES[shape]["vocab_size"]
    limits = {"max_model_len": min(4096, SHAPES[shape]["max_position_embeddings"]), "max_num_seqs": 256}
    one, short = (random_requests(requests=1, prompt=128, output=count, vocab=vocab) for count in (257, 1))
    many = random_requests(requests=min(64, options.requests), prompt=512, output=256, vocab=vocab)
    whole = w1().first(options.requests)
    if vocab < 10_000:
        whole = random_requests(requests=options.requests, prompt=(100, 1024), output=(100, 1024), vocab=vocab)
    with LLM(folder_of(shape), tokenizer=NoText(), tensor_parallel_size=size, dtype="bfloat16", **limits) as llm:
        figures: Figures = {"blocks": llm.config.num_kv_blocks, "graphs": capture_all(llm)}

        def median(*workloads: Workload) -> float:
            """Seconds of the first workload less those of the others, with an empty prefix cache."""
            runs = []
            for _ in range(options.rounds + 1):
                seconds = []
                for workload in workloads:
                    llm.reset_prefix_cache()
                    seconds.append(seconds_of(llm, workload))
                runs.append(2 * seconds[0] - sum(seconds))
            return statistics.median(runs[1:])

        figures["ms a token"] = 1e3 * median(one, short) / 256
        figures["W1, tokens/s"] = whole.num_output_tokens / median(whole)
        figures["64 requests, s"] = median(many)
    return figures


def measure(options: argparse.Namespace) -> Figures:
    """Each shape on each number of GPUs that holds it, beside its first."""
    found: Figures = {}
    for shape in options.shapes:
        first: Figures | None = None
        for size in options.sizes:
            if shape == "32b" and size < 2:
                continue  # 65 GB of weights and a KV cache
            row = measure_speed(shape, size, options)
            first = first or row
            row["x one request"] = first["ms a token"] / row["ms a token"]
            row["x W1"] = row["W1, tokens/s"] / first["W1, tokens/s"]
            found[f"{shape} on {size}"] = row
            print(f"  {shape} on {size}: {row}", flush=True)
    return found


OPTIONS = {
    "sizes": Option([1, 2], "numbers of GPUs"),
    "shapes": Option(["8b"], "of random weights, see random_models.py"),
    "requests": Option(256, "of W1"),
    "rounds": Option(2, "measured runs of each workload"),
}

if __name__ == "__main__":
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    run_parts(__doc__, {"speed": Part(measure)}, OPTIONS)
