"""The command `nanovllm timeline`: a trace as a page or a picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_timeline_command(commands: Any) -> None:
    """Add the command to those of the command line."""
    timeline = commands.add_parser(
        "timeline", help="draw a trace", description="Draw what --trace wrote.", allow_abbrev=False
    )
    timeline.add_argument("trace", metavar="TRACE", help="a file that --trace wrote")
    timeline.add_argument("-o", "--output", metavar="FILE", help="write a page of HTML that needs nothing else")
    timeline.add_argument("--plot", metavar="FILE", help="write a picture (PNG); needs matplotlib, the extra `plot`")
    timeline.add_argument("-v", "--verbose", action="store_true", help="full tracebacks")
    timeline.set_defaults(run=_timeline)


def _timeline(options: argparse.Namespace) -> int:
    from nanovllm.observability import timeline, timeline_plot

    if options.output is None and options.plot is None:
        raise ValueError("say what to write: -o run.html for a page, --plot run.png for a picture, or both.")
    run, title = timeline.read_trace(options.trace), Path(options.trace).name
    if options.output is not None:
        Path(options.output).write_text(timeline.to_html(run, title), encoding="utf-8")
    if options.plot is not None:
        timeline_plot.save_png(run, title, options.plot)
    print(timeline.summary(run))
    return 0
