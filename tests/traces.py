"""Reads a trace as its format says, apart from the package's own reader, and checks what must hold of every trace."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

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
    """Spans by lane, lanes in order of their number; slices of steps and the values of counters in order of time."""

    names: dict[int, str] = field(default_factory=dict)
    lanes: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    slices: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    counters: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def lane(self, name: str) -> list[Span]:
        (number,) = [number for number, known in self.names.items() if known == name]
        return self.lanes[number]

    def states(self, name: str) -> list[str]:
        return [span.state for span in self.lane(name)]

    def total(self, name: str, state: str, argument: str) -> int:
        return sum(span.arguments[argument] for span in self.lane(name) if span.state == state)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [step["args"] for step in self.slices["step"]]


def read(path: Path) -> Trace:
    trace = Trace()
    open_: dict[int, dict[str, Any]] = {}
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


def check(trace: Trace) -> None:
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
    # What the lanes say adds up to what the steps say, as far as no request left in the middle of a step.
    spans = [span for lane in trace.lanes.values() for span in lane]
    if all(lane[-1].arguments["reason"] in ("length", "stop") for lane in trace.lanes.values()):
        chunks = [span for span in spans if span.state == "prefill"]
        tokens = [span.arguments["tokens"] for span in spans if span.state in ("prefill", "decode")]
        assert sum(tokens) == sum(step["decode"] + step["prefill"] for step in trace.steps)
        assert sum(chunk.arguments["cached"] for chunk in chunks) == sum(step["cached"] for step in trace.steps)
