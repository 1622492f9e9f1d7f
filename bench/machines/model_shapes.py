"""Decode on one GPU in other shapes: Gemma 3 4B (windows), gpt-oss 20B (sinks), Qwen3-30B-A3B (experts), Llama 3.2 1B.

    python bench/machines/model_shapes.py --out results.jsonl window pools gemma gpt_oss mixture llama

Without names all of them run, in about five minutes; a table comes last. Weights are random, made on the spot. Floors
are the bytes that a step reads (weights once, K and V in sight of each layer) over the read rate of the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from gpu import gaps_of, kernels_of, params_of, prompts_of, seconds_of  # beside this file
from gpu_timing import read_rate, replayed_micros

from nanovllm import LLM
from nanovllm.attention.flex_gpu_options import Gpu
from nanovllm.cache.cache_pools import CachePools, cache_groups_of, resolve_pools
from nanovllm.cache.kinds import FULL, LayerTraits, Sight
from nanovllm.core.config import EngineConfig
from nanovllm.kernels.paged_decode import PagedDecode
from nanovllm.model import loader
from nanovllm.tools.workloads.workloads import random_requests, w1

GEMMA_LAYERS = ["full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(34)]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma3Text", {
        "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208, "sliding_window": 1024,
        "query_pre_attn_scalar": 256, "max_position_embeddings": 131_072, "layer_types": GEMMA_LAYERS,
    }),
    "gpt_oss": ("GptOss", {
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201_088, "sliding_window": 128,
        "num_local_experts": 32, "num_experts_per_tok": 4, "max_position_embeddings": 131_072,
    }),
    "mixture": ("Qwen3Moe", {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 40_960,
    }),
    "llama": ("Llama", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256, "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
    }),
}  # fmt: skip
BATCH, CONTEXT = 64, 640
BLOCK_SIZE = 64
TABLE: list[tuple[str, str]] = []
RATE = 0.0


def note(what: str, figure: float, unit: str = "") -> None:
    TABLE.append((what, f"{figure:.3g} {unit}"))


def random_model(shape: str) -> Any:
    family, sizes = SHAPES[shape]
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        config = getattr(transformers, f"{family}Config")(**sizes, dtype=torch.bfloat16)
        with torch.device("cuda"):
            return getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(before)


def open_llm(model: Any, **options: Any) -> LLM:
    """The engine's own model, as one from a file."""
    load = loader.load
    own = mock.patch.object(loader, "load", lambda *arguments: dataclasses.replace(load(*arguments), is_live=False))
    with own:
        return LLM(model, **options)


def floor_ms(llm: LLM, context: int, batch: int) -> float:
    """Of a step of some decodes at this context, which choose experts evenly and independently of one another.

    Its logits need all rows of an embedding that is tied to the head.
    """
    binding = llm._engine.model_runner.binding
    parameters = {id(p): p for p in binding.model.parameters()}
    embedding, head = binding.model.get_input_embeddings().weight, binding.model.get_output_embeddings().weight
    num_bytes = sum(p.nbytes for p in parameters.values()) - (0 if embedding is head else embedding.nbytes)
    config = binding.model.config
    if chosen := getattr(config, "num_experts_per_tok", 0):
        count = getattr(config, "num_experts", None) or config.num_local_experts
        of_experts = sum(p.nbytes for name, p in binding.model.named_parameters() if ".experts." in name)
        num_bytes -= int(of_experts * (1 - chosen / count) ** batch)
    seen = sum(
        layer.token_bytes * min(context, layer.traits.sight.window or context, layer.traits.sight.chunk or context)
        for layer in binding.layers
    )
    return 1e3 * (num_bytes + batch * seen) / RATE


def decode_steps(llm: LLM, name: str, batch: int = BATCH) -> dict[str, Any]:
    """Step time of some decodes, its floor, and the kernels that it consists of."""
    engine = llm._open_engine()
    workload = random_requests(requests=batch, prompt=CONTEXT - 60, output=200)
    for number, (prompt, params) in enumerate(zip(prompts_of(workload), params_of(workload), strict=True)):
        engine.add(engine.input_processor.process_one(str(number), prompt, params))
    while engine.scheduler.waiting or any(s.num_output_tokens < 30 for s in engine.scheduler.running):
        engine.step()
    step = 1e3 * statistics.median(gaps_of(engine.step, lambda n: n < 60))
    result = {"step, ms": step, "floor, ms": floor_ms(llm, CONTEXT, batch), "graphs": bool(llm.config.cuda_graphs)}
    note(f"{name}: step of {batch} decodes at {CONTEXT}", step, "ms")
    note(f"{name}: its floor by bytes", result["floor, ms"], "ms")
    result |= kernels_of(engine, 10, name)
    for number in range(batch):
        engine.abort(str(number))
    while engine.scheduler.running:
        engine.step()
    engine.outputs.clear()
    return result


def stage_gemma() -> dict[str, Any]:
    begin = time.perf_counter()
    with open_llm(random_model("gemma"), max_model_len=4096) as llm:
        result: dict[str, Any] = {"start, s": time.perf_counter() - begin}
        print(result, flush=True)
        result |= decode_steps(llm, "Gemma 3 4B")
        print(result, flush=True)
        workload = w1()
        params = params_of(workload)
        result["w1, s"] = [seconds_of(llm, workload, params) for _ in range(2)][1:]
    note("Gemma 3 4B: W1", min(result["w1, s"]), "s")
    return result


