"""Measurement of a setting: a new engine process replays a share of the workload at each arrival rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.tools.bench.processes import EngineSpec, Settings, run_in_subprocess
from nanovllm.tools.tune.halving import MeasurementError
from nanovllm.tools.tune.journal import Journal
from nanovllm.tools.tune.ranking import Run
from nanovllm.tools.tune.settings import Setting
from nanovllm.tools.tune.shares import take_share
from nanovllm.tools.workloads.files import write_trace
from nanovllm.tools.workloads.workloads import Workload

Progress = Callable[[Setting, float, "list[Run] | None"], None]


@dataclass(frozen=True, slots=True)
class Measurer:
    """Measures settings that the journal lacks.

    workloads: workload by arrival rate; the rate is None for the workload's own arrivals.
    fixed: engine options common to all settings.
    folder: temporary files of the sweep.
    progress: callback with each measurement, also from the journal; None for a failed one.
    """

    workloads: dict[float | None, Workload]
    fixed: dict[str, Any]
    settings: Settings
    journal: Journal
    folder: Path
    progress: Progress

    def __call__(self, setting: Setting, share: float, repeat: int) -> list[Run]:
        try:
            runs = self.journal.find(setting, share, list(self.workloads), repeat)
            if runs is None:
                runs = self._measure(setting, share, repeat)
        except MeasurementError:
            self.progress(setting, share, None)
            raise
        self.progress(setting, share, runs)
        return runs

    def _measure(self, setting: Setting, share: float, repeat: int) -> list[Run]:
        spec = EngineSpec("nanovllm", "nanovllm", self.fixed | setting.options)
        record = partial(self.journal.add, setting, share, list(self.workloads), repeat)
        try:
            results = run_in_subprocess(spec, list(self._traces(share)), self.settings, self.folder)
        except RuntimeError as error:
            reason = str(error).removeprefix("nanovllm: ")
            record(failed=reason)
            raise MeasurementError(reason) from error
        runs = [{"rate": rate} | result for rate, result in zip(self.workloads, results, strict=True)]
        record(runs=runs)
        return runs

    def _traces(self, share: float) -> Sequence[Path]:
        """Return trace files of the workload's share, one per rate."""
        paths = []
        for rate, workload in self.workloads.items():
            path = self.folder / f"{rate}-{share}.jsonl"
            if not path.exists():
                write_trace(take_share(workload, share), path)
            paths.append(path)
        return paths
