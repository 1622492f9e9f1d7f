"""What the simulator says of N replicas, beside N replicas: Poisson arrivals at a share of what they can take.

    python bench/machines/replica_forecast.py --replicas 2

Calibrates one engine, measures how many requests a second the replicas finish when all come at once, then serves the
same requests with Poisson arrivals at 0.6 of that rate, and simulates these. Random weights in the shape of Qwen3-0.6B.
On a CPU set OMP_NUM_THREADS to a replica's share of the cores, since the calibrated engine has as many threads.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from random_models import SHAPES, NoText, checkpoint  # beside this file, as is the next
from replicas import one_behind_a_front

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.core.config import EngineConfig
from nanovllm.core.outputs import RequestMetrics
from nanovllm.execution.cost_model import IntakeCost
from nanovllm.replicas.routing import POLICIES
from nanovllm.tools.simulate.calibrate import calibrate
from nanovllm.tools.simulate.calibration import Calibration
from nanovllm.tools.simulate.simulator import figures, simulate
from nanovllm.tools.workloads.workloads import Workload, poisson, random_requests

LOAD = 0.6
IDLE_SECONDS = 4.0  # for captures
NUM_SINGLE, PAUSE_SECONDS = 50, 0.01  # requests to idle replicas, one by one
LEAD_SECONDS = 0.2  # to make the tasks in, before the first request is due
COMPARED = (("output_tokens_per_second", None), ("ttft", "p50"), ("ttft", "p99"), ("itl", "p50"), ("itl", "p99"))


async def _play(llm: AsyncLLM, workload: Workload, kind: str) -> dict[str, Any]:
    start = time.monotonic() + LEAD_SECONDS

    async def ask(number: int) -> tuple[RequestMetrics, float, float]:
        request, seen = workload.requests[number], 0.0
        params = SamplingParams(temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True)
        due = start + request.arrival
        await asyncio.sleep(due - time.monotonic())
        late = time.monotonic() - due
        metrics = error = None
        async for output in llm.generate(request.prompt_token_ids, params, output_kind=kind):
            seen = seen or time.monotonic() - due
            metrics, error = output.metrics, output.error
        if metrics is None or error or metrics.num_output_tokens != request.num_output_tokens:
            raise RuntimeError(f"request {number} ended early: {metrics}, {error}")
        return metrics, seen, late

    metrics, seen, late = zip(*await asyncio.gather(*map(ask, range(len(workload.requests)))), strict=True)
    p99 = {f"{name} p99": float(np.percentile(values, 99)) for name, values in (("seen", seen), ("late", late))}
    return figures(metrics, []) | p99 | {"queue": median(queued(metrics))}


def queued(metrics: Iterable[RequestMetrics]) -> list[float]:
    """Seconds from each request's arrival to its first step."""
    return [one.queue_time for one in metrics if one.queue_time is not None]


async def served(llm: AsyncLLM, workload: Workload, *, kind: str = "delta") -> dict[str, Any]:
    """Send a workload without `after`, each request when it is due, to empty caches; its figures by `figures`.

    Requests arrive when `generate` has them: "late p99" is how much later than due, by the event loop's timer. "queue"
    is the median time to the first step. "seen p99" is the reader's: from when a request was due to its first output.
    """
    await llm.reset_prefix_cache()
    await asyncio.sleep(0.5)
    cpu, begin = time.process_time(), time.monotonic()
    result = await _play(llm, workload, kind)
    share = (time.process_time() - cpu) / (time.monotonic() - begin)
    return result | {"front CPU share": share}


async def front_delay(llm: AsyncLLM, workload: Workload, intake: IntakeCost) -> float:
    """Median queue time of single requests to idle replicas, in seconds, less what the simulator counts as intake."""
    times = []
    for request in workload.requests[:NUM_SINGLE]:
        async for output in llm.generate(request.prompt_token_ids, SamplingParams(max_tokens=1), output_kind="final"):
            taken_in = intake.seconds(len(request.prompt_token_ids))
            times += [max(0.0, time - taken_in) for time in queued([output.metrics])]
        await asyncio.sleep(PAUSE_SECONDS)
    return median(times)


def forecast(
    calibration: Calibration, workload: Workload, count: int, options: dict[str, Any], delay: float
) -> dict[str, Any]:
    """The simulator's figures for so many replicas with these engine options, behind a front with such a delay."""
    config = calibration.resolve(EngineConfig.from_options(**options))
    simulation = simulate(
        workload,
        config,
        replace(calibration.cost_model, front_delay=delay),
        num_replicas=count,
        route=POLICIES["prefix-aware"](),
        pools=calibration.pools(config),
    )
    return simulation.figures() | {"queue": median(queued(simulation.requests))}


