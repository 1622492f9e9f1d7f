"""Forecasts: simulates many settings, so that only the best need measuring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.features.engine_config import EngineConfig
from nanovllm.tools.simulate.calibration import Calibration
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.tools.simulate.utilisation import seconds_at_once
from nanovllm.tools.tune.goals import Goal
from nanovllm.tools.tune.ranking import Run, SettingSummary, best_rivals, ranked, summarise
from nanovllm.tools.tune.settings import Setting
from nanovllm.tools.workloads.workloads import Workload

MOST_SIMULATED = 256
DIGITS = 4  # settings with forecasts equal to this many digits share one measurement


@dataclass(slots=True)
class Forecast:
    """Predicted runs of each setting, one per rate, and refused settings with the reason."""

    runs: dict[Setting, list[Run]] = field(default_factory=dict)
    refused: dict[Setting, str] = field(default_factory=dict)

    def best(self, count: int, goals: Sequence[Goal], first: Setting) -> list[Setting]:
        """Return `first` and the best other settings by forecast; of equal forecasts the one closest to `first`."""
        by_likeness = sorted(self.runs, key=lambda setting: _distance(setting, first))
        order = ranked(summarise(setting, [self.runs[setting]], goals) for setting in by_likeness)
        distinct = {_rounded(summary): summary.setting for summary in reversed(order)}
        rest = [summary.setting for summary in order if distinct[_rounded(summary)] == summary.setting != first]
        return [first, *best_rivals(rest, count - 1)]


def forecast(
    calibration: Calibration,
    settings: Iterable[Setting],
    workloads: dict[float | None, Workload],
    fixed: dict[str, Any],
    *,
    model: str,
    after_each: Callable[[], None] = lambda: None,
) -> Forecast:
    """Simulate every setting on the whole workload at each rate.

    Raises ValueError if the calibration is of another model, device or attention backend.
    """
    calibration.resolve(EngineConfig(**fixed), model=model)
    made = Forecast()
    for setting in settings:
        try:
            config = calibration.resolve(EngineConfig(**(fixed | setting.options)), model=model)
            hurried = seconds_at_once(next(iter(workloads.values())), config, calibration)
            made.runs[setting] = [
                {"rate": rate} | _figures(workload, config, calibration, hurried)
                for rate, workload in workloads.items()
            ]
        except ValueError as error:
            made.refused[setting] = str(error)
        after_each()
    return made


def _figures(workload: Workload, config: EngineConfig, calibration: Calibration, hurried: float) -> Run:
    simulation = simulate(workload, config, calibration.cost_model, pools=calibration.pools(config))
    seconds = max(metrics.finished_time or 0.0 for metrics in simulation.requests)  # a replay also counts from time 0
    return simulation.figures() | {
        "seconds": seconds,
        "output_tokens_per_second": workload.num_output_tokens / seconds,
        "utilisation": min(1.0, hurried / seconds) if workload.is_timed else None,
    }


def _distance(setting: Setting, other: Setting) -> int:
    differences = sum(a != b for a, b in zip(setting.values, other.values, strict=True))
    return differences + (setting.itl_goal != other.itl_goal)


def _rounded(summary: SettingSummary) -> tuple[str, ...]:
    latencies = [point[time] for point in summary.points for time in ("ttft", "itl") if point[time]]
    numbers = [point["output_tokens_per_second"] for point in summary.points]
    numbers += [latency["p99"] for latency in latencies]
    return tuple(f"{number:.{DIGITS}g}" for number in numbers)
