"""Measurements of `nanovllm tune`: progress bar, temporary files, and handling of signals."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanovllm.cli.flags import model_source
from nanovllm.cli.tune_question import Question, with_rates
from nanovllm.tools.bench.processes import Settings
from nanovllm.tools.tune import report
from nanovllm.tools.tune.find_rate import FoundRate, find_rate
from nanovllm.tools.tune.goal_answer import RivalAtRate, rival_of
from nanovllm.tools.tune.halving import MeasurementError, Sweep, num_measurements
from nanovllm.tools.tune.journal import Journal
from nanovllm.tools.tune.measuring import Measurer
from nanovllm.tools.tune.ranking import Run, SettingSummary, worst_excess
from nanovllm.tools.tune.settings import Setting


@dataclass(slots=True)
class TuningSession:
    """Measures settings of a question, and prints each measurement.

    measurer: measures the question's workloads.
    bar: progress bar of tqdm.
    """

    measurer: Measurer
    bar: Any
    names: list[str] = field(default_factory=list)  # options in which the settings differ

    def show(self, setting: Setting, share: float, runs: list[Run] | None) -> None:
        self.bar.update()
        self.bar.write(report.line(setting, self.names, share, runs), file=sys.stderr)

    def capacity(self, setting: Setting) -> float:
        """Requests a second if all arrive at the start; raises ValueError if the setting cannot run."""
        (workload,) = list(self.measurer.workloads.values())[:1]
        try:
            (run,) = replace(self.measurer, workloads={None: workload.hurried()})(setting, 1.0, 0)
        except MeasurementError as error:
            raise ValueError(f"the capacity could not be measured: {error}") from error
        return float(len(workload.requests) / run["seconds"])

    def run(self, sweep: Sweep, question: Question) -> None:
        """Run a sweep on the question's workloads; raises KeyboardInterrupt."""
        self.measurer = replace(self.measurer, workloads=question.workloads)
        self.names[:] = question.resolver.varying(sweep.settings)
        self.bar.total = self.bar.n + num_measurements(sweep.rounds, sweep.repeats)
        sweep.run(self.measurer)
        self.bar.total = self.bar.n  # measurements that failed settings skipped no longer count

    def find_rate(self, question: Question, finalists: list[SettingSummary]) -> tuple[FoundRate, RivalAtRate | None]:
        """Find the highest rate of the best setting that keeps the goals, and try its rival near it."""

        def play(setting: Setting, rate: float) -> Run:
            workloads = with_rates(question.options, question.workload, [rate])
            (run,) = replace(self.measurer, workloads=workloads)(setting, 1.0, 0)
            return run

        self.bar.total = None
        best = finalists[0]
        try:
            found = find_rate(partial(play, best.setting), question.goals, best.points, self.capacity(best.setting))
            rival = rival_of(finalists, found)
            if rival is None:
                return found, None
            return found, RivalAtRate(*rival, worst_excess(play(*rival), question.goals) <= 0.0)
        except MeasurementError as error:
            raise ValueError(f"a rate could not be measured: {error}") from error


@contextmanager
def tuning_session(question: Question, journal: Journal) -> Iterator[TuningSession]:
    """Measure in a temporary folder; SIGTERM becomes KeyboardInterrupt, which ends the worker process too."""
    options = question.options
    settings = Settings(model_source(options.model), warm_ups=options.warm_ups, verbose=options.verbose)
    fixed = question.fixed | ({"tokenizer": options.tokenizer} if options.tokenizer else {})
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="nanovllm-tune-") as name,
            tqdm(desc="measured", unit="setting", disable=None) as bar,
        ):

            def progress(setting: Setting, share: float, runs: list[Run] | None) -> None:
                session.show(setting, share, runs)

            session = TuningSession(Measurer(question.workloads, fixed, settings, journal, Path(name), progress), bar)
            yield session
    finally:
        signal.signal(signal.SIGTERM, before)
