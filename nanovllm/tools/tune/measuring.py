"""Measures a setting: an engine in a fresh process plays a share of the workload, at each rate of arrival in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.tools.bench.processes import EngineSpec, Settings, run_apart
from nanovllm.tools.tune.halving import MeasurementError
from nanovllm.tools.tune.journal import Journal
from nanovllm.tools.tune.ranking import Run
from nanovllm.tools.tune.settings import Setting
from nanovllm.tools.tune.shares import share_of
from nanovllm.tools.workloads.files import write_trace
from nanovllm.tools.workloads.workloads import Workload

Progress = Callable[[Setting, float, "list[Run] | None"], None]


@dataclass(frozen=True, slots=True)
class Measurer:
    """Measures what the journal does not have yet.

    workloads: by rate; the rate is None if requests have arrivals of their own.
    fixed: engine options that all settings have.
    folder: for files that live as long as the sweep.
    progress: told of each measurement, those of the journal included; None for one that failed.
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
        note = partial(self.journal.add, setting, share, list(self.workloads), repeat)
        try:
            plays = run_apart(spec, list(self._traces(share)), self.settings, self.folder)
        except RuntimeError as error:
            reason = str(error).removeprefix("nanovllm: ")
            note(failed=reason)
            raise MeasurementError(reason) from error
        runs = [{"rate": rate} | play for rate, play in zip(self.workloads, plays, strict=True)]
        note(runs=runs)
        return runs

    def _traces(self, share: float) -> Sequence[Path]:
        """Files of the workload's share, one for each rate."""
        paths = []
        for number, workload in enumerate(self.workloads.values()):
            path = self.folder / f"{number}-{share}.jsonl"
            if not path.exists():
                write_trace(share_of(workload, share), path)
            paths.append(path)
        return paths
