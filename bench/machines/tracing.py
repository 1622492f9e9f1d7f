"""What a trace costs: in CPU time with steady decodes, and as a share of real steps. `python -m
bench.machines.tracing`"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams, StepRecord, TraceWriter
from nanovllm.core.batch import ScheduledBatch
from nanovllm.model.default_model import DEFAULT_MODEL
from nanovllm.observability.step_records import StepObservers, StepTimes
from tests.support.steady_decodes import decoding

STEP_SECONDS = 0.002  # of a steady decode; decides how many steps are written at once


class TimedWriter(TraceWriter):
    """Adds up the seconds that it takes of the engine's thread."""

    seconds = 0.0

    def step_ended(self, record: StepRecord, batch: ScheduledBatch) -> None:
        start = time.perf_counter()
        super().step_ended(record, batch)
        self.seconds += time.perf_counter() - start


def steady(path: Path, num_running: int, *, rounds: int = 5, num_steps: int = 1000) -> float:
    """Microseconds of CPU time a step, its record and the writing included; the fastest of several rounds."""
    scheduler, now, took = decoding(num_running), 0.0, []
    with TraceWriter(path) as trace:
        trace.begin(scheduler.config)
        observers = StepObservers([trace])
        observers.notify("request_added", [*scheduler.running])
        batch = scheduler.schedule()
        for _ in range(rounds):
            start = time.process_time()
            for _ in range(num_steps):
                now += STEP_SECONDS
                times = StepTimes(now - STEP_SECONDS, 1e-4, 0.0, STEP_SECONDS - 2e-4, now - 1e-4, now)
                observers.step_ended(scheduler, batch, times, now, [])
            took.append((time.process_time() - start) / num_steps)
    return min(took) * 1e6


def real(path: Path, model: str, num_requests: int, num_tokens: int, **options: Any) -> str:
    """How long steps of a model take, and the share of them that the trace takes."""
    records: list[StepRecord] = []
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with (
        TimedWriter(path) as trace,
        LLM(model, on_step=records.append, trace=trace, max_num_seqs=num_requests, **options) as llm,
    ):
        llm.generate([[5 + number] * 16 for number in range(num_requests)], params, use_tqdm=False)
    steps = [record.time - record.start_time for record in records]
    share = 100 * trace.seconds / (records[-1].time - records[0].start_time)  # with overlap, steps add up to more
    return f"{statistics.median(steps) * 1e3:.1f} ms a step (median), {share:.2f} % for the trace"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--random", action="store_true", help="random weights in the shape of Qwen3-0.6B, on a GPU")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=40)
    arguments = parser.parse_args()
    model, options = arguments.model, {}
    if arguments.random:
        from bench.machines.random_models import NoText, checkpoint

        model, options = str(checkpoint("0.6b")), {"dtype": "bfloat16", "tokenizer": NoText(), "max_model_len": 4096}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        for num_running in (64, 256, 1024):
            print(f"{num_running} steady decodes: {steady(path, num_running):.1f} µs of CPU time a step")
        print(f"{model}: {real(path, model, arguments.requests, arguments.tokens, **options)}")


if __name__ == "__main__":
    main()
