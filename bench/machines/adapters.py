"""Steps of 64 decodes whose requests name no adapter, one, or eight, against an engine without any.

    python bench/machines/adapters.py          # the embedded default model
    python bench/machines/adapters.py --shape 0.6b
    python bench/machines/adapters.py update --shape 0.6b  # update_weights of all weights

Adapters have random factors for every linear layer of the decoder layers."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from harness import Figures, Option, Part, engine_of, in_turn, note, random_prompts, ratios, run_parts, spread
from random_models import SHAPES, random_model
from safetensors.torch import save_file

from nanovllm import LLM, SamplingParams

TARGETS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
NUM_ADAPTERS = 8


def saved_adapter(folder: Path, model: Any, rank: int, seed: int) -> Path:
    """Write an adapter as PEFT does."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in TARGETS:
            for factor, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                tensors[f"base_model.model.{name}.lora_{factor}.weight"] = 0.01 * torch.randn(shape, generator=random)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(TARGETS)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def decodes(given: argparse.Namespace) -> Figures:
    """Seconds of a step of decodes alone, and ratios."""
    steps: list[float] = []

    def on_step(record: Any) -> None:
        if record.num_decode_tokens == given.requests and not record.num_prefill_tokens:
            steps.append(record.time)

    def step_seconds(llm: LLM, name: str, adapters: Any, number: int) -> float:
        steps.clear()
        prompts = random_prompts(given.requests, 16, 500, name, number)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=given.tokens)
        llm.generate(prompts, params, adapter=adapters, use_tqdm=False)
        return statistics.median(after - before for before, after in pairwise(steps))

    options = {"max_num_seqs": given.requests, "max_model_len": 16 + given.tokens, "kv_cache_memory_bytes": 2**30}
    options["on_step"] = on_step

    def opened() -> Any:
        return LLM(**options) if given.shape is None else engine_of(random_model(given.shape), **options)

    with tempfile.TemporaryDirectory() as folder, opened() as plain, opened() as llm:
        binding = llm._engine.model_runner.binding
        binding.uninstall()  # names of modules are those of the model
        for seed in range(NUM_ADAPTERS):
            path = Path(folder) / str(seed)
            llm.load_adapter(str(seed), saved_adapter(path, binding.model, given.rank, seed))
        each = [str(number % NUM_ADAPTERS) for number in range(given.requests)]
        settings: dict[str, Callable[[int], float]] = {
            "without": partial(step_seconds, plain, "without", None),
            "none": partial(step_seconds, llm, "none", None),
            "one": partial(step_seconds, llm, "one", "0"),
            "eight": partial(step_seconds, llm, "eight", each),
        }
        found = in_turn(settings, given.rounds)
    figures: Figures = {name: spread(seconds) for name, seconds in found.items()}
    for name, target in (("none", "1.00"), ("one", "1.03"), ("eight", "1.12")):
        figures[f"{name} / without"] = ratio = ratios(found, name, "without")
        note(f"{given.requests} decodes, {name} of rank {given.rank}", statistics.median(ratio), "x", target)
    return figures


def update(given: argparse.Namespace) -> Figures:
    """Seconds of `update_weights` of all weights, which are on the engine's device."""

    def seconds_of(llm: LLM, weights: dict[str, torch.Tensor]) -> float:
        begin = time.perf_counter()
        llm.update_weights(weights)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    model = random_model(given.shape or "135m")
    weights = {name: 1.01 * tensor for name, tensor in model.state_dict().items()}
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with engine_of(model, max_num_seqs=4, max_model_len=256) as llm:
        found = [seconds_of(llm, weights) for _ in range(2 + given.rounds)][2:]
    note("an update of all weights", 1e3 * statistics.median(found), "ms", "20 for 0.6b")
    return {"seconds": spread(found), "bytes": num_bytes}


if __name__ == "__main__":
    run_parts(
        __doc__,
        {"decodes": Part(decodes), "update": Part(update, is_default=False)},
        {
            "shape": Option(None, "shape of random weights instead of the default model", tuple(SHAPES)),
            "requests": Option(64, "requests of a step"),
            "rank": Option(16, "rank of the adapters"),
            "tokens": Option(64, "tokens of a request"),
            "rounds": Option(5, "rounds in turn"),
        },
    )
