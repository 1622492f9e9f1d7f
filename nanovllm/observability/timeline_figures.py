"""Figures of a traced run: latencies and counts of each request, and their percentiles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from nanovllm.observability.percentiles import percentiles
from nanovllm.observability.timeline import STEP_VALUES, Lane, Run
from nanovllm.observability.trace_writer import STATES

_PREFILL = STATES.index("prefill")
_DECODE = STATES.index("decode")
_LATENCIES = {"ttft": "TTFT", "itl": "ITL", "queue": "queue time", "latency": "request latency", "step": "step time"}


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """Figures of one sample. Times are in microseconds, None for events that did not happen.

    arrival: time since the first event of the trace.
    queue: time from arrival to the first step.
    ttft: time from arrival to the end of the step that sampled its first token.
    itl: mean inter-token latency.
    latency: time from arrival to its end; None if it was unfinished.
    reason: finish reason; "unfinished" also if the trace was cut short.
    """

    name: str
    arrival: int
    prompt: int
    cached: int
    output: int
    queue: int | None
    ttft: int | None
    itl: float | None
    latency: int | None
    preemptions: int
    reason: str


class RunFigures:
    """Figures of a run's requests, in the order of its lanes.

    percentiles: values in microseconds by "ttft", "itl", "queue", "latency" and "step"; keys without values are absent.
    """

    def __init__(self, run: Run) -> None:
        id_place = 2 + STEP_VALUES.index("step")
        self._ends = [step[1] for step in run.steps]
        self._places = {step[id_place]: place for place, step in enumerate(run.steps)}
        gaps: list[int] = []
        self.requests = [self._read(lane, gaps) for lane in run.lanes if lane.spans]
        columns: dict[str, Iterable[float | None]] = {
            "ttft": [request.ttft for request in self.requests],
            "itl": gaps,
            "queue": [request.queue for request in self.requests],
            "latency": [request.latency for request in self.requests],
            "step": [end - start for start, end, *_ in run.steps],
        }
        found = {name: percentiles(value for value in values if value is not None) for name, values in columns.items()}
        self.percentiles = {name: values for name, values in found.items() if values is not None}

    def text(self) -> str:
        """A table of the percentiles, in milliseconds."""
        lines = [f"{'':16}" + "".join(f"{name:>15}" for name in ("mean", "p50", "p90", "p99", "max"))]
        for name, values in self.percentiles.items():
            lines.append(f"{_LATENCIES[name]:16}" + "".join(f"{value / 1e3:12,.2f} ms" for value in values.values()))
        return "\n".join(lines)

    def _read(self, lane: Lane, gaps: list[int]) -> RequestFigures:
        """Figures of a lane; its inter-token latencies are added to `gaps`."""
        _, arrival, _, first = lane.spans[0]
        _, _, end, last = lane.spans[-1]
        times = self._token_times(lane, first.get("prompt_tokens", 0))
        own = [later - earlier for earlier, later in pairwise(times)]
        gaps += own
        begin = next((start for state, start, *_ in lane.spans if state == _PREFILL), None)
        reason = last.get("reason", "unfinished")
        return RequestFigures(
            name=lane.name,
            arrival=arrival,
            prompt=first.get("prompt_tokens", 0),
            cached=last.get("prompt_cached_tokens", 0),
            output=last.get("output_tokens", len(times)),
            queue=None if begin is None else begin - arrival,
            ttft=times[0] - arrival if times else None,
            itl=sum(own) / len(own) if own else None,
            latency=None if reason == "unfinished" else end - arrival,
            preemptions=last.get("preemptions", sum(STATES[state] == "preempted" for state, *_ in lane.spans)),
            reason=reason,
        )

    def _token_times(self, lane: Lane, num_prompt_tokens: int) -> list[int]:
        """End of each step that drew a token: decodes, and last chunks of the known tokens."""
        times: list[int] = []
        for state, _, _, details in lane.spans:
            place = self._places.get(details.get("step", -1))
            if place is None:
                continue  # another state, or a step that the end of the trace cut off
            if state == _DECODE:
                times += self._ends[place : place + details.get("tokens", len(self._ends))]
            elif state == _PREFILL and details["start"] + details["tokens"] >= num_prompt_tokens + len(times):
                times.append(self._ends[place])
        return times
