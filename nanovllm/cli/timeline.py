"""The command `nanovllm timeline`: a trace as an HTML page or a PNG."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nanovllm.cli.flags import add_verbose_flag


def add_timeline_command(commands: Any) -> None:
    """Register the subcommand."""
    timeline = commands.add_parser(
        "timeline", help="draw a trace", description="Draw a trace file as an HTML page or a PNG.", allow_abbrev=False
    )
    timeline.add_argument("trace", metavar="TRACE", help="trace file, written with --trace")
    timeline.add_argument("-o", "--output", metavar="FILE", help="write a self-contained HTML page to FILE")
    timeline.add_argument("--plot", metavar="FILE", help="write a PNG to FILE; requires matplotlib, the extra `plot`")
    add_verbose_flag(timeline)
    timeline.set_defaults(run=_timeline)


def _timeline(options: argparse.Namespace) -> int:
    from nanovllm.observability import timeline, timeline_plot

    if options.output is None and options.plot is None:
        raise ValueError("no output: give -o run.html for an HTML page, --plot run.png for a PNG, or both.")
    run, title = timeline.read_trace(options.trace), Path(options.trace).name
    if options.output is not None:
        Path(options.output).write_text(timeline.to_html(run, title), encoding="utf-8")
    if options.plot is not None:
        timeline_plot.save_png(run, title, options.plot)
    print(timeline.summary(run))
    return 0
