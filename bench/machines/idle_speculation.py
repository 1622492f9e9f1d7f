"""Time of a step without speculation over that with one that drafts nothing, switched within each run.

    python bench/machines/idle_speculation.py                                 the default model
    python bench/machines/idle_speculation.py --shape 8b --requests 1 64      random weights, for a GPU
    python bench/machines/idle_speculation.py --shape tiny --seconds 5        a quick trial

While all requests of a run decode, speculation is off, on, on and off for a block of steps each: so longer contexts,
and a machine that becomes busy, cancel out. Each four blocks give a ratio: 1 means that speculation costs nothing. The
median and its interval of 95 % are shown. Processor time is the process's, with all of its threads.
`nothing` is a drafter that proposes nothing, `suffix` looks for repeats in texts that hardly have any.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch
from speculation_gpu import Nothing, engine  # beside this file

from nanovllm import LLM, SamplingParams
from nanovllm.model.default_model import DEFAULT_MODEL, ensure_default_model
from nanovllm.observability.step_records import StepObservers
from nanovllm.speculation.build import SUFFIX_BYTES
from nanovllm.speculation.speculation import Speculation
from nanovllm.speculation.suffix import SuffixDrafter

ORDER = (False, True, True, False)


class Alternation:
    """One run: switches an engine's speculation between blocks of steps, and takes their times.

    made: the engine's own, for its lengths.
    ratios: (of time, of processor time) of each four blocks in which every request drew one token a step.
    """

    def __init__(self, llm: LLM, made: Speculation, drafter: Any, num_steps: int, num_requests: int) -> None:
        self._engine, self._num_steps, self._num_requests = llm._engine, num_steps, num_requests
        scheduler = self._engine.scheduler
        self._drafting = Speculation(
            scheduler.config, scheduler.block_manager, drafter, made.lengths, vocab_size=made._vocab_size
        )
        learned = made.lengths.costs
        self._observers = StepObservers() if learned is None else StepObservers([learned])
        self._observers.append(self._drafting)
        self.engine_step = self._engine.step
        self.ratios: list[tuple[float, float]] = []
        self.num_left_out = 0
        self._blocks: list[tuple[float, float]] = []
        self._num_done, self._is_whole = 0, True

    def step(self) -> None:
        """`Engine.step`."""
        scheduler = self._engine.scheduler
        if self._num_done == 0 and any(batch.drafts for batch in scheduler.in_flight):
            self.engine_step()  # its drafts are to be accepted first
            return
        if self._num_done == 0:
            is_on = ORDER[len(self._blocks)]
            scheduler.drafting = self._drafting if is_on else None
            self._engine.observers = self._observers if is_on else StepObservers()
            self._before = scheduler.stats.num_output_tokens
            self._begin = time.perf_counter(), time.process_time()
        self.engine_step()
        self._num_done += 1
        if self._num_done == self._num_steps:
            seconds = time.perf_counter() - self._begin[0], time.process_time() - self._begin[1]
            drawn = scheduler.stats.num_output_tokens - self._before
            self._end_block(seconds, is_whole=drawn == self._num_requests * self._num_steps)

    def _end_block(self, seconds: tuple[float, float], *, is_whole: bool) -> None:
        self._num_done = 0
        self._blocks.append(seconds)
        self._is_whole &= is_whole
        if len(self._blocks) == len(ORDER):
            off, on = (
                [sum(b[i] for b, is_on in zip(self._blocks, ORDER, strict=True) if is_on == which) for i in (0, 1)]
                for which in (False, True)
            )
            if self._is_whole:
                self.ratios.append((off[0] / on[0], off[1] / on[1]))
            self.num_left_out += not self._is_whole
            self._blocks, self._is_whole = [], True


def interval(values: list[float]) -> str:
    """The median of values and its interval of 95 %, by ranks."""
    ordered, count = sorted(values), len(values)
    apart = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - apart)), min(count - 1, math.ceil(count / 2 + apart) - 1)
    return f"{statistics.median(ordered):.4f} ({ordered[low]:.4f} to {ordered[high]:.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--shape", help="random weights in this shape instead of a model")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8, help="of a block")
    parser.add_argument("--seconds", type=float, default=45, help="of each row of the table, at least")
    given = parser.parse_args()
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 2 * max(given.requests)}
    choice, rows = random.Random(0), []
    with ExitStack() as stack:
        if given.shape:
            llm = stack.enter_context(engine(given.shape, Nothing(), **options))
        else:
            model = str(ensure_default_model()) if given.model == DEFAULT_MODEL else given.model
            llm = stack.enter_context(LLM(model, speculation=Nothing(), kv_cache_memory_bytes=1 << 30, **options))
        made = llm._engine.scheduler.drafting
        vocab_size = made._vocab_size
        params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=given.output)
        for count in given.requests:
            for name in ("nothing", "suffix"):
                ratios: list[tuple[float, float]] = []
                number, num_left_out, end = 0, 0, time.perf_counter() + given.seconds
                while number < 2 or time.perf_counter() < end:
                    drafter = Nothing() if name == "nothing" else SuffixDrafter(SUFFIX_BYTES)
                    alternation = Alternation(llm, made, drafter, given.steps, count)
                    first_tokens = range(3, vocab_size - given.output - 8)
                    llm._engine.step = alternation.step
                    llm.generate(
                        [choice.choices(first_tokens, k=given.prompt) for _ in range(count)], params, use_tqdm=False
                    )
                    llm._engine.step = alternation.engine_step
                    if number:  # the first run captures and learns
                        ratios += alternation.ratios
                        num_left_out += alternation.num_left_out
                    number += 1
                if not ratios:
                    print(f"{count} requests, {name}: no four blocks without drafts", flush=True)
                    continue
                wall, processor = zip(*ratios, strict=True)
                rows.append(f"| {count} | {name} | {interval([*wall])} | {interval([*processor])} |")
                print(f"{rows[-1]}  {len(wall)} times four blocks, {num_left_out} left out", flush=True)
    print("\n| requests | drafter | time off / on | processor time off / on |\n|---|---|---|---|\n" + "\n".join(rows))
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
