"""Says where the seconds from nothing to a first token go, with empty compiler caches and then with full ones.

    python bench/machines/cold_start.py --runs cold warm --shape 0.6b

Each run is a process of its own. It prints the phases of construction in the order of their ends, what torch compiled
and how long that took. With --samples it prints the functions in which the main thread spent the most time too, by
samples of its stack: those that let other threads run are seen too often, and the whole takes a fifth longer.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

START = time.perf_counter()
SAMPLED_EVERY = 0.005  # seconds
PHASES = (
    ("nanovllm.model.loader", "load"),
    ("nanovllm.model.binding", "ModelBinding.__init__"),
    ("nanovllm.model.binding", "ModelBinding.merge_linears"),
    ("nanovllm.build", "compile_ahead"),
    ("nanovllm.model.binding", "ModelBinding.fuse_rotary"),
    ("nanovllm.build", "memory_for_cache"),
    ("nanovllm.model.binding", "ModelBinding.compile_layers"),
    ("nanovllm.execution.cuda_graphs", "GraphExecutor.__init__"),
    ("nanovllm.execution.cuda_graphs", "GraphExecutor.warm_up"),
    ("nanovllm.execution.cuda_graphs", "GraphExecutor._capture_forward"),
    ("nanovllm.execution.cuda_graphs", "GraphExecutor._head_graph"),
)


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            end = time.perf_counter()
            if end - begin > 0.1:
                what = " ".join(str(value) for value in args[1:] if isinstance(value, tuple))
                print(f"  {end - START:6.2f}  {name} took {end - begin:.2f} s  {what}", flush=True)

    return run


def time_phases() -> None:
    for module, path in PHASES:
        owner: Any = importlib.import_module(module)
        *parts, name = path.split(".")
        for part in parts:
            owner = getattr(owner, part)
        setattr(owner, name, timed(path, getattr(owner, name)))


class StackSampler(threading.Thread):
    """Counts the functions that the main thread is in."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.within: collections.Counter[str] = collections.Counter()
        self.itself: collections.Counter[str] = collections.Counter()
        self.num_samples = 0
        self.is_over = False

    def run(self) -> None:
        main = threading.main_thread().ident
        while not self.is_over:
            time.sleep(SAMPLED_EVERY)
            frame, seen = sys._current_frames().get(main or 0), []
            while frame is not None:
                code = frame.f_code
                seen.append(f"{'/'.join(Path(code.co_filename).parts[-3:])}:{code.co_qualname}")
                frame = frame.f_back
            if seen:
                self.itself[seen[0]] += 1
                self.within.update(set(seen))
                self.num_samples += 1

    def report(self, seconds: float) -> None:
        each = seconds / max(1, self.num_samples)
        for title, counts, most in (("within", self.within, 90), ("in the function itself", self.itself, 30)):
            print(f"  seconds {title}:")
            for name, count in counts.most_common(most):
                if count * each >= 0.15:
                    print(f"    {count * each:6.2f}  {name}")


def step_seconds(llm: Any, count: int, context: int) -> float:
    """The median of decode steps."""
    from gpu import _step_seconds  # beside this file

    seconds: float = _step_seconds(llm, count, context)
    for request in range(count):
        llm._open_engine().abort(str(request))
    return seconds


def start_once(shape: str, *, samples: bool, steps: bool) -> None:
    import torch
    from random_models import NoText, checkpoint, device  # beside this file

    from nanovllm import LLM, SamplingParams

    print(f"  {time.perf_counter() - START:6.2f}  imports", flush=True)
    torch.zeros(1, device=device())
    print(f"  {time.perf_counter() - START:6.2f}  device", flush=True)
    folder = checkpoint(shape)
    logging.basicConfig(level=logging.INFO, format="  %(message)s")
    time_phases()
    sampler = StackSampler()
    if samples:
        sampler.start()
    begin = time.perf_counter()
    llm = LLM(folder, tokenizer=NoText())
    built = time.perf_counter()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0.6), use_tqdm=False)
    end = time.perf_counter()
    sampler.is_over = True
    print(f"  construction {built - begin:.2f} s, first token {end - built:.2f} s", flush=True)
    for metrics in torch._dynamo.utils.get_compilation_metrics():
        names = ("entire_frame_compile_time_s", "backend_compile_time_s", "inductor_compile_time_s", "code_gen_time_s")
        seconds = [round(getattr(metrics, name, None) or 0.0, 2) for name in names]
        print(f"  compiled {metrics.co_name}: whole, backend, inductor, code {seconds} s", flush=True)
    if samples:
        sampler.report(end - begin)
    for count, context in ((1, 384), (4, 384), (64, 640), (256, 800)) if steps else ():
        print(f"  a step of {count}: {1e3 * step_seconds(llm, count, context):.3f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=("cold", "warm"), default=["cold", "warm"])
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--samples", action="store_true", help="say in which functions the main thread was")
    parser.add_argument("--steps", action="store_true", help="time decode steps too, at last")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        start_once(arguments.shape, samples=arguments.samples, steps=arguments.steps)
        return
    from random_models import checkpoint  # beside this file

    checkpoint(arguments.shape)
    with tempfile.TemporaryDirectory() as caches:
        for number, name in enumerate(arguments.runs):
            folder = f"{caches}/{number}" if name == "cold" else f"{caches}/0"
            environment = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            print(f"{name}:", flush=True)
            command = [sys.executable, __file__, "--child", "--shape", arguments.shape]
            command += ["--samples"] * arguments.samples + ["--steps"] * arguments.steps
            subprocess.run(command, env={**os.environ, **environment}, check=True)


if __name__ == "__main__":
    main()
