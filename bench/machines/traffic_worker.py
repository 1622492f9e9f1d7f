"""Process of the traffic benchmark that runs one part on one engine; started by `traffic.py` with a job file."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.machines.step_counts import Taken, captures, counts
from bench.machines.traffic_engines import OFFLINE, STREAMING, Offline, Streaming, play
from bench.machines.traffic_requests import OPTIONS, lognormal, params_of, params_of_option
from nanovllm.tools.bench.replay import figures
from nanovllm.tools.workloads.workloads import TimedRequest, Workload, poisson, random_requests

ABOUT = "about"  # case of what holds for all parts: device, versions
MS = "ms a step"
BETWEEN_SECONDS = 5.0  # of idle time before each rate but the first, at most
Emit = Callable[[str, dict[str, Any]], None]  # case, figures by name


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths and numbers of all parts.

    decode_context: middle of the contexts in `options`.
    decode_steps: measured steps of decodes; `unmeasured_steps` come before them.
    long_context: of the one request in `long`.
    shared, own: tokens of the prompts in `shared`, for `sharers` requests.
    """

    requests: int = 400
    prompt: int = 220
    longest_prompt: int = 6000
    output: int = 180
    longest_output: int = 1500
    vocab: int = 10_000
    counts: list[int] = field(default_factory=lambda: [4, 64, 256])
    decode_context: int = 640
    decode_steps: int = 80
    unmeasured_steps: int = 20
    long_context: int = 32_768
    sharers: int = 64
    shared: int = 4096
    own: int = 256

    @property
    def num_decoded(self) -> int:
        return self.unmeasured_steps + self.decode_steps + 2

    def traffic(self, seed: int = 0) -> Workload:
        return lognormal(
            requests=self.requests, prompt=self.prompt, longest_prompt=self.longest_prompt, output=self.output,
            longest_output=self.longest_output, vocab=self.vocab, seed=seed,
        )  # fmt: skip