def requests_of(count: int, shape: str) -> Workload:
    """Prompts of 64 to 512 tokens, answers of 64 to 256; of the tiny shape a quarter of that."""
    scale = 0.25 if shape == "tiny" else 1.0
    prompt, output = ((round(scale * low), round(scale * high)) for low, high in ((64, 512), (64, 256)))
    return random_requests(requests=count, prompt=prompt, output=output, vocab=min(10_000, SHAPES[shape]["vocab_size"]))


async def compare(
    llm: AsyncLLM,
    calibration: Calibration,
    count: int,
    workload: Workload,
    options: dict[str, Any],
    kinds: tuple[str, ...],
) -> list[dict[str, Any]]:
    """Print forecast and measurement of so many replicas; returns a row for each kind of output."""
    delay = await front_delay(llm, workload, calibration.cost_model.intake)
    whole = await served(llm, workload, kind="final")
    rate = LOAD * len(workload.requests) / whole["seconds"]
    timed, rows = poisson(workload, rate, seed=0), []
    predicted, at_once = (forecast(calibration, each, count, options, delay) for each in (timed, workload))
    print(
        f"{count} replicas: {whole['output_tokens_per_second']:.0f} tokens/s at once, forecast "
        f"{at_once['output_tokens_per_second']:.0f}; now {rate:.1f}/s, behind a front of {1e3 * delay:.2f} ms",
        flush=True,
    )
    for kind in kinds:
        measured = await served(llm, timed, kind=kind)
        row: dict[str, Any] = {"replicas": count, "kind": kind}
        for name, key in COMPARED:
            said, found = (each[name] if key is None else each[name][key] for each in (predicted, measured))
            row[f"{name} {key or ''}".strip()] = (said, found)
            print(
                f"{count} replicas, {kind}: {name} {key or '':<4} forecast {said:.5g}, measured {found:.5g}, "
                f"{said / found - 1:+.1%}",
                flush=True,
            )
        print(
            f"{count} replicas, {kind}: first output as its reader saw it, p99 {measured['seen p99']:.4f} s, called "
            f"{measured['late p99']:.4f} s late; queued {1e3 * predicted['queue']:.2f} ms in the median, "
            f"{1e3 * measured['queue']:.2f} measured; the calling process takes {measured['front CPU share']:.0%} of "
            "a core",
            flush=True,
        )
        rows.append(row)
    return rows


def open_replicas(model: str, count: int, options: dict[str, Any]) -> AsyncLLM:
    """As a server opens them: they capture CUDA graphs while idle. A single one has its own process too."""
    with one_behind_a_front():
        return AsyncLLM(
            model, tokenizer=NoText(), data_parallel_size=count, prepares_when_idle=True, record_itl=True, **options
        )


def calibrated(model: str, options: dict[str, Any], repeats: int) -> Calibration:
    begin = time.perf_counter()
    calibration = calibrate(model, tokenizer=NoText(), repeats=repeats, **options)
    print(f"calibrated in {time.perf_counter() - begin:.1f} s; errors of the fit: {calibration.residuals}", flush=True)
    print(calibration.cost_model, flush=True)
    return calibration


async def measure(model: str, given: argparse.Namespace, calibration: Calibration, options: dict[str, Any]) -> None:
    workload = requests_of(given.requests, given.shape)
    for count in given.replicas:
        llm = await asyncio.to_thread(open_replicas, model, count, options)
        async with llm:
            await served(llm, workload.first(given.requests // 4), kind="final")  # the warm-up
            await asyncio.sleep(IDLE_SECONDS)
            await compare(llm, calibration, count, workload, options, ("delta", "final"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b", choices=tuple(SHAPES))
    parser.add_argument("--replicas", type=int, nargs="+", default=[2])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3, help="of the calibration")
    parser.add_argument("--save", metavar="FILE", help="calibrate and write it, and do nothing else")
    given = parser.parse_args()
    model, options = str(checkpoint(given.shape)), {"max_model_len": 2048, "max_num_seqs": 256}
    calibration = calibrated(model, options, given.repeats)
    if given.save:
        calibration.save(given.save)
    else:
        asyncio.run(measure(model, given, calibration, options))


if __name__ == "__main__":
    main()
