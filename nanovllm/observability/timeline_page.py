"""Renders one run, or two side by side, as an HTML page."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from nanovllm.observability.pages import read_page
from nanovllm.observability.timeline import STEP_VALUES, Run, summary
from nanovllm.observability.timeline_figures import RunFigures
from nanovllm.observability.trace_writer import STATES


def to_html(runs: dict[str, Run]) -> str:
    """Render one or two runs, by title, as a self-contained page."""
    data = {"runs": [_run_data(title, run) for title, run in runs.items()], "states": STATES, "names": STEP_VALUES}
    # "</" and "<!--" would end the script element.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return read_page("timeline.html").replace("__RUNS__", embedded)


def _run_data(title: str, run: Run) -> dict[str, Any]:
    figures = RunFigures(run)
    requests = [asdict(request) for request in figures.requests]
    return asdict(run) | {
        "title": title, "summary": summary(run), "requests": requests, "percentiles": figures.percentiles
    }  # fmt: skip
