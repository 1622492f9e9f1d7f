"""A model with recurrent states: decodes against `transformers`, shared prefixes; decodes on a GPU.

    python bench/machines/hybrid.py streams --count 16     # tokens a second, generate of `transformers` in the same run
    python bench/machines/hybrid.py prefix                 # first token behind a shared prefix against recomputing it
    python bench/machines/hybrid.py gpu --shape 9b         # decodes against their floor by bytes, and `transformers`

Random weights in the shape of Qwen3.5 0.8B (`--shape 0.8b`), 9B or smaller."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import Figures, Option, Part, engine_of, random_prompts, read_rate, run_parts  # beside this file
from random_models import NoText, copy_rate, device
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from nanovllm import LLM, SamplingParams

_RECURRENT = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "9b": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32, "num_attention_heads": 16,
           "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248_320, "linear_num_key_heads": 16,
           "linear_num_value_heads": 32, "tie_word_embeddings": False, **_RECURRENT},
    "0.8b": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
             "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248_320, "linear_num_key_heads": 16,
             "linear_num_value_heads": 16, **_RECURRENT},
    "0.1b": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 65_536, "linear_num_key_heads": 8,
             "linear_num_value_heads": 8, **_RECURRENT},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "linear_num_key_heads": 2,
             "linear_num_value_heads": 4, **_RECURRENT},
}  # fmt: skip


def random_model(shape: str) -> Any:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        **{"tie_word_embeddings": True, **SHAPES[shape]}, dtype=torch.bfloat16, max_position_embeddings=32_768
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device()):
            return Qwen3_5ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def checkpoint(shape: str) -> Path:
    """Folder of a model with random weights, written once a machine."""
    folder = Path(tempfile.gettempdir()) / f"nanovllm-random-hybrid-{shape}"
    if not (folder / "config.json").exists():
        random_model(shape).save_pretrained(folder)
    return folder


def open_llm(shape: str, **options: Any) -> LLM:
    return LLM(checkpoint(shape), tokenizer=NoText(), **options)


def prompts_of(shape: str, count: int, length: int, seed: int = 0) -> list[list[int]]:
    return random_prompts(count, length, SHAPES[shape]["vocab_size"], seed)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def seconds(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    begin = time.perf_counter()
    llm.generate(prompts, greedy(num_tokens), use_tqdm=False)
    return time.perf_counter() - begin


def own_seconds(model: Any, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds of the model's own `generate`."""
    inputs = torch.tensor(prompts, device=model.device)
    begin = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), min_new_tokens=num_tokens, max_new_tokens=num_tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
    output.cpu()
    return time.perf_counter() - begin


def streams(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first tokens of `count` requests of 128 tokens, and tokens a second from then on."""
    prompts = prompts_of(args.shape, args.count, 128)
    with open_llm(args.shape, max_model_len=1024, max_num_seqs=args.count, enable_prefix_caching=False) as llm:
        seconds(llm, prompts, 2)
        ours = [statistics.median(seconds(llm, prompts, n) for _ in range(args.repeats)) for n in (1, args.tokens)]
    model = AutoModelForCausalLM.from_pretrained(checkpoint(args.shape), dtype=torch.bfloat16).eval()
    own_seconds(model, prompts, 2)
    theirs = [statistics.median(own_seconds(model, prompts, n) for _ in range(args.repeats)) for n in (1, args.tokens)]
    figures: dict[str, Any] = {"streams": args.count}
    for name, (first, whole) in (("ours", ours), ("transformers", theirs)):
        figures[name] = args.count * (args.tokens - 1) / (whole - first)
        figures[f"{name}_first_s"] = first
    return figures | {"ratio": figures["ours"] / figures["transformers"], "ratio_with_prompts": theirs[1] / ours[1]}


def prefix(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first token of 64 own tokens behind `shared` tokens: of the first request, and of later ones."""
    (shared,) = prompts_of(args.shape, 1, args.shared)
    with open_llm(args.shape, max_model_len=args.shared + 256, max_num_seqs=4) as llm:
        seconds(llm, prompts_of(args.shape, 1, 70, seed=7), 2)
        cold = seconds(llm, [shared + prompts_of(args.shape, 1, 64, seed=1)[0]], 1)
        seconds(llm, [shared + prompts_of(args.shape, 1, 64, seed=2)[0]], 1)  # keeps a state where both part
        own = prompts_of(args.shape, args.repeats, 64, seed=3)
        warm = statistics.median(seconds(llm, [shared + each], 1) for each in own)
        hits = llm.stats().prefix_cache_hits
    return {"shared": args.shared, "cold_s": cold, "warm_s": warm, "ratio": warm / cold, "hits": hits}


def gpu(args: argparse.Namespace) -> dict[str, Any]:
    """Decodes of 1 and of 64 requests, as a share of the floor by bytes: weights, states read and written, K and V."""
    model = random_model(args.shape)
    found: Figures = {}
    rate = read_rate() if device() == "cuda" else copy_rate(2**28)
    # The embedding is read only where the head is the same tensor.
    embedding = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.nbytes
    weights = sum(parameter.nbytes for parameter in model.parameters()) - embedding
    counts = [count for count in (1, 64) if count <= args.count]
    with engine_of(model, max_model_len=1024, max_num_seqs=args.count, enable_prefix_caching=False) as llm:
        groups = llm._engine.model_runner.pools.groups
        token_bytes = groups[0].block_bytes / llm.config.block_size
        kernels = all(layer.kernel_forward for layer in llm._engine.model_runner.binding.mixers.layers)
        print(f"  {rate=}, {weights=}, state={groups[-1].block_bytes}, {token_bytes=}, {kernels=}", flush=True)
        for count in counts:
            prompts = prompts_of(args.shape, count, 128)
            seconds(llm, prompts, args.tokens)
            first, whole = (
                statistics.median(seconds(llm, prompts, n) for _ in range(args.repeats)) for n in (1, args.tokens)
            )
            step = (whole - first) / (args.tokens - 1)
            of_sequence = 2 * groups[-1].block_bytes + (128 + args.tokens / 2) * token_bytes
            floor = (weights + count * of_sequence) / rate
            found[count] = {"step_ms": step * 1e3, "floor_ms": floor * 1e3, "share": floor / step,
                            "tokens_a_second": count / step, "first_s": first}  # fmt: skip
    for count in counts:
        prompts = prompts_of(args.shape, count, 128)
        own_seconds(model, prompts, 2)
        first, whole = (own_seconds(model, prompts, n) for n in (1, 33))
        found[count]["transformers"] = count * 32 / (whole - first)
        found[count]["transformers_first_s"] = first
    return {str(count): figures for count, figures in found.items()}


PARTS = {"streams": Part(streams), "prefix": Part(prefix), "gpu": Part(gpu, is_default=False)}
OPTIONS = {
    "shape": Option("0.8b", "of random weights", tuple(SHAPES)),
    "count": Option(16, "requests at once"),
    "tokens": Option(32, "of each answer"),
    "shared": Option(6144, "tokens, of prefix"),
    "repeats": Option(3, "measured runs"),
}

if __name__ == "__main__":
    run_parts(__doc__, PARTS, OPTIONS)
