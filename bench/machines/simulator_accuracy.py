"""Predicted against measured: workloads that no calibration has seen, simulated and run on the real engine.

    nanovllm calibrate --output calibration.json
    python bench/machines/simulator_accuracy.py --calibration calibration.json

Each workload runs once to warm up and then `--repeats` times for real, with an empty prefix cache; the run with the
median throughput is compared. Targets: throughput within 10 %, p99 ITL within 15 %.

On a machine that others load as well, `OMP_NUM_THREADS=1 python bench/machines/simulator_accuracy.py --cpu-time`
calibrates and measures in processor time of one thread, and jumps over the time without work.

On a GPU, `python bench/machines/simulator_accuracy.py --random --scale 4 --load 8` calibrates and measures random
weights in the shape of Qwen3-0.6B.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from collections.abc import Iterator
from typing import Any

from nanovllm.attention.first_touch import take_memory
from nanovllm.build import build_engine
from nanovllm.core.config import EngineConfig
from nanovllm.core.outputs import RequestMetrics
from nanovllm.core.sampling_params import SamplingParams
from nanovllm.engine import Engine
from nanovllm.model.default_model import DEFAULT_MODEL
from nanovllm.process.gc_control import OldObjectsFrozen
from nanovllm.tools.simulate.calibrate import calibrate
from nanovllm.tools.simulate.calibration import Calibration
from nanovllm.tools.simulate.simulator import figures, simulate
from nanovllm.tools.workloads.workloads import TimedRequest, Workload

TARGETS = {"output_tokens_per_second": 0.10, "itl p99": 0.15}


def workloads(scale: float, load: int, vocab_size: int) -> Iterator[Workload]:
    """Mixed lengths at once, a shared prefix, arrivals over time, and long prompts among decodes.

    Args:
        scale: of the prompts' lengths.
        load: as many times more requests, all but the long ones, and as many times faster.
    """
    r = random.Random(7)

    def prompt(length: int) -> list[int]:
        return r.choices(range(vocab_size), k=max(1, round(scale * length)))

    def requests(count: int, arrivals: float, shared: int, low: int, high: int, output: int) -> list[TimedRequest]:
        start, now, made = prompt(shared) if shared else [], 0.0, []
        for _ in range(load * count):
            made.append(TimedRequest(now, start + prompt(r.randint(low, high)), r.randint(output // 2, output)))
            now += r.expovariate(load / arrivals) if arrivals else 0.0
        return made

    yield Workload("mixed lengths", requests(48, 0.0, 0, 20, 300, 100))
    yield Workload("shared prefix", requests(48, 0.0, 512, 16, 48, 48))
    yield Workload("poisson arrivals", requests(48, 0.15, 0, 20, 300, 80))
    long = [TimedRequest((1.0 + 0.5 * number) / load, prompt(1200), 8) for number in range(4)]
    both = sorted(requests(16, 0.0, 0, 20, 100, 120) + long, key=lambda request: request.arrival)
    yield Workload("long among decodes", both)


class Clock:
    """Seconds of real time, or of processor time with sleeps that take none."""

    def __init__(self, *, cpu_time: bool) -> None:
        self._read = time.process_time if cpu_time else time.monotonic
        self._skips = cpu_time
        self._skipped = 0.0

    def __call__(self) -> float:
        return self._read() + self._skipped

    def sleep(self, seconds: float) -> None:
        if self._skips:
            self._skipped += max(0.0, seconds)
        else:
            time.sleep(max(0.0, seconds))


def run_for_real(engine: Engine, workload: Workload, clock: Clock) -> dict[str, Any]:
    """Play a workload without `after` in real time; times count from when a request was due."""
    engine.reset_prefix_cache()
    engine.outputs.clear()
    before = engine.stats()
    due = [(request.arrival, number) for number, request in enumerate(workload.requests)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True)
        for request in workload.requests
    ]
    start = clock()
    with OldObjectsFrozen():
        while due or engine.has_unfinished:
            now = clock() - start
            while due and due[0][0] <= now:
                _, number = heapq.heappop(due)
                engine.add(
                    engine.input_processor.process_one(
                        str(number), workload.requests[number].prompt_token_ids, params[number]
                    )
                )
            if engine.has_unfinished:
                engine.step()
            elif due:
                clock.sleep(due[0][0] - now)
    metrics: dict[int, RequestMetrics] = {}
    for output in engine.outputs:
        if output.error:
            raise RuntimeError(output.error)
        of_request = metrics[int(output.request_id)] = output.metrics
        of_request.arrival_time = start + workload.requests[int(output.request_id)].arrival
    result = figures([metrics[number] for number in sorted(metrics)], [engine.stats()])
    result["steps"] -= before.num_steps
    return result


def compared(result: dict[str, Any]) -> dict[str, float]:
    """The figures that are compared; times in seconds."""
    return {
        "output_tokens_per_second": result["output_tokens_per_second"],
        "ttft p50": result["ttft"]["p50"],
        "ttft p99": result["ttft"]["p99"],
        "itl p50": result["itl"]["p50"],
        "itl p99": result["itl"]["p99"],
    }


def opened(options: argparse.Namespace, clock: Clock) -> tuple[Calibration, Engine]:
    """What was measured, or is now, and an engine of the same model and options."""
    given = {name: json.loads(value) for name, _, value in (text.partition("=") for text in options.set)}
    model, tokenizer = options.model, None
    if options.random:
        from random_models import NoText, checkpoint  # beside this file

        model, tokenizer = str(checkpoint("0.6b")), NoText()
        given = {"dtype": "bfloat16", "max_model_len": 8192} | given
    if options.calibration:
        calibration = Calibration.load(options.calibration)
    else:
        calibration = calibrate(model, tokenizer=tokenizer, repeats=options.repeats, clock=clock, **given)
        print(f"relative errors of the fit: {calibration.residuals}; {calibration.cost_model}", flush=True)
    calibration.resolve(EngineConfig.from_options(**given), model=model)
    engine = build_engine(model, tokenizer, None, given | {"record_itl": True}, clock=clock)
    take_memory(engine.model_runner.binding.caches)
    while engine.model_runner.capture_ahead():
        pass  # as a server does while it is idle
    return calibration, engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--calibration", metavar="FILE")
    source.add_argument("--cpu-time", action="store_true", help="calibrate now, and count processor time")
    source.add_argument("--random", action="store_true", help="calibrate random weights now, on a GPU")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the prompts' lengths")
    parser.add_argument("--load", type=int, default=1, help="so many times more requests, so many times faster")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="an engine option, as JSON")
    options = parser.parse_args()
    clock = Clock(cpu_time=options.cpu_time)
    calibration, engine = opened(options, clock)
    config = calibration.resolve(engine.config)  # the very same limits and pool
    vocab_size = engine.model_runner.binding.model.get_input_embeddings().num_embeddings
    results = []
    print(f"{'workload':<20}{'figure':<26}{'predicted':>12}{'measured':>12}{'error':>9}")
    for workload in workloads(options.scale, options.load, vocab_size):
        begin = time.perf_counter()
        predicted = compared(simulate(workload, config, calibration.cost_model).figures())
        simulated_in = time.perf_counter() - begin
        run_for_real(engine, workload, clock)
        runs = [compared(run_for_real(engine, workload, clock)) for _ in range(options.repeats)]
        runs.sort(key=lambda run: run["output_tokens_per_second"])
        measured = runs[len(runs) // 2]
        results.append({"workload": workload.name, "predicted": predicted, "measured": runs, "took": simulated_in})
        for name, value in predicted.items():
            error = value / measured[name] - 1.0
            missed = " (over the target)" if abs(error) > TARGETS.get(name, float("inf")) else ""
            print(
                f"{workload.name:<20}{name:<26}{value:>12.4g}{measured[name]:>12.4g}{error:>+9.1%}{missed}", flush=True
            )
    if options.json:
        calibration.save(f"{options.json}.calibration")
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
