"""Quality against float32 and speed of quantised weights on a CPU.

    python bench/machines/quality.py                                       both, the default model
    NANOVLLM_CPU_CLASS=avx512_bf16 python bench/machines/quality.py perplexity --texts LICENSE README.md
    python bench/machines/quality.py perplexity --models smollm2-135m-instruct:int8 Q8_0.gguf Q4_1.gguf

perplexity: of bfloat16 engines with activations of 15 bits and of 8, relative to `transformers` in float32 with the
    dequantised weights. Each text is cut into prompts of 256 tokens, so that all products have more than four rows. A
    difference is that of the mean log-probability, each prompt a sample of its standard error.
weights: bytes of weights, and processor time of requests on one thread, by engines in one process that run in turn. One
    stream is a decode of 100 tokens; W is the workload of that name.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Figures, Option, Part, folder_of, in_turn, ratios, run_parts, seconds_of, spread
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.fast.kernels.processor_classes import targets
from nanovllm.features.engine_config import EngineConfig
from nanovllm.models.default_model import DEFAULT_MODEL
from nanovllm.models.gguf.config import read_config
from nanovllm.models.gguf.file import GGUFFile
from nanovllm.models.gguf.weights import dense_weights
from nanovllm.models.loader import load_weights
from nanovllm.models.quantised.blocks import QuantisedEmbedding, QuantisedLinear
from nanovllm.models.quantised.on_load import quantise_model
from nanovllm.models.quantised.stored_config import checkpoint_of
from nanovllm.tools.workloads.specs import build
from nanovllm.tools.workloads.workloads import Workload

PROMPT_TOKENS = 256
BATCH = 4
ENGINES: dict[str, dict[str, Any]] = {"15 bits": {"exact_activations": True}, "8 bits": {}}
KINDS = ("none", "int8", "int4")


def engine_sums(model: str, kind: str | None, options: dict[str, Any], prompts: list[list[int]]) -> list[float]:
    """Sum of log-probabilities of each prompt's tokens but the first, by the engine."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with LLM(model, quantization=kind, device="cpu", dtype="bfloat16", kv_cache_memory_bytes=1 << 28, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        sum(next(iter(found.values())).logprob for found in output.prompt_logprobs or () if found) for output in outputs
    ]


def reference(model: str, kind: str | None) -> Any:
    """Plain float32 module with the dequantised weights of a GGUF file, a quantised folder, or one to quantise."""
    if model.endswith(".gguf"):
        file = GGUFFile(Path(model))
        config = AutoConfig.for_model(**read_config(file))
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        module.load_state_dict(dense_weights(file, torch.float32), strict=False)
        module.tie_weights()
        return module
    folder = folder_of(model)
    if kind is None and checkpoint_of(AutoConfig.from_pretrained(folder)) is not None:
        config = EngineConfig(device="cpu", dtype="float32", quantization="dequantize")
        return load_weights(str(folder), config).model
    plain, quantised = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    if kind is not None:
        quantise_model(quantised, kind)
        for name, module in quantised.named_modules():
            if isinstance(module, QuantisedLinear | QuantisedEmbedding):
                plain.get_submodule(name).weight.data = module.dequantise()
    return plain


def reference_sums(module: Any, prompts: list[list[int]]) -> list[float]:
    """Sum of log-probabilities of each prompt's tokens but the first, by the module."""
    sums = []
    with torch.inference_mode():
        for at in range(0, len(prompts), BATCH):
            token_ids = torch.tensor(prompts[at : at + BATCH])
            logprobs = module(token_ids).logits[:, :-1].log_softmax(-1)
            sums += logprobs.gather(-1, token_ids[:, 1:, None]).sum((1, 2)).tolist()
    return sums


def difference(sums: list[float], exact: list[float]) -> str:
    """Perplexity relative to `exact`, with its standard error, in percent."""
    higher = [(b - a) / (PROMPT_TOKENS - 1) for a, b in zip(sums, exact, strict=True)]
    error = statistics.stdev(higher) / len(higher) ** 0.5
    return f"{100 * math.expm1(statistics.fmean(higher)):+.3f} % ({100 * error:.3f})"


