"""Calibration run: measures an engine's steps on this machine and fits a cost model to them.

A scenario is a set of requests that produces chunks, decodes or both. All scenarios run in turn, several times, each
with an empty prefix cache. The k-th step of a scenario has the same work in every round, and its median time counts,
so a disturbance matters only if it hits the same step in most rounds.
"""

from __future__ import annotations

import logging
import os
import platform
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

import nanovllm
from nanovllm.batch import ScheduledBatch
from nanovllm.build import build_engine
from nanovllm.defaults import LoadedModel
from nanovllm.engine import Engine
from nanovllm.fast.host.memory import take_memory
from nanovllm.features.costs.buckets import RowSizes
from nanovllm.features.costs.cost_model import CostModel, StepWork
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_pools import CacheGroup
from nanovllm.features.refusals import check_one_process
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.observability.step_records import Observer, StepRecord
from nanovllm.tools.simulate.calibration import Calibration
from nanovllm.tools.simulate.cost_fit import StepSample, fit

logger = logging.getLogger("nanovllm")

# Maximum number of tokens in a scenario; keeps it within seconds.
MAX_SCENARIO_TOKENS = {"cpu": 16_384, "cuda": 524_288}
NUM_DECODES = 6  # steps of a scenario with all its requests decoding
MIN_WAIT = 1e-4  # seconds of waiting for tokens, above which the device, not the host, limits the pace


class Group(NamedTuple):
    """Equal requests of a scenario, added after `after_steps` steps, with a common prefix of `num_shared_tokens`."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    after_steps: int = 0
    num_shared_tokens: int = 0


Scenario = tuple[Group, ...]


class _StepLog(Observer):
    """Collects the record and batch of every step."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepRecord, ScheduledBatch]] = []

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        self.steps.append((record, batch))


