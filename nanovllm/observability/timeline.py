"""Timeline of a run: reads and summarises a trace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.observability.trace_writer import ENGINE, REQUESTS, STATES

# Values of a step for page and plot, in this order: arguments of its slice in the trace.
STEP_VALUES = (
    "step", "decode", "prefill", "cached", "budget", "sequences", "running", "waiting", "used_blocks", "blocks",
    "schedule_us", "execute_us", "update_us", "goal_us", "predicted_us",
)  # fmt: skip


@dataclass
class Lane:
    """One sample of a request; spans are (index into STATES, start, end, arguments of the trace event)."""

    name: str
    spans: list[tuple[int, int, int, dict[str, Any]]] = field(default_factory=list)


@dataclass
class Run:
    """A trace, in microseconds since its first event.

    steps: (start, end, *STEP_VALUES) of each.
    groups: further words about a step, by its number: used blocks of each of several cache groups, drafts.
    """

    lanes: list[Lane]
    steps: list[tuple[int, ...]]
    end: int
    is_cut_short: bool  # the trace lacks its end: open spans extend to its last event
    groups: dict[int, str] = field(default_factory=dict)
    num_drafts: int = 0
    num_accepted: int = 0


def read_trace(path: str | os.PathLike[str]) -> Run:
    """Read a file of `TraceWriter`, complete or cut short; raises ValueError for any other file."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    is_cut_short = not text.rstrip().endswith("]")
    lanes: dict[int, Lane] = {}
    begun: dict[int, tuple[int, int, dict[str, Any]]] = {}  # (state, start, arguments) by lane
    steps: list[tuple[int, ...]] = []
    groups: dict[int, str] = {}
    last = num_drafts = num_accepted = 0
    for event in _events(text, path):
        number = event.get("tid", 0)
        phase = event["ph"]
        time = event.get("ts", 0)
        last = max(last, time + event.get("dur", 0))
        if event["pid"] == ENGINE and phase == "X" and event["name"] == "step":
            steps.append((time, time + event["dur"], *[event["args"].get(name, 0) for name in STEP_VALUES]))
        elif event["pid"] == ENGINE and phase == "i" and event["name"] == "groups":
            groups[event["args"]["step"]] = event["args"]["words"]
        elif event["pid"] == ENGINE and phase == "C" and event["name"] == "drafts":
            num_drafts += event["args"]["computed"]
            num_accepted += event["args"]["accepted"]
        elif event["pid"] == REQUESTS and phase == "M" and event["name"] == "thread_name":
            lanes[number] = Lane(event["args"]["name"])
        elif phase == "B":
            begun[number] = (STATES.index(event["name"]), time, event["args"])
        elif phase == "E" and number in begun:
            state, start, arguments = begun.pop(number)
            lanes[number].spans.append((state, start, time, arguments | event["args"]))
    for number, (state, start, arguments) in begun.items():
        lanes[number].spans.append((state, start, max(start, last), arguments))
    if not steps:
        raise ValueError(f"{os.fspath(path)!r} holds no step; record a run with --trace.")
    return _from_zero(Run(list(lanes.values()), steps, last, is_cut_short, groups, num_drafts, num_accepted))


def _events(text: str, path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace, one a line; an incomplete last line is skipped."""
    lines = text.splitlines()
    if not lines or lines[0].strip() != "[":
        raise ValueError(f"{os.fspath(path)!r} is not a trace of nanovllm; record one with --trace.")
    for number, line in enumerate(lines[1:], 2):
        content = line.strip().removesuffix(",")
        if content in ("", "]"):
            continue
        try:
            yield json.loads(content)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return  # the line at which the file was cut
            raise ValueError(f"line {number} of {os.fspath(path)!r} is not a trace event: {error}") from error


def _from_zero(run: Run) -> Run:
    zero = min([step[0] for step in run.steps] + [lane.spans[0][1] for lane in run.lanes if lane.spans])
    for lane in run.lanes:
        lane.spans = [(state, start - zero, end - zero, arguments) for state, start, end, arguments in lane.spans]
    run.steps = [(start - zero, end - zero, *values) for start, end, *values in run.steps]
    run.end -= zero
    return run


def summary(run: Run) -> str:
    """Summarise the run in one line."""
    columns = dict(zip(STEP_VALUES, zip(*[step[2:] for step in run.steps], strict=True), strict=True))
    preempted = sum(span[0] == STATES.index("preempted") for lane in run.lanes for span in lane.spans)
    prefill, decode, cached = (sum(columns[name]) for name in ("prefill", "decode", "cached"))
    parts = [
        f"{len(run.lanes):,} sequences, {len(run.steps):,} steps, {run.end / 1e6:,.3f} s",
        f"{prefill:,} prefill, {decode:,} decode, {cached:,} cached tokens",
        f"{100 * (prefill + decode) / sum(columns['budget']):.1f} % of the budget of {max(columns['budget']):,} used",
        f"at most {max(columns['used_blocks']):,} of {max(columns['blocks']):,} blocks",
        f"{preempted:,} preemptions",
    ]
    if run.num_drafts:
        parts.append(f"{run.num_accepted:,} of {run.num_drafts:,} drafts accepted")
    return "; ".join(parts) + ("; the trace was cut short" if run.is_cut_short else "")
