"""What tiers of the prefix cache and beam search bring on this machine; figures of docs/results/cpu.md.

python bench/machines/prefix_tiers.py start       # first token of a new process, with and without a directory
python bench/machines/prefix_tiers.py overhead    # W and P with and without tiers: engines that step in turn
python bench/machines/prefix_tiers.py counted     # the part of a step's time that is spent in functions of tiers
python bench/machines/prefix_tiers.py beams       # beams of 4 over 16 prompts, against transformers
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.tools.workloads.workloads import WORKLOADS

SYSTEM = [100 + 7919 * number % 40_000 for number in range(2000)]
QUESTION = [5, 6, 7, 8, 9] * 4
STEPS_IN_TURN, MAX_OUTPUT = 4, 128


def first_token(options: dict[str, Any]) -> dict[str, float]:
    """TTFT in seconds from the call of `generate`, with the model loaded."""
    with LLM(max_model_len=4096, **options) as llm:
        llm.generate([[9, 8, 7]], SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
        begin = time.perf_counter()
        output = llm.generate([SYSTEM + QUESTION], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)[0]
        return {"seconds": time.perf_counter() - begin, "cached": output.num_cached_tokens}


def in_a_new_process(options: dict[str, Any]) -> dict[str, float]:
    command = [sys.executable, __file__, "first", "--options", json.dumps(options)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def start(repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        warm = {"prefix_cache_dir": folder}
        in_a_new_process(warm)
        pairs = [(in_a_new_process({}), in_a_new_process(warm)) for _ in range(repeats)]
    cold_s, warm_s = (statistics.median(pair[n]["seconds"] for pair in pairs) for n in (0, 1))
    print(f"cold {cold_s:.3f} s, warm {warm_s:.3f} s, ratio {warm_s / cold_s:.3f}; cached {pairs[-1][1]['cached']}")


def overhead(repeats: int) -> None:
    """Seconds of the engine's thread on a processor, of engines that step in turn: a busy machine slows both alike."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        settings = {"without": {}, "tiers": {"prefix_cache_host_bytes": 2**30, "prefix_cache_dir": folder}}
        llms = {name: stack.enter_context(LLM(max_model_len=1024, **options)) for name, options in settings.items()}
        for workload in ("W", "P"):
            requests = WORKLOADS[workload]().requests[:16]
            ratios = []
            for repeat in range(repeats + 1):
                for llm in llms.values():
                    engine = llm._open_engine()
                    for number, request in enumerate(requests):
                        # Other prompts in each run, so that no cache has them.
                        prompt = [1 + repeat, *request.prompt_token_ids[1:]]
                        params = SamplingParams(
                            temperature=0.0, max_tokens=min(request.num_output_tokens, MAX_OUTPUT), ignore_eos=True
                        )
                        engine.add(engine.input_processor.process_one(f"{repeat}-{number}", prompt, params))
                seconds = dict.fromkeys(llms, 0.0)
                order = list(llms)[:: 1 - 2 * (repeat % 2)]
                while any(llm._open_engine().has_unfinished for llm in llms.values()):
                    for name in order:
                        engine = llms[name]._open_engine()
                        begin = time.thread_time()
                        for _ in range(STEPS_IN_TURN):
                            engine.step()
                        seconds[name] += time.thread_time() - begin
                        engine.outputs.clear()
                if repeat:  # the first one warms up
                    ratios.append(seconds["tiers"] / seconds["without"])
                    print(workload, {name: round(each, 3) for name, each in seconds.items()}, round(ratios[-1], 4))
            print(f"{workload}: median {statistics.median(ratios):.4f}", flush=True)


