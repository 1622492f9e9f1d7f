"""Process of the traffic benchmark that runs parts on one engine; started by `traffic.py` with a job file."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import importlib.metadata
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from bench.machines.step_counts import Taken, captures, counts
from bench.machines.traffic_engines import OFFLINE, STREAMING, Offline, Streaming, play
from bench.machines.traffic_requests import OPTIONS, lognormal, params_of, params_of_option
from nanovllm.tools.bench.replay import figures
from nanovllm.tools.workloads.specs import build
from nanovllm.tools.workloads.workloads import TimedRequest, Workload, paced, poisson, random_requests, w1

ABOUT = "about"  # case of what holds for all parts: device, versions
MS = "ms a step"
BETWEEN_SECONDS = 5.0  # of idle time before each rate but the first, at most
Emit = Callable[[str, dict[str, Any]], None]  # case, figures by name


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths and numbers of all parts.

    workload: spec of the requests of `offline` and `poisson`; None for log-normal lengths.
    w1: whether `w` plays W1 itself; else the requests of `offline`.
    w3_prompts, w3_output: tokens of the requests in `w`.
    decode_context: middle of the contexts in `options`.
    decode_steps: measured steps of decodes; `unmeasured_steps` come before them.
    long_context: of the one request in `long`.
    shared, own: tokens of the prompts in `shared`, for `sharers` requests.
    """

    workload: str | None = None
    requests: int = 400
    prompt: int = 220
    longest_prompt: int = 6000
    output: int = 180
    longest_output: int = 1500
    vocab: int = 10_000
    w1: bool = True
    w3_prompts: tuple[int, ...] = (128, 2048)
    w3_output: int = 512
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

    def prompt_before(self, context: int) -> int:
        """Tokens of the prompts whose measured decodes have this context in the middle."""
        return context - self.unmeasured_steps - self.decode_steps // 2

    def traffic(self) -> Workload:
        if self.workload is not None:
            return build(self.workload).first(self.requests)
        return lognormal(
            requests=self.requests, prompt=self.prompt, longest_prompt=self.longest_prompt, output=self.output,
            longest_output=self.longest_output, vocab=self.vocab,
        )  # fmt: skip


