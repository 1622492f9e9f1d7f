"""The command `nanovllm timeline`: one trace or two as an HTML page, or one as a PNG."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nanovllm.cli.early_checks import check_output
from nanovllm.cli.flags import add_verbose_flag
from nanovllm.features.extras import check_extra


def add_timeline_command(commands: Any) -> None:
    """Register the subcommand."""
    timeline = commands.add_parser(
        "timeline",
        help="draw a trace",
        description="Draw a trace file as an HTML page or a PNG, or two side by side on one page; print percentiles.",
        allow_abbrev=False,
    )
    timeline.add_argument("trace", metavar="TRACE", help="trace file, written with --trace")
    timeline.add_argument("other", metavar="OTHER", nargs="?", help="another trace, shown beside it on the page")
    timeline.add_argument("-o", "--output", metavar="FILE", help="write a self-contained HTML page to FILE")
    timeline.add_argument("--plot", metavar="FILE", help="write a PNG to FILE; requires matplotlib, the extra `plot`")
    add_verbose_flag(timeline)
    timeline.set_defaults(run=_timeline)


def _timeline(options: argparse.Namespace) -> int:
    from nanovllm.observability import timeline, timeline_page, timeline_plot
    from nanovllm.observability.timeline_figures import RunFigures

    if options.output is None and options.plot is None:
        raise ValueError("no output: give -o run.html for an HTML page, --plot run.png for a PNG, or both.")
    if options.plot is not None and options.other is not None:
        raise ValueError(
            "--plot draws one trace, and two are given: give one, or -o run.html for a page with both side by side."
        )
    if options.plot is not None:
        check_extra("--plot", "plot", "matplotlib")
    check_output("--output", options.output)
    check_output("--plot", options.plot)
    paths = [path for path in (options.trace, options.other) if path is not None]
    runs = dict(zip(_titles(paths), map(timeline.read_trace, paths), strict=True))
    if options.output is not None:
        Path(options.output).write_text(timeline_page.to_html(runs), encoding="utf-8")
    if options.plot is not None:
        ((title, run),) = runs.items()
        timeline_plot.save_png(run, title, options.plot)
    for title, run in runs.items():
        if len(runs) > 1:
            print(f"{title}:")
        print(timeline.summary(run))
        print(RunFigures(run).text())
    return 0


def _titles(paths: list[str]) -> list[str]:
    """Names of the files; their paths if two names are equal, numbered if the paths are equal too."""
    names = [Path(path).name for path in paths]
    if len(set(names)) == len(names):
        return names
    return paths if len(set(paths)) == len(paths) else [f"{path} ({number})" for number, path in enumerate(paths, 1)]
