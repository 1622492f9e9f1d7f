"""Perplexity of bfloat16 engines with activations of 8 and 15 bits, relative to `transformers` in float32.

    NANOVLLM_CPU_CLASS=avx512_bf16 python bench/machines/activation_perplexity.py
    ... --models smollm2-135m-instruct:int8 Q8_0.gguf Q4_1.gguf --texts LICENSE README.md

`transformers` computes with the dequantised weights. Each text is cut into prompts of 256 tokens, so that all products
have more than four rows. A difference is that of the mean log-probability, each prompt a sample of its standard error.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.processor_classes import targets
from nanovllm.model.default_model import DEFAULT_MODEL, ensure_default_model
from nanovllm.model.gguf.config import read_config
from nanovllm.model.gguf.file import GGUFFile
from nanovllm.model.gguf.weights import dense_weights
from nanovllm.model.quantised import QuantisedEmbedding, QuantisedLinear
from nanovllm.model.quantising import quantise_model

PROMPT_TOKENS, BATCH = 256, 4
ENGINES: tuple[dict[str, Any], ...] = ({"exact_activations": True}, {})  # activations of 15 bits, of 8


def folder_of(model: str) -> str:
    return str(ensure_default_model()) if model == DEFAULT_MODEL else model


def engine_sums(model: str, kind: str | None, options: dict[str, Any], prompts: list[list[int]]) -> list[float]:
    """Sum of log-probabilities of each prompt's tokens but the first, by the engine."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with LLM(model, quantization=kind, device="cpu", dtype="bfloat16", kv_cache_memory_bytes=1 << 28, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        sum(next(iter(found.values())).logprob for found in output.prompt_logprobs or () if found) for output in outputs
    ]


def reference(model: str, kind: str | None) -> Any:
    """Plain float32 module with the dequantised weights of a GGUF file, or of a folder quantised at load."""
    if model.endswith(".gguf"):
        file = GGUFFile(Path(model))
        config = AutoConfig.for_model(**read_config(file))
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        module.load_state_dict(dense_weights(file, torch.float32), strict=False)
        module.tie_weights()
        return module
    folder = folder_of(model)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[f"{DEFAULT_MODEL}:int8", f"{DEFAULT_MODEL}:int4"])
    parser.add_argument("--texts", nargs="+", type=Path, default=[Path("LICENSE"), Path("CONTRIBUTING.md")])
    parser.add_argument("--tokenizer", default=DEFAULT_MODEL, help="folder")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text, at most")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(folder_of(args.tokenizer))
    prompts = []
    for path in args.texts:
        token_ids = tokenizer(path.read_text(encoding="utf-8"))["input_ids"][: args.tokens]
        prompts += [
            token_ids[at : at + PROMPT_TOKENS] for at in range(0, len(token_ids) - PROMPT_TOKENS + 1, PROMPT_TOKENS)
        ]
    if len(prompts) < 2:
        parser.error(f"--texts have {len(prompts)} prompts of {PROMPT_TOKENS} tokens; a standard error needs 2")
    num_scored = len(prompts) * (PROMPT_TOKENS - 1)
    print(f"class {targets()[0].name}, {len(prompts)} prompts, {num_scored:,} tokens scored\n")
    print("| weights | `transformers`, float32 | 15 bits | 8 bits | 8 bits, relative to 15 |")
    print("|---|---|---|---|---|", flush=True)
    for name in args.models:
        model, _, kind = name.partition(":")
        exact = reference_sums(reference(model, kind or None), prompts)
        more, fewer = (engine_sums(model, kind or None, options, prompts) for options in ENGINES)
        differences = difference(more, exact), difference(fewer, exact), difference(fewer, more)
        cells = [name, f"{math.exp(-sum(exact) / num_scored):.3f}", *differences]
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