class TierTime:
    """Seconds spent in functions of tiers, without those of the plain block manager that they call."""

    def __init__(self) -> None:
        from nanovllm.attention.host_memory import HostMemory
        from nanovllm.block_manager import BlockManager, BlockPool
        from nanovllm.cache.tiers.storing import StoringBlocks
        from nanovllm.cache.tiers.tiered_blocks import TieredBlocks
        from nanovllm.execution.prefix_tiers import PrefixTiers

        self.seconds, self.num_calls = 0.0, 0
        self._inner: list[float] = []  # seconds of the calls within each open call
        plain = {name: owner for owner in (BlockPool, BlockManager) for name in vars(owner)}
        for owner in (StoringBlocks, TieredBlocks):
            for name in {"_on_idle", *plain} & vars(owner).keys():
                if callable(vars(owner)[name]) and not name.startswith("__"):
                    self._wrap(owner, name, is_tier=True)
        for name, owner in plain.items():
            if name in vars(StoringBlocks) | vars(TieredBlocks) and not name.startswith("__"):
                self._wrap(owner, name, is_tier=False)
        for owner, names in ((PrefixTiers, ["step_ended"]), (HostMemory, ["store", "load"])):
            for name in names:
                self._wrap(owner, name, is_tier=True)

    def _wrap(self, owner: type, name: str, *, is_tier: bool) -> None:
        function = vars(owner)[name]
        if not callable(function):
            return

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*arguments, **options)
            finally:
                seconds = time.perf_counter() - begin
                inner = self._inner.pop()
                if is_tier:
                    self.seconds += seconds - inner
                    self.num_calls += 1
                if self._inner:
                    self._inner[-1] += seconds

        setattr(owner, name, timed)


def counted(repeats: int) -> None:
    """With a pool that evicts nothing, and one of a quarter of the prompts and answers, whose blocks are all stored."""
    import torch

    torch.set_num_threads(1)
    tier_time = TierTime()
    for workload in ("W", "P"):
        requests = WORKLOADS[workload]().requests[:16]
        lengths = [len(request.prompt_token_ids) + MAX_OUTPUT for request in requests]
        for pool, num_blocks in (("all fits", None), ("evicting", 1 + max(1024, sum(lengths) // 4) // 64)):
            with LLM(max_model_len=1024, block_size=64, num_kv_blocks=num_blocks, prefix_cache_host_bytes=2**30) as llm:
                shares = []
                for repeat in range(repeats + 1):
                    prompts = [[1 + repeat, *request.prompt_token_ids[1:]] for request in requests]
                    counts = [min(request.num_output_tokens, MAX_OUTPUT) for request in requests]
                    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in counts]
                    before, num_calls, num_steps = tier_time.seconds, tier_time.num_calls, llm.stats().num_steps
                    begin = time.perf_counter()
                    llm.generate(prompts, params, use_tqdm=False)
                    seconds, num_steps = time.perf_counter() - begin, llm.stats().num_steps - num_steps
                    if repeat:
                        shares.append((tier_time.seconds - before) / seconds)
                        print(
                            f"{workload}, {pool}: {shares[-1]:.2%} of {1e3 * seconds / num_steps:.1f} ms a step, "
                            f"{(tier_time.num_calls - num_calls) / num_steps:.1f} calls", flush=True,
                        )  # fmt: skip
                stats = llm.stats().tiers
                print(f"{workload}, {pool}: median {statistics.median(shares):.2%}; stored {stats.num_stored_blocks}")


def beams(repeats: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from nanovllm import BeamSearchParams
    from nanovllm.model.default_model import default_folder

    requests = WORKLOADS["W"]().requests[:16]
    prompts = [request.prompt_token_ids[:96] for request in requests]
    width, length = 4, 32
    reference = AutoModelForCausalLM.from_pretrained(default_folder())
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ours, theirs = [], []
    with LLM(max_model_len=1024) as llm:
        params = BeamSearchParams(beam_width=width, max_tokens=length, ignore_eos=True)
        for _ in range(repeats):
            begin = time.perf_counter()
            llm.beam_search(prompts, params)
            ours.append(time.perf_counter() - begin)
            llm.reset_prefix_cache()
            begin = time.perf_counter()
            with torch.inference_mode():
                reference.generate(
                    padded, attention_mask=mask, num_beams=width, do_sample=False, max_new_tokens=length,
                    min_new_tokens=length, pad_token_id=0,
                )  # fmt: skip
            theirs.append(time.perf_counter() - begin)
    print(f"beams: {statistics.median(ours):.2f} s, transformers {statistics.median(theirs):.2f} s")
    print(f"ratio {statistics.median(b / a for a, b in zip(ours, theirs, strict=True)):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("start", "overhead", "counted", "beams", "first"))
    parser.add_argument("--options", default="{}")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.what == "first":
        print(json.dumps(first_token(json.loads(options.options))))
    else:
        {"start": start, "overhead": overhead, "counted": counted, "beams": beams}[options.what](options.repeats)


if __name__ == "__main__":
    main()
