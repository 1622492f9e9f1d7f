"""Reader of traces, independent of the package's own; checks the invariants of a trace, and
simulates large ones."""

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.observability.step_records import StepObservers
from nanovllm.observability.trace_writer import TraceWriter
from nanovllm.responses import StepTimes
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import NewRequest, Sequence

REQUESTS = 2


@dataclass
class Span:
    """One state of a request."""

    state: str
    start: int
    end: int
    arguments: dict[str, Any]


@dataclass
class Trace:
    """Spans by lane number; steps and counter values in order of time."""

    names: dict[int, str] = field(default_factory=dict)
    lanes: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    slices: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    counters: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def lane(self, name):
        (number,) = [number for number, known in self.names.items() if known == name]
        return self.lanes[number]

    def states(self, name):
        return [span.state for span in self.lane(name)]

    def total(self, name, state, argument):
        return sum(span.arguments[argument] for span in self.lane(name) if span.state == state)

    @property
    def steps(self):
        return [step["args"] for step in self.slices["step"]]


def read(path):
    trace = Trace()
    open_ = {}
    for event in json.loads(path.read_text(encoding="utf-8")):
        if event["ph"] == "M":
            if event["name"] == "thread_name" and event["pid"] == REQUESTS:
                trace.names[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            trace.slices[event["name"]].append(event)
        elif event["ph"] == "C":
            trace.counters[event["name"]].append(event)
        elif event["ph"] == "B":
            assert event["tid"] not in open_, f"{event} begins while {open_[event['tid']]} lasts"
            open_[event["tid"]] = event
        else:
            assert event["ph"] == "E"
            begin = open_.pop(event["tid"])
            arguments = begin["args"] | event["args"]
            trace.lanes[event["tid"]].append(Span(begin["name"], begin["ts"], event["ts"], arguments))
    assert not open_, "spans without an end"
    check(trace)
    return trace


def check(trace):
    assert trace.names.keys() == trace.lanes.keys()
    for spans in trace.lanes.values():
        assert spans[0].state == "waiting"
        assert all(span.end >= span.start for span in spans)
        assert all(after.start == before.end for before, after in pairwise(spans)), spans
        assert "reason" in spans[-1].arguments
        assert not any("reason" in span.arguments for span in spans[:-1])
    for name in ("step", "schedule", "execute", "update"):
        slices = trace.slices[name]
        assert len(slices) == len(trace.slices["step"])
        ends = [event["ts"] + event["dur"] for event in slices]
        assert all(event["dur"] >= 0 for event in slices)
        assert all(event["ts"] >= end for event, end in zip(slices[1:], ends, strict=False)), name
    for step in trace.steps:
        assert 0 < step["decode"] + step["prefill"] <= step["budget"]
        assert 0 <= step["used_blocks"] <= step["blocks"]
    # Tokens of the lanes add up to those of the steps, unless a request left during a step.
    spans = [span for lane in trace.lanes.values() for span in lane]
    if all(lane[-1].arguments["reason"] in ("length", "stop") for lane in trace.lanes.values()):
        chunks = [span for span in spans if span.state == "prefill"]
        tokens = [span.arguments["tokens"] for span in spans if span.state in ("prefill", "decode")]
        assert sum(tokens) == sum(step["decode"] + step["prefill"] for step in trace.steps)
        assert sum(chunk.arguments["cached"] for chunk in chunks) == sum(step["cached"] for step in trace.steps)


def simulate(path, num_requests, *, seed=0):
    """Trace a scheduler with made-up tokens, under a load that preempts; returns the number of steps."""
    rng = random.Random(seed)
    config = EngineConfig(
        max_model_len=2048,
        max_num_batched_tokens=512,
        max_num_seqs=48,
        num_kv_blocks=260,
        max_num_partial_prefills=4,
        max_long_partial_prefills=2,
        long_prefill_token_threshold=256,
    )
    scheduler = Scheduler(config, BlockManager(config.num_kv_blocks, 64))
    shared, now, next_arrival, num_added = [7] * 256, 0.0, 0.0, 0
    with TraceWriter(path) as trace:
        trace.begin(config)
        observers = StepObservers([trace])
        while num_added < num_requests or scheduler.waiting or scheduler.running:
            while num_added < num_requests and (next_arrival <= now or not (scheduler.waiting or scheduler.running)):
                prompt = shared * (rng.random() < 0.3) + [rng.randrange(50_000) for _ in range(rng.randrange(20, 700))]
                params = SamplingParams(max_tokens=rng.randrange(50, 600), ignore_eos=True)
                sequence = Sequence(
                    NewRequest(f"request-{num_added}", prompt, params, arrival_time=now),
                    arrival=num_added,
                    max_model_len=2048,
                )
                scheduler.add(sequence)
                observers.notify("request_added", [sequence])
                num_added += 1
                next_arrival = now + rng.expovariate(40)
            start = now
            batch = scheduler.schedule()
            assert batch is not None
            execute = 0.004 + 2e-5 * batch.num_tokens
            now += 2e-4 + execute
            advanced = scheduler.update(batch, [7] * len(batch.sampling))
            now += 1e-4
            times = StepTimes(start, 2e-4, 0.0, execute, now - 1e-4, now - 5e-5)
            observers.step_ended(scheduler, batch, times, now, advanced)
            now += 3e-5
    return scheduler.stats.num_steps
