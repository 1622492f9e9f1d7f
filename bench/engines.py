"""One engine in this process: the twins that `throughput.py` runs in turn. Prints a line of JSON for each workload.

    python bench/engines.py nanovllm --workloads W P --model FOLDER

Every twin gets the same token ids, all at once, greedy, ignoring end-of-sequence tokens. The fast ones run a workload
twice unmeasured before they run it measured, the slow ones a part of it; what they cached is forgotten in between. A
twin imports only what its engine needs, since peers live in environments of their own.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import time
from collections.abc import Callable
from typing import Any

from workloads import WORKLOADS, Workload

# Every engine's KV cache: enough for each workload, little enough that the unmeasured runs have touched all of it.
CACHE_BYTES = {"bfloat16": 2**29, "float32": 2**30}


Generate = Callable[[Workload], dict[str, Any]]  # runs a workload; returns its figures


def open_nanovllm(model: str, dtype: str, options: dict[str, Any]) -> Generate:
    from nanovllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, **({"kv_cache_memory_bytes": CACHE_BYTES[dtype]} | options))

    def generate(of: Workload) -> dict[str, Any]:
        llm.reset_prefix_cache()
        before = llm.stats().num_steps
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in of.output_lengths]
        outputs = llm.generate(of.prompts, params, use_tqdm=False)
        _check([len(output.outputs[0].token_ids) for output in outputs], of)
        metrics = [output.metrics for output in outputs]
        return _latencies([(m.arrival_time, m.first_token_time, m.finished_time) for m in metrics], of) | {
            "steps": llm.stats().num_steps - before,
            "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        }

    return generate


def open_vllm(model: str, dtype: str, options: dict[str, Any]) -> Generate:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; it is filled with zeros at the start
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    defaults = {"max_model_len": 2048, "max_num_seqs": 64, "enable_prefix_caching": True, "disable_log_stats": False}
    llm = LLM(model, dtype=dtype, **(defaults | options))

    def generate(of: Workload) -> dict[str, Any]:
        llm.reset_prefix_cache()
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in of.output_lengths]
        prompts = [{"prompt_token_ids": prompt} for prompt in of.prompts]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        _check([len(output.outputs[0].token_ids) for output in outputs], of)
        metrics = [output.metrics for output in outputs if output.metrics]
        # The latency to the first token is counted on another clock than the tokens' times.
        spans = [(m.first_token_ts - m.first_token_latency, m.first_token_ts, m.last_token_ts) for m in metrics]
        return _latencies(spans, of) | {"cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs)}

    return generate


def _transformers_model(model: str, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))


def open_transformers(model: str, dtype: str, options: dict[str, Any]) -> Generate:
    """`generate` on static batches, padded on the left, each as long as its longest output."""
    import torch

    module = _transformers_model(model, dtype)
    batch_size = options.get("batch_size", 16)

    def generate(of: Workload) -> dict[str, Any]:
        spans = []
        begin = time.perf_counter()
        for start in range(0, len(of.prompts), batch_size):
            batch, lengths = of.prompts[start : start + batch_size], of.output_lengths[start : start + batch_size]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
            times: list[float] = []

            def clock(ids: Any, scores: Any, times: list[float] = times) -> Any:
                times.append(time.perf_counter())
                return scores

            with torch.no_grad():
                module.generate(
                    ids, attention_mask=mask, do_sample=False, max_new_tokens=max(lengths),
                    min_new_tokens=max(lengths), pad_token_id=0, logits_processor=[clock],
                )  # fmt: skip
            spans += [(begin, times[0], times[length - 1]) for length in lengths]
        return _latencies(spans, of)

    return generate


def open_transformers_continuous(model: str, dtype: str, options: dict[str, Any]) -> Generate:
    """Its continuous batching, with its own defaults; what it prepares for a session is not counted."""
    from transformers import GenerationConfig

    module = _transformers_model(model, dtype)

    def generate(of: Workload) -> dict[str, Any]:
        config = GenerationConfig(max_new_tokens=max(of.output_lengths), do_sample=False, eos_token_id=-1, **options)
        results: dict[int, Any] = {}
        with module.continuous_batching_context_manager(generation_config=config) as manager:
            begin = time.perf_counter()
            for number, (prompt, length) in enumerate(zip(of.prompts, of.output_lengths, strict=True)):
                manager.add_request(prompt, str(number), length, record_timestamps=True, eos_token_id=-1)
            for result in manager:
                if result.error:
                    raise RuntimeError(result.error)
                if result.is_finished():
                    results[int(result.request_id)] = result
                if len(results) == len(of.prompts):
                    break
            seconds = time.perf_counter() - begin
        outputs = [results[number] for number in range(len(of.prompts))]
        _check([len(output.generated_tokens) for output in outputs], of)
        spans = [(begin, output.timestamps[0], output.timestamps[-1]) for output in outputs]
        return _latencies(spans, of) | {"seconds": seconds}

    return generate


ENGINES = {
    "nanovllm": open_nanovllm,
    "vllm": open_vllm,
    "transformers": open_transformers,
    "transformers-continuous": open_transformers_continuous,
}


def _check(lengths: list[int], workload: Workload) -> None:
    if lengths != workload.output_lengths:
        raise RuntimeError("the engine gave outputs of other lengths than it was asked for")


def _latencies(spans: list[tuple[float, float, float]], workload: Workload) -> dict[str, Any]:
    """Sorted seconds to the first token, and between tokens (a request's mean), from (arrival, first, last) times."""
    gaps = [(last - first) / max(1, n - 1) for (_, first, last), n in zip(spans, workload.output_lengths, strict=False)]
    return {"ttft": sorted(first - arrival for arrival, first, _ in spans), "itl": sorted(gaps)}


def peak_memory_mib() -> float:
    """Of this process and its children, each at its own peak."""
    import psutil

    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with open(f"/proc/{process.pid}/status", encoding="utf-8") as status:
            total += sum(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
    return total


def value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["W"])
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--dtype", default="bfloat16", choices=CACHE_BYTES)
    parser.add_argument("--requests", type=int, help="cut the workload to its first requests")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="an option of the engine")
    arguments = parser.parse_args()
    options = {name: value(text) for name, text in (item.split("=", 1) for item in arguments.set)}
    started = time.perf_counter()
    generate = ENGINES[arguments.engine](arguments.model, arguments.dtype, options)
    load_seconds = time.perf_counter() - started
    for name in arguments.workloads:
        workload = WORKLOADS[name]()
        workload = workload.first(arguments.requests) if arguments.requests else workload
        is_slow = arguments.engine.startswith("transformers")
        for _ in range(1 if is_slow else 2):
            generate(workload.first(4) if is_slow else workload)
        begin = time.perf_counter()
        figures = generate(workload)
        figures = {"seconds": time.perf_counter() - begin} | figures
        print(json.dumps(figures | {
            "engine": arguments.engine,
            "workload": workload.name,
            "dtype": arguments.dtype,
            "options": options,
            "load_seconds": load_seconds,
            "output_tokens": workload.num_output_tokens,
            "tokens_per_second": workload.num_output_tokens / figures["seconds"],
            "peak_memory_mib": peak_memory_mib(),
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
