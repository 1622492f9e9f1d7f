"""Draws a run's timeline as a PNG with matplotlib (the extra `plot`)."""

from __future__ import annotations

import os
from typing import Any

from nanovllm.observability.timeline import STEP_VALUES, Run, summary
from nanovllm.observability.trace_writer import STATES

# The colors of the HTML page in its light theme.
COLORS = {"waiting": "#c3c8d0", "prefill": "#e8833a", "decode": "#3f7fd1", "preempted": "#c8324a", "stalled": "#e5c54b"}
CACHED = "#4da37a"


def save_png(run: Run, title: str, path: str | os.PathLike[str]) -> None:
    """Draw lanes, tokens against the budget, and used blocks."""
    from matplotlib.figure import Figure

    height = min(14.0, max(2.0, 0.16 * len(run.lanes)))
    figure = Figure(figsize=(14, height + 5), layout="constrained", dpi=120)
    lanes, tokens, blocks = figure.subplots(3, 1, sharex=True, height_ratios=[height, 2.5, 1.5])
    figure.suptitle(title)
    lanes.set_title(summary(run), fontsize=8, loc="left")
    _draw_lanes(lanes, run)
    _draw_tokens(tokens, run)
    _draw_blocks(blocks, run)
    blocks.set_xlabel("seconds")
    figure.savefig(path, format="png")


def _draw_lanes(axes: Any, run: Run) -> None:
    from matplotlib.collections import PolyCollection

    are_tall = len(run.lanes) <= 100
    half = 0.4 if are_tall else 0.5
    for number, state in enumerate(STATES):
        corners = [
            [(start / 1e6, y - half), (end / 1e6, y - half), (end / 1e6, y + half), (start / 1e6, y + half)]
            for y, lane in enumerate(run.lanes)
            for kind, start, end, _ in lane.spans
            if kind == number
        ]
        seam = 0.4 if are_tall and state == "prefill" else 0.0  # separates consecutive chunks
        axes.add_collection(
            PolyCollection(corners, facecolors=COLORS[state], edgecolors="white", linewidths=seam, label=state)
        )
    axes.set_ylim(len(run.lanes) - 0.5, -0.5)
    axes.set_xlim(0, run.end / 1e6)
    if len(run.lanes) <= 60:
        axes.set_yticks(range(len(run.lanes)), [lane.name[:24] for lane in run.lanes], fontsize=6)
    axes.set_ylabel("requests")
    _add_legend(axes)


def _add_legend(axes: Any) -> None:
    """Place the legend above the axes."""
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=7, ncols=len(STATES), frameon=False, borderpad=0)


def _column(run: Run, name: str) -> list[int]:
    return [step[2 + STEP_VALUES.index(name)] for step in run.steps]


def _draw_tokens(axes: Any, run: Run) -> None:
    starts = [step[0] / 1e6 for step in run.steps]
    below = [0] * len(starts)
    colors = {"decode": COLORS["decode"], "prefill": COLORS["prefill"], "cached": CACHED}
    for name, color in colors.items():
        above = [low + value for low, value in zip(below, _column(run, name), strict=True)]
        axes.fill_between(starts, below, above, step="post", color=color, label=name, linewidth=0)
        below = above
    axes.axhline(max(_column(run, "budget")), color="black", linewidth=0.8, linestyle="--", label="budget")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens a step")
    _add_legend(axes)


def _draw_blocks(axes: Any, run: Run) -> None:
    ends = [step[1] / 1e6 for step in run.steps]
    axes.fill_between(ends, _column(run, "used_blocks"), step="post", color="#8a63b8", linewidth=0, label="used")
    axes.axhline(max(_column(run, "blocks")), color="black", linewidth=0.8, linestyle="--", label="blocks")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("blocks")
    _add_legend(axes)