def prompts_of_texts(options: argparse.Namespace) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder_of(options.tokenizer))
    prompts = []
    for path in options.texts:
        ids = tokenizer(Path(path).read_text(encoding="utf-8"))["input_ids"][: options.tokens]
        prompts += [ids[at : at + PROMPT_TOKENS] for at in range(0, len(ids) - PROMPT_TOKENS + 1, PROMPT_TOKENS)]
    if len(prompts) < 2:
        raise SystemExit(f"--texts have {len(prompts)} prompts of {PROMPT_TOKENS} tokens; a standard error needs 2.")
    return prompts


def measure_perplexity(options: argparse.Namespace) -> Figures:
    prompts = prompts_of_texts(options)
    num_scored = len(prompts) * (PROMPT_TOKENS - 1)
    found: Figures = {"class": targets()[0].name, "tokens scored": num_scored}
    for name in options.models:
        model, _, kind = name.partition(":")
        exact = reference_sums(reference(model, kind or None), prompts)
        sums = {bits: engine_sums(model, kind or None, each, prompts) for bits, each in ENGINES.items()}
        row = {"float32": math.exp(-sum(exact) / num_scored)}
        row |= {f"{bits}, relative": difference(each, exact) for bits, each in sums.items()}
        found[name] = row | {"8 bits, relative to 15": difference(sums["8 bits"], sums["15 bits"])}
        print(f"  {name}: {found[name]}", flush=True)
    return found


def num_weight_bytes(llm: Any) -> int:
    """Of what stands in the kernels' layout, and of the modules' own tensors; each storage once."""
    binding = llm._engine.model_runner.binding
    products = [part for layer in binding.fused_layers for part in layer._keep[1:]]
    for module in binding.model.modules():
        packed = getattr(vars(module).get("forward"), "_product", None)
        products += [] if packed is None else [packed]
    tensors = [*binding.model.parameters(), *binding.model.buffers(), *(product._weight for product in products)]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def processor_seconds(llm: LLM, workload: Workload, _: int) -> float:
    """Seconds, without what the last run left in the prefix cache."""
    llm.reset_prefix_cache()
    params = [
        SamplingParams(temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True)
        for request in workload.requests
    ]
    return seconds_of(llm, workload, params, clock=time.process_time)


def measure_weights(options: argparse.Namespace) -> Figures:
    torch.set_num_threads(1)
    llms = {
        kind: LLM(options.model, quantization=None if kind == "none" else kind, kv_cache_memory_bytes=1 << 29)
        for kind in KINDS
    }
    works = {
        "one stream": build("random:requests=1,prompt=5,output=100"),
        "16 streams": build("random:requests=16,prompt=5,output=50"),
        "W": build("W").first(options.requests),
    }
    found: Figures = {kind: {"MB of weights": num_weight_bytes(llm) / 1e6} for kind, llm in llms.items()}
    for name, workload in works.items():
        settings = {kind: partial(processor_seconds, llm, workload) for kind, llm in llms.items()}
        seconds = in_turn(settings, options.rounds)
        for kind in KINDS:
            rate = workload.num_output_tokens / statistics.median(seconds[kind])
            found[kind][name] = {"tokens/s": rate, "x faster": spread(ratios(seconds, "none", kind))}
    for llm in llms.values():
        llm.close()
    return found


PARTS = {"perplexity": Part(measure_perplexity), "weights": Part(measure_weights)}
OPTIONS = {
    "models": Option([f"{DEFAULT_MODEL}:int8", f"{DEFAULT_MODEL}:int4"], "of perplexity: MODEL, MODEL:KIND, FILE"),
    "texts": Option(["LICENSE", "CONTRIBUTING.md"], "files, of perplexity"),
    "tokenizer": Option(DEFAULT_MODEL, "folder, of perplexity"),
    "tokens": Option(4096, "of each text at most, of perplexity"),
    "model": Option(DEFAULT_MODEL, "of weights"),
    "rounds": Option(3, "of weights"),
    "requests": Option(64, "of W, of weights"),
}

if __name__ == "__main__":
    run_parts(__doc__, PARTS, OPTIONS)