def calibrate(
    model: str | os.PathLike[str] | nn.Module,
    *,
    tokenizer: Any = None,
    repeats: int = 3,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Calibration:
    """Measure an engine and return its calibration; takes a minute or two on a CPU.

    Args:
        repeats: rounds over all scenarios.
        clock: time in seconds.
        options: engine options as for `LLM`, except `overlap`: steps are measured without it.

    On a GPU the decodes then run once more with overlap.

    Raises ValueError for options that cannot be measured, and the errors of `LLM`.
    """
    check_one_process("nanovllm calibrate", options)
    if options.pop("overlap", None):
        raise ValueError(
            "steps are measured one by one, without overlap; leave overlap out and set it in the simulation."
        )
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; it must be at least 1.")
    log = _StepLog()
    engine = build_engine(model, tokenizer, None, options | {"overlap": False}, clock=clock)
    try:
        engine.observers.append(log)
        plan = scenarios(engine.config)
        _prepare(engine, plan)
        rounds, intakes = _measure(engine, log, plan, repeats)
        samples = list(_medians(rounds))
        launch_blocks = _launch_blocks(engine)
        head_start = 0.0 if launch_blocks else _measure_head_start(engine, log, plan, samples)
        cost_model = fit(samples, intakes, launch_blocks=launch_blocks, head_start=head_start)
        name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else type(model).__name__
        return _describe(engine, name, samples, cost_model)
    finally:
        engine.close()


def _prepare(engine: Engine, plan: list[Scenario]) -> None:
    """Warm up, and on a GPU capture the CUDA graphs of an idle server, the scenarios' shapes first.

    A step without a graph of its shape runs as a larger one, and its time would be too long for its work.
    """
    take_memory(engine.model_runner.binding.caches)
    for scenario in plan[:1] if _launch_blocks(engine) else plan:
        _run(engine, scenario, seed=0)
    while engine.model_runner.capture_ahead():
        pass


def _measure(
    engine: Engine, log: _StepLog, plan: list[Scenario], repeats: int
) -> tuple[list[list[StepSample]], list[tuple[int, float]]]:
    """Run all scenarios; returns samples per round, and (prompt tokens, seconds) per request."""
    rounds: list[list[StepSample]] = []
    intakes: list[tuple[int, float]] = []
    for number in range(1, repeats + 1):
        logger.info("round %d of %d: %d scenarios", number, repeats, len(plan))
        samples: list[StepSample] = []
        for scenario in plan:
            log.steps.clear()
            intakes += _run(engine, scenario, seed=number)
            records = [record for record, _ in log.steps]
            samples += _samples(records, _works(engine, log), launch_blocks=_launch_blocks(engine))
        rounds.append(samples)
    return rounds, intakes


def _measure_head_start(engine: Engine, log: _StepLog, plan: list[Scenario], samples: list[StepSample]) -> float:
    """Run the decodes once more with overlap; returns the measured `CostModel.head_start`."""
    device_times = {sample.work: sample.device_time for sample in samples}
    found: list[float] = []
    config, engine.config = engine.config, replace(engine.config, overlap=True)
    try:
        for scenario in plan:
            if any(group.num_output_tokens <= NUM_DECODES for group in scenario):
                continue
            log.steps.clear()
            _run(engine, scenario, seed=0)
            found += head_starts([record for record, _ in log.steps], _works(engine, log), device_times)
    finally:
        engine.config = config
    return max(0.0, median(found)) if found else 0.0


def head_starts(
    records: list[StepRecord], works: list[StepWork], device_times: Mapping[StepWork, float]
) -> Iterator[float]:
    """Yield the interval between two reads - the device time of the same step without overlap, in seconds.

    Only for decodes that waited for the device, after a step that did too.

    Args:
        device_times: device times of steps without overlap, from the end of their launch.
    """
    for (before, record), work in zip(pairwise(records), works[1:], strict=True):
        if min(r.execute_time - r.launch_time for r in (before, record)) < MIN_WAIT or work.num_chunks:
            continue
        if work in device_times:
            yield (record.time - record.update_time) - (before.time - before.update_time) - device_times[work]


def _works(engine: Engine, log: _StepLog) -> list[StepWork]:
    sizes = RowSizes.from_config(engine.config)
    groups = groups_of(engine)
    return [StepWork.from_batch(batch, engine.config.block_size, sizes, groups) for _, batch in log.steps]


def _launch_blocks(engine: Engine) -> bool:
    return engine.model_runner.device.type == "cpu"


def scenarios(config: EngineConfig) -> list[Scenario]:
    """Return the scenarios that fit the engine's limits; equal limits give equal scenarios."""
    room = min(MAX_SCENARIO_TOKENS[config.device.partition(":")[0]], (config.num_kv_blocks - 1) * config.block_size)
    counts = sorted({*(2**power for power in range(config.max_num_seqs.bit_length())), config.max_num_seqs})

    def decoded(count: int, length: int) -> Group:
        """Requests long enough that all of them decode together, although decodes reduce the budget for prefills."""
        free = max(1, config.max_num_batched_tokens - count)
        block_size = config.block_size
        if length > block_size:  # chunks end with a block
            free = max(block_size, free // block_size * block_size)
        outputs = min(NUM_DECODES - (-count * length // free), config.max_model_len - length)
        return Group(count, length, max(NUM_DECODES + 1, outputs))

    decodes: list[Scenario] = [(decoded(count, length),) for length in (16, 256, 1024) for count in counts]
    prompts: list[Scenario] = [(Group(1, 2**power, 1),) for power in range(3, 13)]
    prompts += [(Group(count, length, 1),) for count, length in ((4, 16), (16, 16), (64, 16), (8, 64), (4, 256))]
    decodes += [
        (Group(count, shared + 16, NUM_DECODES + 1, num_shared_tokens=shared),)
        for count in (4, 16, 48)
        for shared in (512, 1024)
    ]
    mixed: list[Scenario] = [
        (Group(count, 64, NUM_DECODES + 1), Group(1, length, 2, after_steps=3))
        for count in (4, 16, 48, 192)
        for length in (64, 256, 1024)
    ]

    def fits(scenario: Scenario) -> bool:
        longest = max(group.num_prompt_tokens + group.num_output_tokens for group in scenario)
        total = sum(
            group.num_requests * -(-(group.num_prompt_tokens + group.num_output_tokens) // config.block_size)
            for group in scenario
        )
        num_seqs = sum(group.num_requests for group in scenario)
        is_small = total * config.block_size <= room and num_seqs <= config.max_num_seqs
        return is_small and longest <= config.max_model_len

    return [scenario for scenario in prompts + decodes + mixed if fits(scenario)]


def _run(engine: Engine, scenario: Scenario, *, seed: int) -> list[tuple[int, float]]:
    """Run a scenario; returns prompt length and seconds of `Engine.add` for each request."""
    intakes = []
    r = random.Random(seed)
    vocab_size = engine.model_runner.binding.model.get_input_embeddings().num_embeddings
    engine.reset_prefix_cache()
    groups = sorted(scenario, key=lambda group: group.after_steps)
    num_added = num_steps = 0
    while groups or engine.has_unfinished:
        while groups and (groups[0].after_steps <= num_steps or not engine.has_unfinished):
            group = groups.pop(0)
            params = SamplingParams(temperature=0.0, max_tokens=group.num_output_tokens, ignore_eos=True)
            shared = r.choices(range(vocab_size), k=group.num_shared_tokens)
            for _ in range(group.num_requests):
                prompt = shared + r.choices(range(vocab_size), k=group.num_prompt_tokens - len(shared))
                begin = engine.clock()
                engine.add(engine.input_processor.process_one(f"calibration-{num_added}", prompt, params))
                intakes.append((len(prompt), engine.clock() - begin))
                num_added += 1
        engine.step()
        num_steps += 1
    for output in engine.outputs:
        if output.error:
            raise RuntimeError(output.error)
    engine.outputs.clear()
    return intakes


def _samples(records: list[StepRecord], works: list[StepWork], *, launch_blocks: bool) -> Iterator[StepSample]:
    """Yield the samples of one run; time between two steps without new prompts counts as update of the first."""
    for record, following, work in zip(records, [*records[1:], None], works, strict=True):
        update_time = record.update_time
        if following is not None and following.num_prefill_tokens == 0:
            in_step = following.schedule_time + following.execute_time + following.update_time
            update_time += max(0.0, following.time - record.time - in_step)
        launch_time = 0.0 if launch_blocks else record.launch_time
        yield StepSample(work, record.schedule_time, launch_time, record.execute_time - launch_time, update_time)


def _medians(rounds: list[list[StepSample]]) -> Iterator[StepSample]:
    for samples in zip(*rounds, strict=True):
        if len({sample.work for sample in samples}) != 1:
            raise RuntimeError(f"steps of one scenario differ in work between rounds: {samples}")
        times = zip(*(sample[1:] for sample in samples), strict=True)
        yield StepSample(samples[0].work, *map(median, times))


def residuals(samples: Iterable[StepSample], cost_model: CostModel) -> dict[str, float]:
    """Return median, p90 and maximum of the device time's errors, relative to each step's execution time."""
    known = [s for s in samples if s.execute_time > 0.0]
    errors = sorted(abs(cost_model.device.seconds(s.work) - s.device_time) / s.execute_time for s in known)
    return {"median": median(errors), "p90": errors[int(0.9 * (len(errors) - 1))], "max": errors[-1]}


def _describe(engine: Engine, model: str, samples: list[StepSample], cost_model: CostModel) -> Calibration:
    config = engine.config
    runner = engine.model_runner
    device = runner.device.type
    loaded = LoadedModel(runner.binding.model, None, is_live=runner.binding.is_live, identity=model)
    hardware: dict[str, Any] = {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }
    if device == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name(runner.device)
    return Calibration(
        model=model,
        dtype=str(runner.binding.dtype).removeprefix("torch."),
        device=device,
        attention_backend=runner.config.attention_backend,
        enforce_eager=config.enforce_eager,
        cuda_graphs=config.cuda_graphs,
        block_size=config.block_size,
        max_position_embeddings=loaded.max_position_embeddings,
        kv_token_bytes=runner.binding.caches.num_bytes(1),
        kv_cache_bytes=runner.pools.num_bytes,
        hardware=hardware,
        versions={
            "nanovllm": nanovllm.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        num_samples=len(samples),
        residuals=residuals(samples, cost_model),
        cost_model=cost_model,
        tensor_parallel_size=config.tensor_parallel_size,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        cache_groups=tuple(_numbers(group, config.block_size) for group in groups_of(engine)),
    )


def groups_of(engine: Engine) -> tuple[CacheGroup, ...]:
    """Cache groups of the engine's model; none for full attention only."""
    pools = engine.model_runner.pools
    return () if pools.is_one_full else pools.groups


def _numbers(group: CacheGroup, block_size: int) -> tuple[int | None, ...]:
    """A group as `Calibration.cache_groups` has it."""
    if group.kind.record_bytes is not None:
        return None, None, 0, group.kind.record_bytes
    return *group.kind.spans, group.block_bytes // block_size


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
