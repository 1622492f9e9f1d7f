"""The command `nanovllm bench`: workloads on this engine and on peers, as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from nanovllm.cli.flags import add_model_flags, engine_options
from nanovllm.cli.workload_flags import (
    about_workloads,
    add_arrival_flags,
    add_workload_flags,
    count,
    positive,
    several_workloads,
)
from nanovllm.model.default_model import DEFAULT_MODEL, ensure_default_model
from nanovllm.tools.bench import processes, report
from nanovllm.tools.bench.players import PLAYERS
from nanovllm.tools.bench.processes import EngineSpec, Settings
from nanovllm.tools.workloads.files import write_trace


def add_bench_command(commands: Any) -> None:
    """Add the command to those of the command line."""
    bench = commands.add_parser(
        "bench", help="measure this engine, and others beside it", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Play workloads in real time against this engine, and against others on the same data.",
        epilog=about_workloads(),
    )  # fmt: skip
    add_workload_flags(bench, several=True)
    add_arrival_flags(bench)
    bench.add_argument("--export", metavar="FILE", help="write the workload as a trace file, and run nothing")
    bench.add_argument(
        "--engines", nargs="+", default=["nanovllm"], metavar="NAME[:OPTION=VALUE,...]",
        help=f"of {', '.join(PLAYERS)}, with options of their own, in turn (default nanovllm); python=PATH is the "
        "interpreter of an engine in another environment",
    )  # fmt: skip
    bench.add_argument("--repeats", type=positive, default=1, metavar="INT", help="processes of each (default 1)")
    bench.add_argument(
        "--warm-ups",
        type=count,
        default=1,
        metavar="INT",
        help="unmeasured plays before each (default 1)",
    )
    bench.add_argument("--profile", action="store_true", help="show where the time of this engine's steps goes")
    bench.add_argument(
        "--record", metavar="FILE",
        help="write what every request and step of the measured run does to FILE; see `nanovllm timeline`",
    )  # fmt: skip
    bench.add_argument("--json", metavar="FILE", help="write all figures to FILE, or to standard output if it is -")
    add_model_flags(bench)
    bench.set_defaults(run=_bench)

    compare = bench.add_subparsers(metavar="").add_parser(
        "compare", help="two results side by side", description="Compare two results of `nanovllm bench --json`.",
        allow_abbrev=False,
    )  # fmt: skip
    compare.add_argument("results", nargs=2, metavar="FILE")
    compare.set_defaults(run=_compare)


def _bench(options: argparse.Namespace) -> int:
    given = engine_options(options)
    if options.tokenizer:
        given["tokenizer"] = options.tokenizer
    engines = [EngineSpec.parse(text, given) for text in options.engines]
    labels = [engine.label for engine in engines]
    if len(set(labels)) < len(labels):
        raise ValueError(f"two of the engines are {max(labels, key=labels.count)}, and could not be told apart.")
    if options.profile and (others := [engine.label for engine in engines if engine.name != "nanovllm"]):
        raise ValueError(f"--profile looks into this engine, not into {others[0]}. Leave one of them out.")
    if options.record and (labels[1:] or engines[0].name != "nanovllm" or options.repeats > 1):
        raise ValueError("--record is of one run of this engine. Leave other engines and --repeats out.")
    workloads = several_workloads(options)
    if len({workload.name for workload in workloads}) < len(workloads):
        raise ValueError("two workloads have the same name, and their results could not be told apart.")
    if options.export:
        if len(workloads) != 1:
            raise ValueError(f"--export writes one workload to one file; there are {len(workloads)}.")
        write_trace(workloads[0], options.export)
        return 0
    for engine in engines:
        for workload in workloads:
            processes.check_takes(engine.name, workload)
    model = str(ensure_default_model()) if options.model == DEFAULT_MODEL else options.model
    settings = Settings(
        model, options.repeats, options.warm_ups, options.profile, options.record and os.path.abspath(options.record),
        options.verbose,
    )  # fmt: skip

    def after_run(result: dict[str, Any]) -> None:
        if options.json and options.json != "-":
            Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        latest = result["runs"][-len(workloads) :]
        rates = ", ".join(f"{run['workload']} {run['output_tokens_per_second']:.0f}" for run in latest)
        print(f"{latest[0]['engine']}, tokens/s: {rates}", file=sys.stderr, flush=True)

    result = processes.run_all(engines, workloads, settings, after_run=after_run)
    print(json.dumps(result) if options.json == "-" else report.table(result))
    return 0


def _compare(options: argparse.Namespace) -> int:
    print(report.compare(*options.results))
    return 0
