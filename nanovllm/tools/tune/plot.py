"""Plot of a sweep: throughput against ITL p99, a curve per setting through its arrival rates."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from nanovllm.tools.tune.report import Outcome, format_options
from nanovllm.tools.tune.settings import Setting


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def save_plot(outcome: Outcome, path: Path) -> None:
    """Write the plot as PNG."""
    draw(outcome).savefig(path, format="png")


def draw(outcome: Outcome) -> Any:
    """Draw each setting on its largest measured share; finalists on the whole workload are in colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained", dpi=110)
    axes = figure.subplots()
    latest = outcome.latest()
    varying = outcome.resolver.varying(outcome.sweep.settings)
    for share, summary in reversed(latest):
        points = [point for point in summary.points if point["itl"]]
        x = [1e3 * point["itl"]["p99"] for point in points]
        y = [point["output_tokens_per_second"] for point in points]
        is_final = share == 1.0
        axes.plot(
            x, y, marker="o", markersize=5 if is_final else 3, color=None if is_final else "#b9bec7",
            label=_name(summary.setting, varying, outcome) if is_final else None, zorder=2 if is_final else 1,
        )  # fmt: skip
    _mark_chosen(axes, outcome)
    for goal in outcome.goals:
        if (goal.time, goal.statistic) == ("itl", "p99"):
            axes.axvline(1e3 * goal.limit, color="black", linewidth=0.8, linestyle="--", label=str(goal))
    axes.set_xlabel("ITL p99, ms")
    axes.set_ylabel("output tokens/s")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_title(f"{outcome.question['model']}, {outcome.question['workload']['name']}", fontsize=9)
    axes.legend(fontsize=7, loc="best", title="grey: eliminated on a share of the workload", title_fontsize=7)
    return figure


def _mark_chosen(axes: Any, outcome: Outcome) -> None:
    finalists = outcome.sweep.finalists()
    if finalists and finalists[0].best["itl"]:
        best = finalists[0].best
        label = "recommended" if finalists[0].keeps_goals else "nearest"
        axes.plot(
            1e3 * best["itl"]["p99"], best["output_tokens_per_second"], marker="*", markersize=16, color="none",
            markeredgecolor="black", linestyle="none", label=label, zorder=3,
        )  # fmt: skip


def _name(setting: Setting, varying: list[str], outcome: Outcome) -> str:
    return format_options(setting.options, varying) + (
        " (the defaults)" if setting == outcome.sweep.settings[0] else ""
    )