TINY = Sizes(
    requests=12, prompt=20, longest_prompt=200, output=6, longest_output=20, vocab=500, w1=False, w3_prompts=(10, 30),
    w3_output=8, counts=[4], decode_context=40, decode_steps=8, unmeasured_steps=2, long_context=500, sharers=4,
    shared=128, own=16,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """Parts to run.

    part: one or, joined by `+`, several that share an engine.
    start_time: when the process was started, on the clock of `time.monotonic`, which all processes share on Linux.
    options: options of the engine.
    rates: requests per second, of `poisson`.
    idle: seconds without requests before the first rate.
    repeats: later calls of `offline`, and calls of `w`.
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

    def open_offline(self, parts: list[OfflinePart]) -> Offline:
        longest = max(part.longest(self.sizes) for part in parts)
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


def offline(job: Job, engine: Offline, emit: Emit) -> None:
    """All requests at once: the very first call of a process, then later ones with an empty prefix cache."""
    workload = job.sizes.traffic()
    prompts, params = prompts_of(workload), params_of(workload)
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


def w1_of(sizes: Sizes) -> Workload:
    return w1() if sizes.w1 else sizes.traffic()


def w(job: Job, engine: Offline, emit: Emit) -> None:
    """W1, and W3 as the difference between one token and more; the median of calls after one that is not counted."""
    sizes = job.sizes

    def seconds_of(workload: Workload) -> float:
        engine.reset_prefix_cache()
        return engine.generate(prompts_of(workload), params_of(workload))

    workload = w1_of(sizes)
    seconds = [seconds_of(workload) for _ in range(1 + job.repeats)][1:]
    median = statistics.median(seconds)
    emit("W1", {"seconds": median, "slowest, s": max(seconds), "output tokens/s": workload.num_output_tokens / median})
    for prompt in sizes.w3_prompts:
        kinds = [
            random_requests(requests=1, prompt=prompt, output=output, vocab=sizes.vocab)
            for output in (1, 1 + sizes.w3_output)
        ]
        times = [seconds_of(kinds[1]) - seconds_of(kinds[0]) for _ in range(1 + job.repeats)][1:]
        emit(f"W3, {prompt:,} in", {"ms a token": 1e3 * statistics.median(times) / sizes.w3_output})


def captures_of(taken: Taken) -> dict[str, float]:
    return captures(taken) if taken.records else {}  # an engine without step records has no log to count from


def emit_counts(emit: Emit, names: list[str], taken: list[Taken]) -> None:
    """Emit the counts of each case; nothing for an engine without step records. Pauses need the medians of all."""
    if any(part.records for part in taken):
        for name, figures in zip(names, counts(taken), strict=True):
            emit(name, figures)


def poisson_part(job: Job, emit: Emit) -> None:
    """Poisson arrivals at each rate, or the workload's own, read by clients of the engine's streams."""
    asyncio.run(_poisson(job, emit))


async def _poisson(job: Job, emit: Emit) -> None:
    workload = job.sizes.traffic()
    engine = job.open_streaming(longest_of(workload))
    gc.freeze()  # no engine's time has collections of what was loaded
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
        timed = paced(workload, rate) if workload.is_spread else poisson(workload, rate)
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


def options(job: Job, engine: Offline, emit: Emit) -> None:
    """Steps of several numbers of decodes, with each sampling option."""
    sizes = job.sizes
    prompt = sizes.prompt_before(sizes.decode_context)
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


def long(job: Job, engine: Offline, emit: Emit) -> None:
    """One request at a long context, beside the time that its bytes take."""
    from bench.machines.random_models import token_bytes, weight_bytes

    sizes = job.sizes
    prompt = sizes.prompt_before(sizes.long_context)
    prompts = prompts_of(random_requests(requests=1, prompt=prompt, vocab=sizes.vocab))
    found = measure_steps(job, engine, prompts, params_of_option("temperature", 1, sizes.num_decoded))
    by_bytes = 1e3 * (weight_bytes(job.shape) + sizes.long_context * token_bytes(job.shape)) / job.copy_rate
    found |= {"ms by bytes": by_bytes, "share of that": by_bytes / found[MS]}
    emit(f"1 decode at {sizes.long_context:,}", found)


def shared(job: Job, engine: Offline, emit: Emit) -> None:
    """Decodes that share a long prefix, against as many of the same lengths that share nothing."""
    sizes = job.sizes
    prompt = sizes.shared + sizes.own
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


class OfflinePart(NamedTuple):
    """longest: tokens of its longest sequence."""

    run: Callable[[Job, Offline, Emit], None]
    longest: Callable[[Sizes], int]


ALONE: dict[str, Callable[[Job, Emit], None]] = {"prepare": prepare, "poisson": poisson_part}
PARTS = {
    "offline": OfflinePart(offline, lambda sizes: longest_of(sizes.traffic())),
    "w": OfflinePart(w, lambda sizes: max(longest_of(w1_of(sizes)), max(sizes.w3_prompts) + sizes.w3_output + 1)),
    "options": OfflinePart(options, lambda sizes: sizes.prompt_before(sizes.decode_context) + sizes.num_decoded),
    "long": OfflinePart(long, lambda sizes: sizes.prompt_before(sizes.long_context) + sizes.num_decoded),
    "shared": OfflinePart(shared, lambda sizes: sizes.shared + sizes.own + sizes.num_decoded),
}


def run(job: Job, emit: Callable[[str, str, dict[str, Any]], None]) -> None:
    """Run all parts; one that fails among several is emitted as such, and the rest runs."""
    names = job.part.split("+")
    if job.part in ALONE:
        ALONE[job.part](job, partial(emit, job.part))
        return
    engine = job.open_offline([PARTS[name] for name in names])
    for name in names:
        try:
            PARTS[name].run(job, engine, partial(emit, name))
        except Exception as error:
            if len(names) == 1:
                raise
            emit(name, "the whole part", {"failed": f"{type(error).__name__}: {error}"})
    engine.close()


def main(path: str) -> None:
    """Run a job; each result is a line of JSON in the pipe that the job names."""
    with open(path, encoding="utf-8") as file:
        given = json.load(file)
    with os.fdopen(given.pop("pipe"), "w", encoding="utf-8") as pipe:

        def emit(part: str, case: str, figures: dict[str, Any]) -> None:
            pipe.write(json.dumps({"part": part, "case": case, "figures": figures}) + "\n")
            pipe.flush()

        job = Job(**given | {"sizes": Sizes(**given["sizes"])})
        if job.engine != "nanovllm":
            emit(job.part, ABOUT, {f"{job.engine} version": importlib.metadata.version(job.engine)})
        run(job, emit)


def job_file(job: Job, pipe: int) -> str:
    return json.dumps(dataclasses.asdict(job) | {"pipe": pipe})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", help="file of a `Job` in JSON")
    main(parser.parse_args().job)
