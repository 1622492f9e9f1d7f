"""The simulator: predicted against measured, and routing policies on up to 1,024 simulated replicas.

    python bench/machines/simulator.py accuracy --calibration calibration.json      of `nanovllm calibrate`
    OMP_NUM_THREADS=1 python bench/machines/simulator.py accuracy --cpu-time        beside other work
    python bench/machines/simulator.py accuracy --random --scale 4 --load 8         random weights on a GPU
    python bench/machines/simulator.py routing --plot docs/images/routing.svg

accuracy: workloads that no calibration has seen. Each runs once to warm up and then --repeats times, with an empty
    prefix cache; the run with the median throughput is compared. Targets: throughput within 10 %, p99 ITL within 15 %.
    Without --calibration the engine is calibrated first; --cpu-time counts processor time of one thread and jumps over
    time without work; --random takes the shape of Qwen3-0.6B.
routing: each request has one of 32 system prompts of 2,000 tokens, drawn evenly, and 64 tokens of its own; arrivals are
    Poisson, 100 a second for each replica. The costs are `COSTS`.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from collections.abc import Iterator
from typing import Any

from harness import Figures, Option, Part, note, run_parts  # beside this file, as is the next
from random_models import NoText, checkpoint

from nanovllm.build import build_engine
from nanovllm.engine import Engine
from nanovllm.fast.host.memory import take_memory
from nanovllm.features.costs.cost_model import CostModel, DeviceCost, HostCost
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.models.default_model import DEFAULT_MODEL
from nanovllm.one_pool import resolve_pool
from nanovllm.outputs import RequestMetrics
from nanovllm.serving.replicas.routing import POLICIES
from nanovllm.tools.simulate.calibrate import calibrate
from nanovllm.tools.simulate.calibration import Calibration
from nanovllm.tools.simulate.simulator import figures, simulate
from nanovllm.tools.workloads.workloads import TimedRequest, Workload

TARGETS = {"output_tokens_per_second": 0.10, "itl p99": 0.15}
# Round figures of the order of a model of 0.6 billion parameters on one H200, not a calibration: weights and small
# kernels 1.8 ms, 3.3 us of arithmetic a token, K and V of 115 kB a token at 4.3 TB/s.
COSTS = CostModel(
    schedule=HostCost(5e-5, 1e-6),
    device=DeviceCost(
        knee=64,
        fixed=1.8e-3,
        per_token_above=3.3e-6,
        per_decode=2.5e-6,
        per_context_token=27e-9,
        per_shared_context_token=27e-9,
        per_chunk_pair=2e-10,
    ),
    update=HostCost(5e-5, 1e-6),
    launch_blocks=False,
)
# The pool holds half of the system prompts, or a few of them beside the requests that run.
ROUTING = {"num_kv_blocks": 513, "max_model_len": 4096}


# ------------------------------------------------------------------------------------------------------------ accuracy


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
    model: str = options.model
    tokenizer = None
    given: dict[str, Any] = {}
    if options.random:
        model = str(checkpoint("0.6b"))
        tokenizer = NoText()
        given = {"dtype": "bfloat16", "max_model_len": 8192}
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


def measure_accuracy(options: argparse.Namespace) -> Figures:
    clock = Clock(cpu_time=options.cpu_time)
    calibration, engine = opened(options, clock)
    config = calibration.resolve(engine.config)  # the very same limits and pool
    vocab_size = engine.model_runner.binding.model.get_input_embeddings().num_embeddings
    found: Figures = {}
    for workload in workloads(options.scale, options.load, vocab_size):
        predicted = compared(simulate(workload, config, calibration.cost_model).figures())
        run_for_real(engine, workload, clock)
        runs = [compared(run_for_real(engine, workload, clock)) for _ in range(options.repeats)]
        runs.sort(key=lambda run: run["output_tokens_per_second"])
        measured = runs[len(runs) // 2]
        errors = {name: value / measured[name] - 1.0 for name, value in predicted.items()}
        for name, bound in TARGETS.items():
            note(f"{workload.name}: {name}, error", 100 * errors[name], "%", f"within {bound:.0%}")
        found[workload.name] = {"predicted": predicted, "measured": measured, "error": errors}
    return found


# ------------------------------------------------------------------------------------------------------------- routing


def p1_like(
    num_requests: int, rate: float, *, num_prompts: int, shared_tokens: int, own_tokens: int, output_tokens: int
) -> Workload:
    """Poisson arrivals, `rate` a second in all; token ids are drawn from a seed."""
    r = random.Random(0)
    prompts = [r.choices(range(10_000), k=shared_tokens) for _ in range(num_prompts)]
    requests, now = [], 0.0
    for _ in range(num_requests):
        now += r.expovariate(rate)
        requests.append(TimedRequest(now, r.choice(prompts) + r.choices(range(10_000), k=own_tokens), output_tokens))
    return Workload(f"{num_requests} requests of {num_prompts} system prompts, {rate:g}/s", requests)


def measure_routing(options: argparse.Namespace) -> Figures:
    limits = EngineConfig(**ROUTING).resolve_limits("cuda", ROUTING["max_model_len"])
    config = resolve_pool(limits, 1, 0, max_model_len_is_set=True)
    rows: list[Figures] = []
    for count in options.replicas:
        workload = p1_like(
            options.requests * count, 100.0 * count, num_prompts=32, shared_tokens=2000, own_tokens=64, output_tokens=64
        )
        for policy in POLICIES if count > 1 else ["round-robin"]:  # of one there is nothing to choose
            begin = time.process_time()
            found = simulate(workload, config, COSTS, num_replicas=count, route=POLICIES[policy]()).figures()
            row = {"replicas": count, "policy": policy, "took": time.process_time() - begin} | found
            rows.append(row)
            print(f"  {row}", flush=True)
    if options.plot:
        plot(rows, options.plot)
    return {f"{row['replicas']}, {row['policy']}": row for row in rows}


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Hit rate and p99 TTFT over the number of replicas (needs the extra `plot`)."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "nanovllm"  # the same bytes each time
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    panels = (
        ("prompt tokens from the prefix cache, %", lambda row: 100 * row["hit_rate"]),
        ("time to first token, p50, ms", lambda row: 1e3 * row["ttft"]["p50"]),
        ("time to first token, p99, ms", lambda row: 1e3 * row["ttft"]["p99"]),
    )
    for axis, (title, value) in zip(axes, panels, strict=True):
        for policy in POLICIES:
            of_policy = [row for row in rows if row["policy"] == policy or row["replicas"] == 1]
            axis.plot([row["replicas"] for row in of_policy], list(map(value, of_policy)), marker="o", label=policy)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("replicas")
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


PARTS = {"accuracy": Part(measure_accuracy), "routing": Part(measure_routing)}
OPTIONS = {
    "calibration": Option(None, "file of `nanovllm calibrate`, of accuracy"),
    "cpu_time": Option(False, "processor time, of accuracy"),
    "random": Option(False, "random weights on a GPU, of accuracy"),
    "model": Option(DEFAULT_MODEL, "of accuracy"),
    "repeats": Option(3, "measured runs of accuracy"),
    "scale": Option(1.0, "of the prompts' lengths, of accuracy"),
    "load": Option(1, "times more requests, times faster, of accuracy"),
    "replicas": Option([1, 8, 64, 1024], "of routing"),
    "requests": Option(32, "for each replica, of routing"),
    "plot": Option(None, "picture of routing; needs the extra plot"),
}

if __name__ == "__main__":
    run_parts(__doc__, PARTS, OPTIONS)
