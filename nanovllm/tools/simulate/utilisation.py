"""Utilisation of a simulated engine, and the uncertainty of a forecast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanovllm.features.engine_config import EngineConfig
from nanovllm.tools.simulate.calibration import Calibration
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.tools.workloads.workloads import Workload

# Utilisation above which waiting times grow faster than the load, and errors of the step times with them.
MOST_PREDICTABLE = 0.8


def seconds_at_once(
    workload: Workload, config: EngineConfig, calibration: Calibration, *, num_replicas: int = 1, route: Any = None
) -> float:
    """Virtual seconds of a run with all arrivals at 0: the work of the requests."""
    cost_model = replace(calibration.cost_model, front_delay=0.0)  # a delay outside of the engine
    simulation = simulate(
        workload.hurried(), config, cost_model, pools=calibration.pools(config), num_replicas=num_replicas,
        route=route,
    )  # fmt: skip
    return max(metrics.finished_time or 0.0 for metrics in simulation.requests)


def interval(figures: dict[str, Any], calibration: Calibration) -> dict[str, float] | None:
    """Relative error of the fit (p90 over measured steps), and output tokens/s within it; None if unknown."""
    error = calibration.residuals.get("p90")
    if error is None:
        return None
    rate = figures["output_tokens_per_second"]
    return {
        "relative": error,
        "low": rate * max(0.0, 1.0 - error),
        "high": rate * (1.0 + error),
    }


def warning(utilisation: float | None) -> str | None:
    """Warning about a forecast at a utilisation; None up to MOST_PREDICTABLE."""
    if utilisation is None or utilisation <= MOST_PREDICTABLE:
        return None
    return (
        f"the utilisation is {utilisation:.2f}, above {MOST_PREDICTABLE:g}: requests queue, and forecasts of TTFT may "
        "be off by half and more; measure before you rely on them"
    )