TINY = Sizes(
    requests=12, prompt=20, longest_prompt=200, output=6, longest_output=20, vocab=500, counts=[4], decode_context=40,
    decode_steps=8, unmeasured_steps=2, long_context=500, sharers=4, shared=128, own=16,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """A part to run.

    start_time: when the process was started, on the clock of `time.monotonic`, which all processes share on Linux.
    options: options of the engine.
    rates: requests per second, of `poisson`.
    idle: seconds without requests before the first rate.
    repeats: later calls of `offline`.
    copy_rate: bytes per second of the device's memory, for `long`.
    """

    part: str
    engine: str
    model: str
    shape: str
    start_time: float
    options: dict[str, Any]
    sizes: Sizes
    rates: list[float]
    idle: float
    repeats: int
    copy_rate: float

    def open_offline(self, longest: int) -> Offline:
        return OFFLINE[self.engine](self.model, {"max_model_len": longest} | self.options)

    def open_streaming(self, longest: int) -> Streaming:
        return STREAMING[self.engine](self.model, {"max_model_len": longest} | self.options)


def longest_of(workload: Workload) -> int:
    return max(len(request.prompt_token_ids) + request.num_output_tokens for request in workload.requests)


def prompts_of(workload: Workload) -> list[list[int]]:
    return [request.prompt_token_ids for request in workload.requests]


# ------------------------------------------------------------------------------------------------------------- parts


def prepare(job: Job, emit: Emit) -> None:
    """Write the checkpoint and measure the device's memory."""
    from bench.machines.random_models import checkpoint, copy_rate, device
    from nanovllm.tools.bench.worker import environment

    folder = checkpoint(job.shape)
    rate = copy_rate(2**31 if device() == "cuda" else 2**24)
    emit(ABOUT, {"model": str(folder), "copy_rate": rate, "environment": environment()})


def offline(job: Job, emit: Emit) -> None:
    """All requests at once: the very first call of a process, then later ones with an empty prefix cache."""
    workload = job.sizes.traffic()
    prompts, params = prompts_of(workload), params_of(workload)
    engine = job.open_offline(longest_of(workload))
    emit("start-up", {"process to engine, s": time.monotonic() - job.start_time})
    names = ["start-up", "first call", *(f"later call {number + 1}" for number in range(job.repeats))]
    taken, seconds = [engine.watch.take()], []
    for name in names[1:]:
        engine.reset_prefix_cache()
        seconds.append(engine.generate(prompts, params))
        taken.append(engine.watch.take())
        rate = workload.num_output_tokens / seconds[-1]
        emit(name, {"seconds": seconds[-1], "output tokens/s": rate} | captures_of(taken[-1]))
    if job.repeats:
        emit(names[1], {"x later calls": seconds[0] / statistics.median(seconds[1:])})
    emit_counts(emit, names, taken)
    engine.close()


def captures_of(taken: Taken) -> dict[str, float]:
    return captures(taken) if taken.records else {}  # an engine without step records has no log to count from


def emit_counts(emit: Emit, names: list[str], taken: list[Taken]) -> None:
    """Emit the counts of each case; nothing for an engine without step records. Pauses need the medians of all."""
    if any(part.records for part in taken):
        for name, figures in zip(names, counts(taken), strict=True):
            emit(name, figures)


def poisson_part(job: Job, emit: Emit) -> None:
    """Poisson arrivals at each rate, read by clients of the engine's streams."""
    asyncio.run(_poisson(job, emit))


async def _poisson(job: Job, emit: Emit) -> None:
    workload = job.sizes.traffic()
    engine = job.open_streaming(longest_of(workload))
    first = Workload("first", [TimedRequest(0.0, workload.requests[0].prompt_token_ids, 8)])
    await play(engine, first, params_of(first))
    names, taken = ["start-up and one request"], [engine.watch.take()]
    idle = job.idle if engine.prepares_when_idle else min(1.0, job.idle)
    for rate in job.rates:
        await asyncio.sleep(idle)
        await engine.reset_prefix_cache()
        names += [f"{idle:g} s idle before {rate:g}/s", f"{rate:g}/s"]
        taken.append(engine.watch.take())
        idle = min(idle, BETWEEN_SECONDS)
        timed = poisson(workload, rate)
        found = figures(timed, await play(engine, timed, params_of(timed)))
        taken.append(engine.watch.take())
        ttft, itl = found["ttft"], found["itl"]
        emit(names[-1], {
            "TTFT p50, ms": 1e3 * ttft["p50"], "TTFT p99, ms": 1e3 * ttft["p99"],
            "ITL p50, ms": 1e3 * itl["p50"], "ITL p99, ms": 1e3 * itl["p99"], "ITL max, ms": 1e3 * itl["max"],
            "seconds": found["seconds"], "output tokens/s": found["output_tokens_per_second"],
            **captures_of(taken[-1]),
        })  # fmt: skip
    emit_counts(emit, names, taken)
    await engine.close()


def measure_steps(
    job: Job, engine: Offline, prompts: list[list[int]], params: list[dict[str, Any]]
) -> dict[str, float]:
    """Return the median milliseconds of a step of decodes, and captures and pauses of the whole call."""
    engine.watch.take()
    seconds = engine.decode_seconds(prompts, params)[job.sizes.unmeasured_steps :]
    if not seconds:
        raise RuntimeError(f"no step of {len(prompts)} decodes alone was seen")
    taken = engine.watch.take()
    return {MS: 1e3 * statistics.median(seconds)} | (counts([taken])[0] if taken.records else {})


def options(job: Job, emit: Emit) -> None:
    """Steps of several numbers of decodes, with each sampling option."""
    sizes = job.sizes
    prompt = sizes.decode_context - sizes.unmeasured_steps - sizes.decode_steps // 2
    engine = job.open_offline(prompt + sizes.num_decoded)
    for count in sizes.counts:
        prompts = prompts_of(random_requests(requests=count, prompt=prompt, vocab=sizes.vocab))
        greedy = None
        for option in OPTIONS:
            case = f"{count} decodes, {option}"
            params = params_of_option(option, count, sizes.num_decoded)
            try:
                found = measure_steps(job, engine, prompts, params)
            except (ValueError, TypeError, RuntimeError) as error:
                emit(case, {"failed": f"{type(error).__name__}: {error}"})
                continue
            if option == "greedy":
                greedy = found[MS]
            elif greedy is not None:
                found["x greedy"] = found[MS] / greedy
            emit(case, found)
    engine.close()


def long(job: Job, emit: Emit) -> None:
    """One request at a long context, beside the time that its bytes take."""
    from bench.machines.random_models import token_bytes, weight_bytes

    sizes = job.sizes
    prompt = sizes.long_context - sizes.unmeasured_steps - sizes.decode_steps // 2
    engine = job.open_offline(prompt + sizes.num_decoded)
    prompts = prompts_of(random_requests(requests=1, prompt=prompt, vocab=sizes.vocab))
    found = measure_steps(job, engine, prompts, params_of_option("temperature", 1, sizes.num_decoded))
    by_bytes = 1e3 * (weight_bytes(job.shape) + sizes.long_context * token_bytes(job.shape)) / job.copy_rate
    found |= {"ms by bytes": by_bytes, "share of that": by_bytes / found[MS]}
    emit(f"1 decode at {sizes.long_context:,}", found)
    engine.close()


def shared(job: Job, emit: Emit) -> None:
    """Decodes that share a long prefix, against as many of the same lengths that share nothing."""
    sizes = job.sizes
    prompt = sizes.shared + sizes.own
    engine = job.open_offline(prompt + sizes.num_decoded)
    params = params_of_option("temperature", sizes.sharers, sizes.num_decoded)
    alone = None
    for name, prefix in (("nothing", 0), (f"{sizes.shared:,} tokens", sizes.shared)):
        engine.reset_prefix_cache()
        requests = random_requests(requests=sizes.sharers, prompt=prompt, shared=prefix, vocab=sizes.vocab)
        found = measure_steps(job, engine, prompts_of(requests), params)
        if alone is None:
            alone = found[MS]
        else:
            found["x faster than unshared"] = alone / found[MS]
        emit(f"{sizes.sharers} decodes of {prompt:,}, {name} shared", found)
    engine.close()


PARTS: dict[str, Callable[[Job, Emit], None]] = {
    "prepare": prepare, "offline": offline, "poisson": poisson_part, "options": options, "long": long,
    "shared": shared,
}  # fmt: skip


def main(path: str) -> None:
    """Run a job; each result is a line of JSON in the pipe that the job names."""
    with open(path, encoding="utf-8") as file:
        given = json.load(file)
    with os.fdopen(given.pop("pipe"), "w", encoding="utf-8") as pipe:

        def emit(case: str, figures: dict[str, Any]) -> None:
            pipe.write(json.dumps({"case": case, "figures": figures}) + "\n")
            pipe.flush()

        job = Job(**given | {"sizes": Sizes(**given["sizes"])})
        if job.engine != "nanovllm":
            emit(ABOUT, {f"{job.engine} version": importlib.metadata.version(job.engine)})
        PARTS[job.part](job, emit)


def job_file(job: Job, pipe: int) -> str:
    return json.dumps(dataclasses.asdict(job) | {"pipe": pipe})


if __name__ == "__main__":
    main(sys.argv[1])