def stage_gpt_oss() -> dict[str, Any]:
    begin = time.perf_counter()
    with open_llm(random_model("gpt_oss"), max_model_len=4096) as llm:
        result = {"start, s": time.perf_counter() - begin}
        print(result, flush=True)
        return result | decode_steps(llm, "gpt-oss 20B")


def stage_mixture() -> dict[str, Any]:
    """A model of 61 GB, by one and by 64 requests."""
    with open_llm(random_model("mixture"), max_model_len=4096) as llm:
        return {str(batch): decode_steps(llm, "Qwen3-30B-A3B", batch) for batch in (1, BATCH)}


def stage_llama() -> dict[str, Any]:
    with open_llm(random_model("llama"), max_model_len=4096) as llm:
        return {str(batch): decode_steps(llm, "Llama 3.2 1B", batch) for batch in (1, BATCH)}


def stage_window() -> dict[str, Any]:
    """Decode attention of one layer of each model that sees a window, and of one that sees all, by context."""
    result = {}
    cases = {
        "Gemma 3 4B, window 1024": ((4, 2, 256), Sight(window=1024)), "Gemma 3 4B, full": ((4, 2, 256), FULL),
        "gpt-oss 20B, window 128": ((8, 8, 64), Sight(window=128)), "gpt-oss 20B, full": ((8, 8, 64), FULL),
    }  # fmt: skip
    for name, (heads, sight) in cases.items():
        for context in (4096, 65_536):
            batch = 16
            micros = result[f"{name}, {context}"] = _attention_micros(heads, sight, batch, context)
            note(f"{name}: {batch} decodes at {context}", micros, "us a layer")
    return result


def _attention_micros(heads: tuple[int, int, int], sight: Sight, batch: int, context: int) -> float:
    """Of ten layers behind one another, K and V of each its own as far as they are in sight."""
    num_kv_heads, groups, head_dim = heads
    first = min(int(sight.first_seen(torch.tensor([context - 1]).numpy())[0]), context) // BLOCK_SIZE
    num_blocks = context // BLOCK_SIZE
    held = num_blocks - first
    tables = torch.zeros(batch, num_blocks, dtype=torch.int32)
    tables[:, first:] = 1 + torch.randperm(batch * held).view(batch, held)
    layers = 10 if held * batch < 8192 else 2
    caches = torch.randn(
        layers, 2, (1 + batch * held) * BLOCK_SIZE, num_kv_heads, head_dim, dtype=torch.bfloat16, device="cuda"
    )  # fmt: skip
    device = caches.device
    kernel = PagedDecode(
        (num_kv_heads, groups, 2 * head_dim), BLOCK_SIZE, gpu=Gpu.from_device(device), max_decodes=batch,
        device=device, sight=sight,
    )  # fmt: skip
    query = torch.randn(batch, num_kv_heads * groups, head_dim, dtype=torch.bfloat16, device=device)
    step = (
        tables.flatten().to(device), (torch.arange(batch) * num_blocks).int().to(device),
        torch.full((batch,), num_blocks, dtype=torch.int32, device=device),
        torch.full((batch,), context - 1, device=device),
    )  # fmt: skip

    def run() -> None:
        kernel.fill(*step)
        for keys, values in caches:
            kernel.attend(query, keys, values, head_dim**-0.5)

    return replayed_micros(run) / layers


def stage_pools() -> dict[str, Any]:
    """Tokens of sequences of 32k that 64 GiB of KV cache hold for Gemma 3 4B's shape, in cache groups or in one."""
    length, memory = 32_768, 64 * 2**30
    layers = [
        LayerTraits(8, 4, 256, 256, Sight(window=1024) if kind == "sliding_attention" else FULL)
        for kind in GEMMA_LAYERS
    ]
    config = EngineConfig(
        max_model_len=length, block_size=BLOCK_SIZE, kv_cache_memory_bytes=memory, max_num_seqs=256,
        max_num_batched_tokens=8192,
    )  # fmt: skip
    block_bytes = [2 * BLOCK_SIZE * layer.token_values for layer in layers]
    held = {}
    for name, traits in (("groups", layers), ("one table", [dataclasses.replace(t, sight=FULL) for t in layers])):
        pools: CachePools
        groups = cache_groups_of(traits, block_bytes, length)
        _, pools = resolve_pools(config, groups, memory, max_model_len_is_set=True)
        held[name] = pools.num_longest(length, BLOCK_SIZE) * length
        note(f"Gemma 3 4B: tokens of 32k sequences in 64 GiB, {name}", held[name] / 1e6, "million")
    return held


def main() -> None:
    global RATE
    stages = {name[6:]: function for name, function in globals().items() if name.startswith("stage_")}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(stages)}")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    unknown = set(arguments.stages) - set(stages)
    if unknown:
        parser.error(f"there is no stage {min(unknown)!r}; there are {', '.join(stages)}")
    if torch.cuda.is_available():
        RATE = read_rate()
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read {RATE / 1e12:.2f} TB/s", flush=True)
    for name in arguments.stages or stages:
        begin = time.perf_counter()
        result = stages[name]()
        line = json.dumps({"stage": name, "took": round(time.perf_counter() - begin, 1), "result": result})
        print(line, flush=True)
        if arguments.out:
            with arguments.out.open("a", encoding="utf-8") as out:
                out.write(line + "\n")
    for row in TABLE:
        print("{:<60} {:>16}".format(*row))


if __name__ == "__main__":
    main()
