"""Speculation of this engine and of vLLM on one GPU: tokens per second with it over those without, each by itself.

    python bench/machines/speculation_peer.py --engine nanovllm --model FOLDER
    $VLLM_PYTHON bench/machines/speculation_peer.py --engine vllm --model FOLDER

Prompts are those of `speculation.py` (edit, extract without a schema, chat), greedy, one request at a time and all of a
part at once. Both engines draft by text that repeats: "suffix", and vLLM's n-grams on the GPU (`ngram_gpu`, the form
without numba). vLLM cannot switch speculation off, so it has an engine for each way, one after the other; the other
engine is built in the same way. Run the model's folder through both in turn on one machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import types
from typing import Any

from speculation import conversations  # beside this file
from transformers import AutoTokenizer

PARTS = ("edit", "extract", "chat")
NUM_DRAFTS = 7
Generate = Any  # (prompts, most tokens) -> outputs


def ours(model: str, *, drafts: bool) -> tuple[Any, Generate]:
    from nanovllm import LLM, SamplingParams

    options: dict[str, Any] = {"speculation": "suffix", "num_speculative_tokens": NUM_DRAFTS} if drafts else {}
    llm = LLM(model, max_model_len=2048, max_num_seqs=128, **options)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        llm.reset_prefix_cache()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        salts = [f"{time.perf_counter()} {number}" for number in range(len(prompts))]  # none is drafted from another
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, cache_salt=salts, use_tqdm=False)]

    return llm, generate


def of_vllm(model: str, *, drafts: bool) -> tuple[Any, Generate]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        import numba  # noqa: F401
    except ImportError:  # its CPU form of n-grams imports it, which `ngram_gpu` never calls
        stub = types.ModuleType("numba")
        for name in ("get_num_threads", "jit", "njit", "prange", "set_num_threads"):
            setattr(stub, name, lambda *given, **_: given[0] if given and callable(given[0]) else lambda call: call)
        sys.modules["numba"] = stub
    import vllm
    from vllm.inputs import TokensPrompt

    options: dict[str, Any] = {}
    if drafts:
        options["speculative_config"] = {
            "method": "ngram_gpu", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_min": 3, "prompt_lookup_max": 8,
        }  # fmt: skip
    llm = vllm.LLM(
        model, max_model_len=2048, max_num_seqs=128, skip_tokenizer_init=True, disable_log_stats=True,
        gpu_memory_utilization=0.4, attention_config={"backend": "TRITON_ATTN"}, **options,
    )  # fmt: skip

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        llm.reset_prefix_cache()
        eos = llm.llm_engine.model_config.hf_config.eos_token_id
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False, stop_token_ids=[eos])
        given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        return [list(o.outputs[0].token_ids) for o in llm.generate(given, params, use_tqdm=False)]

    return llm, generate


def measure(generate: Generate, prompts: list[list[int]], max_tokens: int, *, at_once: bool) -> tuple[float, Any]:
    """Tokens per second, and the outputs."""
    outputs: list[list[int]] = []
    begin = time.perf_counter()
    for given in [prompts] if at_once else [[prompt] for prompt in prompts]:
        outputs += generate(given, max_tokens)
    return sum(map(len, outputs)) / (time.perf_counter() - begin), outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("nanovllm", "vllm"), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copies", type=int, default=4, help="of a part's prompts where all run at once")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    made = ours if given.engine == "nanovllm" else of_vllm
    rates: dict[tuple[str, bool, bool], list[float]] = {}
    found: dict[tuple[str, bool, bool], Any] = {}
    for drafts in (False, True):
        llm, generate = made(given.model, drafts=drafts)
        for part in PARTS:
            messages, options = conversations(part)
            texts = [tokenizer.apply_chat_template(m, add_generation_prompt=True, tokenize=False) for m in messages]
            prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            for at_once in (False, True):
                key, batch = (part, at_once, drafts), prompts * (given.copies if at_once else 1)
                measure(generate, batch, options["max_tokens"], at_once=at_once)  # captures and learns
                runs = [measure(generate, batch, options["max_tokens"], at_once=at_once) for _ in range(given.rounds)]
                rates[key], found[key] = [rate for rate, _ in runs], runs[-1][1]
                print(
                    f"{given.engine}, {'with' if drafts else 'without'} drafts, {part}, "
                    f"{len(batch) if at_once else 1} at once: {statistics.median(rates[key]):.0f} tokens/s "
                    f"({min(rates[key]):.0f} to {max(rates[key]):.0f})",
                    flush=True,
                )
        if hasattr(llm, "close"):
            llm.close()
        del llm, generate
        gc.collect()
    print(f"\n| {given.engine} | at once | without | with | ratio | outputs equal |\n|---|---|---|---|---|---|")
    for part in PARTS:
        for at_once in (False, True):
            off, on = (statistics.median(rates[part, at_once, drafts]) for drafts in (False, True))
            pairs = list(zip(found[part, at_once, False], found[part, at_once, True], strict=True))
            equal = sum(one == other for one, other in pairs)
            count = len(pairs) if at_once else 1
            print(f"| {part} | {count} | {off:.0f} | {on:.0f} | {on / off:.2f} | {equal} of {len(pairs)} |")


if __name__ == "__main__":
    main()
