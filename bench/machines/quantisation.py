"""Quantised weights on a CPU beside those of the checkpoint: bytes, processor time of requests, perplexity.

    python bench/machines/quantisation.py --model smollm2-135m-instruct --text LICENSE

The engines live in one process and run in turn, on one thread; the medians of processor time are what a busy machine
changes least. One stream is a decode of 100 tokens; W is the workload of that name (`nanovllm bench --workload W`).
The perplexity is that of the engine's own log-probabilities.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from pathlib import Path
from typing import Any

KINDS = (None, "int8", "int4")


def num_weight_bytes(llm: Any) -> int:
    """Of what stands in the kernels' layout, and of the modules' own tensors; each storage once."""
    binding = llm._engine.model_runner.binding
    products = [part for layer in binding.fused_layers for part in layer._keep[1:]]
    for module in binding.model.modules():
        packed = getattr(vars(module).get("forward"), "_product", None)
        products += [] if packed is None else [packed]
    tensors = [*binding.model.parameters(), *binding.model.buffers(), *(product._weight for product in products)]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def perplexity(llm: Any, text: str, num_tokens: int) -> float:
    from nanovllm import SamplingParams

    token_ids = llm.tokenizer(text)["input_ids"]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    prompts = [token_ids[at : at + 512] for at in range(0, min(num_tokens, len(token_ids)), 512)]
    seen = [
        next(iter(found.values())).logprob
        for output in llm.generate(prompts, params, use_tqdm=False)
        for found in output.prompt_logprobs or ()
        if found
    ]
    return math.exp(-statistics.fmean(seen))


def processor_time(llm: Any, prompts: list[list[int]], lengths: list[int]) -> float:
    """Seconds, without what the last run left in the prefix cache."""
    from nanovllm import SamplingParams

    llm.reset_prefix_cache()
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    start = time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--text", type=Path, default=Path("LICENSE"), help="what the perplexity is of")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, help="of W")
    args = parser.parse_args()
    import torch

    from nanovllm import LLM
    from nanovllm.tools.workloads.workloads import WORKLOADS

    torch.set_num_threads(1)
    llms = {kind: LLM(args.model, quantization=kind, kv_cache_memory_bytes=1 << 29) for kind in KINDS}
    requests = WORKLOADS["W"]().requests[: args.requests]
    works = {
        "one stream": ([[1, 5, 9, 20, 31]], [100]),
        "16 streams": ([[1, 5, 9, 20, number] for number in range(16)], [50] * 16),
        "W": ([request.prompt_token_ids for request in requests], [request.num_output_tokens for request in requests]),
    }
    times: dict[tuple[str, str | None], list[float]] = {key: [] for key in itertools.product(works, KINDS)}
    for _ in range(args.rounds):
        for (name, (prompts, lengths)), kind in itertools.product(works.items(), KINDS):
            times[name, kind].append(processor_time(llms[kind], prompts, lengths))
    text = args.text.read_text(encoding="utf-8")
    print("| quantization | MB of weights |", "".join(f" {name}, tokens/s |" for name in works), "perplexity |")
    print("|---" * (len(works) + 3) + "|")
    for kind, llm in llms.items():
        cells = [str(kind), f"{num_weight_bytes(llm) / 1e6:.0f}"]
        for name, (_, lengths) in works.items():
            seconds, before = (statistics.median(times[name, one]) for one in (kind, None))
            cells.append(f"{sum(lengths) / seconds:.0f} ({before / seconds:.2f} x)")
        print("|", " | ".join([*cells, f"{perplexity(llm, text, args.tokens):.3f}"]), "|", flush=True)


if __name__ == "__main__":
    main()
