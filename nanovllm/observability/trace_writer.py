"""Trace writer: records a run in the format of ui.perfetto.dev, chrome://tracing and `nanovllm timeline`.

The file is a JSON array of events, one a line. Memory holds only the state of unfinished requests and the events since
the last flush. A file that was cut short lacks the end of the array, which these readers accept.

Each sample of a request is a lane, always in one state; a state lasts until the next one begins::

    waiting ──▶ prefill (one for each chunk) ──▶ decode (all tokens in a row) ──▶ ended
                   ▲      │       ▲                 │
                   │      └─▶ stalled ◀─────────────┤      running, but not scheduled for lack of budget or blocks
                   └───────── preempted ◀───────────┘      blocks freed, recomputed later

With overlap a step is launched before the previous one is read. The device still runs them one after another, so a
step's slice starts when the previous step was read.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.batch import ScheduledBatch
from nanovllm.features.engine_config import EngineConfig
from nanovllm.observability.decisions import Decision
from nanovllm.observability.step_records import Observer, StepRecord
from nanovllm.sequence import Sequence

WAITING, PREFILL, DECODE, PREEMPTED, STALLED = STATES = ("waiting", "prefill", "decode", "preempted", "stalled")

# Process and thread ids of the trace, by which viewers group lanes.
ENGINE = 1
REQUESTS = 2
STEPS = 1
SCHEDULING = 2

# Small enough that no step waits long for the encoding of earlier ones.
_FLUSH_SECONDS = 0.2
_FLUSH_ITEMS = 256

# Events of a step: its slice with two nested ones, the slice of its scheduling, and counters.
_STEP = ",\n".join(
    (
        '{"name":"step","ph":"X","pid":1,"tid":1,"ts":%(begin)d,"dur":%(dur)d,"args":{"step":%(step)d,'
        '"decode":%(decode)d,"prefill":%(prefill)d,"cached":%(cached)d,"budget":%(budget)d,"sequences":%(sequences)d,'
        '"running":%(running)d,"waiting":%(waiting)d,"used_blocks":%(used)d,"blocks":%(blocks)d,'
        '"schedule_us":%(schedule)d,"execute_us":%(execute)d,"update_us":%(update)d,"goal_us":%(goal)d,'
        '"predicted_us":%(predicted)d}}',
        '{"name":"execute","ph":"X","pid":1,"tid":1,"ts":%(execute_begin)d,"dur":%(execute_dur)d}',
        '{"name":"update","ph":"X","pid":1,"tid":1,"ts":%(update_begin)d,"dur":%(update_dur)d}',
        '{"name":"schedule","ph":"X","pid":1,"tid":2,"ts":%(start)d,"dur":%(schedule)d}',
        '{"name":"tokens","ph":"C","pid":1,"ts":%(begin)d,"args":{"decode":%(decode)d,"prefill":%(prefill)d,'
        '"cached":%(cached)d}}',
        '{"name":"budget","ph":"C","pid":1,"ts":%(begin)d,"args":{"used %%":%(percent)d}}',
        '{"name":"blocks","ph":"C","pid":1,"ts":%(end)d,"args":{"used":%(used)d,"free":%(free)d}}',
        '{"name":"requests","ph":"C","pid":1,"ts":%(end)d,"args":{"running":%(running)d,"waiting":%(waiting)d}}',
        '{"name":"host µs","ph":"C","pid":1,"ts":%(end)d,"args":{"schedule":%(schedule)d,"execute":%(execute)d,'
        '"update":%(update)d}}',
    )
)


@dataclass(slots=True)
class _Lane:
    """State of a sequence as last written."""

    number: int
    state: str
    num_steps_before: int = 0  # steps recorded when the state began
    num_preemptions: int = 0


# Events of a request, and steps with their begin; encoded in batches when flushed.
_Events = list[dict[str, Any]]
_Step = tuple[StepRecord, float]


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def details_of(record: StepRecord) -> str:
    """Words for a viewer of the step: blocks of each cache group, drafts; mostly empty."""
    words = [record.group_usage] if len(record.cache_groups) > 1 else []
    if record.num_draft_tokens:
        words.append(f"{record.num_accepted_tokens} of {record.num_draft_tokens} drafts accepted")
    return ", ".join(words)


class TraceWriter(Observer):
    """Traces the run of one engine: `with TraceWriter("out.json") as trace, LLM(model, trace=trace) as llm: ...`.

    Args:
        path: output file; an existing one is overwritten.

    Raises OSError if the file cannot be written. While the engine runs, such an error ends the trace, not the requests
    (`EngineStats.hook_error`), and `close` raises it. docs/guide/tracing.md describes the contents.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = self.path.open("wb", buffering=0)
        self._process_id = os.getpid()
        self._lock = threading.Lock()  # `close` may be called in another thread than the engine's
        self._items: list[_Events | _Step] = []  # not yet written
        self._is_begun = False  # True once the first event is written
        self._budget = self._num_blocks = self._goal = 0  # values of the traced engine; the goal in microseconds
        self._lanes: dict[Sequence, _Lane] = {}  # lanes of unfinished sequences
        self._num_lanes = self._num_steps = 0
        self._decoding: list[Sequence] = []  # the decodes of the last step
        self._active: set[Sequence] = set()  # sequences scheduled or stalled in the last step
        self._has_chunks = False  # True if the last step had a chunk or a stalled sequence
        self._now = self._last_end = self._last_flush = 0.0
        for process, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
            self._write({"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}})
        for thread, name in ((STEPS, "steps"), (SCHEDULING, "scheduling")):
            self._write({"name": "thread_name", "ph": "M", "pid": ENGINE, "tid": thread, "args": {"name": name}})
        self._flush()

    def check_unused(self) -> None:
        """Raise ValueError if the writer traces another engine or is closed."""
        if self._budget or self._file.closed:
            raise ValueError(
                f"the trace {str(self.path)!r} belongs to another engine or is closed; open another TraceWriter."
            )

    def begin(self, config: EngineConfig) -> None:
        """Start tracing an engine of this configuration."""
        self._budget = config.max_num_batched_tokens
        self._num_blocks = config.num_kv_blocks - 1
        self._goal = _microseconds(config.itl_goal or 0.0)

    def request_added(self, sequences: list[Sequence]) -> None:
        with self._lock:
            if not self._file.closed:
                for sequence in sequences:
                    self._add(sequence)

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        with self._lock:
            if self._file.closed:
                return
            self._step(record, batch)
            if self._now - self._last_flush > _FLUSH_SECONDS or len(self._items) > _FLUSH_ITEMS:
                self._last_flush = self._now
                self._flush()

    def prefix_decided(self, decision: Decision) -> None:
        with self._lock:
            if not self._file.closed:
                event = {"name": "prefix", "ph": "i", "s": "p", "pid": ENGINE, "ts": _microseconds(self._now)}
                self._write(event | {"args": decision._asdict()})

    def request_ended(self, sequence: Sequence, time: float) -> None:
        with self._lock:
            if not self._file.closed:
                self._end(sequence, time)

    def __str__(self) -> str:
        return f"the trace {str(self.path)!r}"

    def close(self) -> None:
        """End open spans and close the file; idempotent, and a no-op in a forked child, which shares the file."""
        if os.getpid() != self._process_id:  # a forked child
            return
        with self._lock:
            if self._file.closed:
                return
            with self._file:
                for sequence in list(self._lanes):
                    self._end(sequence, self._now)
                self._flush()
                self._write_all(b"\n]\n")

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------------------------------------------- requests

    def _add(self, sequence: Sequence) -> _Lane:
        self._num_lanes += 1
        number = self._num_lanes
        lane = _Lane(number, WAITING)
        self._now = max(self._now, sequence.arrival_time)
        name = f"{sequence.request_id} [{sequence.index}]" if sequence.params.n > 1 else sequence.request_id
        common = {"ph": "M", "pid": REQUESTS, "tid": number}
        arguments: dict[str, Any] = {"prompt_tokens": sequence.num_prompt_tokens, "priority": sequence.priority}
        if sequence.client:
            arguments["client"] = sequence.client
        self._write(
            {"name": "thread_name", "args": {"name": name}} | common,
            {"name": "thread_sort_index", "args": {"sort_index": number}} | common,
            _begin(lane, WAITING, sequence.arrival_time, arguments),
        )
        self._lanes[sequence] = lane
        return lane

    def _end(self, sequence: Sequence, time: float) -> None:
        lane = self._lanes.pop(sequence)
        self._now = max(self._now, time)
        arguments = {
            "reason": sequence.finish_reason or "unfinished",
            "output_tokens": sequence.num_output_tokens,
            "prompt_cached_tokens": sequence.num_cached_tokens,
            "preemptions": sequence.num_preemptions,
        }
        self._write(self._leave(lane, time, arguments))

    def _enter(self, lane: _Lane, state: str, time: float, arguments: dict[str, Any]) -> None:
        """End the lane's state and begin the next."""
        self._write(self._leave(lane, time, {}), _begin(lane, state, time, arguments))
        lane.state = state
        lane.num_steps_before = self._num_steps

    def _leave(self, lane: _Lane, time: float, arguments: dict[str, Any]) -> dict[str, Any]:
        if lane.state is DECODE:
            arguments = {"tokens": self._num_steps - lane.num_steps_before} | arguments
        return {"ph": "E", "pid": REQUESTS, "tid": lane.number, "ts": _microseconds(time), "args": arguments}

    # ----------------------------------------------------------------------------------------------------- steps

    def _step(self, record: StepRecord, batch: ScheduledBatch) -> None:
        begin = max(record.start_time, self._last_end)
        decoding = [entry[0] for entry in batch.entries[: batch.num_decodes + len(batch.drafted)]]
        # Fast path, and most steps: the decodes of the previous step again change no state.
        if self._has_chunks or len(decoding) < len(batch.entries) or decoding != self._decoding:
            self._change_states(begin, record.step_id, batch)
        self._decoding = decoding
        self._num_steps += 1
        for entry in batch.drafted:
            if (lane := self._lanes.get(entry.sequence)) is not None:
                # Each accepted draft is one token more than the number of steps.
                lane.num_steps_before -= entry.sequence.drafting.num_accepted
        self._now = self._last_end = record.time
        self._items.append((record, begin))

    def _change_states(self, begin: float, step_id: int, batch: ScheduledBatch) -> None:
        lanes = self._lanes
        placed = {entry.sequence for entry in batch.entries}
        stalled = set()
        for sequence in self._active - placed:
            lane = lanes.get(sequence)
            if lane is None:
                continue
            state = STALLED if sequence.is_running else WAITING
            if state is WAITING and sequence.num_preemptions > lane.num_preemptions:
                lane.num_preemptions = sequence.num_preemptions
                state = PREEMPTED
            if state is STALLED:
                stalled.add(sequence)
            if state is not lane.state:
                self._enter(lane, state, begin, {})
        has_chunks = bool(stalled)
        num_decoding = batch.num_decodes + len(batch.drafted)
        for number, (sequence, start, num_tokens, _, _, before, _) in enumerate(batch.entries):
            lane = lanes.get(sequence)  # None for a sequence that ended while this step was in flight
            if lane is None or (number < num_decoding and lane.state is DECODE):
                continue
            if number < num_decoding and start >= sequence.num_prompt_tokens:
                self._enter(lane, DECODE, begin, {"step": step_id})
            else:  # includes a single last prompt token after earlier chunks
                num_cached = start - before if num_tokens else 0  # forks find nothing
                chunk = {"step": step_id, "start": start, "tokens": num_tokens, "cached": num_cached}
                self._enter(lane, PREFILL, begin, chunk)
                has_chunks = True
        self._active = placed | stalled
        self._has_chunks = has_chunks

    def _step_lines(self, record: StepRecord, begin: float) -> str:
        num_blocks = self._num_blocks
        budget = record.budget or self._budget
        times = (begin, record.time, record.start_time, max(begin, record.start_time + record.schedule_time))
        begin_us, end, start, execute_begin = map(_microseconds, times)
        update_begin = max(execute_begin, _microseconds(record.time - record.update_time))
        num_tokens = record.num_decode_tokens + record.num_prefill_tokens
        values = {
            "begin": begin_us,
            "dur": end - begin_us,
            "end": end,
            "start": start,
            "step": record.step_id,
            "decode": record.num_decode_tokens,
            "prefill": record.num_prefill_tokens,
            "cached": record.num_cached_tokens,
            "budget": budget,
            "percent": 100 * num_tokens // budget,
            "sequences": record.num_sequences,
            "running": record.num_running,
            "waiting": record.num_waiting,
            "used": record.num_used_blocks,
            "free": num_blocks - record.num_used_blocks,
            "blocks": num_blocks,
            "schedule": _microseconds(record.schedule_time),
            "execute": _microseconds(record.execute_time),
            "update": _microseconds(record.update_time),
            "goal": self._goal,
            "predicted": _microseconds(record.predicted_time or 0.0),
            "execute_begin": execute_begin,
            "execute_dur": update_begin - execute_begin,
            "update_begin": update_begin,
            "update_dur": end - update_begin,
        }
        lines = _STEP % values
        events: _Events = []
        if len(record.cache_groups) > 1:
            used = {group.name: group.num_used_blocks for group in record.cache_groups}
            events.append({"name": "blocks by group", "ph": "C", "pid": ENGINE, "ts": end, "args": used})
        if record.num_draft_tokens:
            drafts = {"computed": record.num_draft_tokens, "accepted": record.num_accepted_tokens}
            events.append({"name": "drafts", "ph": "C", "pid": ENGINE, "ts": begin_us, "args": drafts})
        if details := details_of(record):
            words = {"step": record.step_id, "words": details}
            events.append({"name": "groups", "ph": "i", "s": "p", "pid": ENGINE, "ts": end, "args": words})
        if events:
            lines += ",\n" + _event_lines(events)
        return lines

    # ------------------------------------------------------------------------------------------------------ file

    def _write(self, *events: dict[str, Any]) -> None:
        self._items.append([*events])

    def _flush(self) -> None:
        """Write complete events, so that the file of a killed process lacks only its end."""
        items = self._items
        self._items = []
        lines = [_event_lines(item) if isinstance(item, list) else self._step_lines(*item) for item in items]
        data = "".join([",\n" + line for line in lines]).encode()
        if not self._is_begun:
            data = b"[\n" + data[2:]
            self._is_begun = True
        self._write_all(data)

    def _write_all(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]


def _event_lines(events: _Events) -> str:
    return ",\n".join([json.dumps(event, separators=(",", ":")) for event in events])


def _begin(lane: _Lane, state: str, time: float, arguments: dict[str, Any]) -> dict[str, Any]:
    name = {"name": state, "cat": "request", "ph": "B", "pid": REQUESTS, "tid": lane.number}
    return name | {"ts": _microseconds(time), "args": arguments}
