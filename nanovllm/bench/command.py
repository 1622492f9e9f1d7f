"""The command `nanovllm bench`: workloads on this engine and on peers, as a table and as JSON."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from nanovllm.bench import processes, report
from nanovllm.bench.players import PLAYERS
from nanovllm.bench.processes import EngineSpec, Settings
from nanovllm.cli_flags import add_model_flags, engine_options
from nanovllm.default_model import DEFAULT_MODEL, ensure_default_model
from nanovllm.workload_files import read_trace, write_trace
from nanovllm.workload_specs import build, spelled
from nanovllm.workloads import WORKLOADS, Workload, bursty, poisson


def add_bench_command(commands: Any) -> None:
    """Add the command to those of the command line."""
    bench = commands.add_parser(
        "bench", help="measure this engine, and others beside it", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Play workloads in real time against this engine, and against others on the same data.",
        epilog="workloads:\n" + "\n".join(f"  {name:<9}{_about(name)}" for name in WORKLOADS),
    )  # fmt: skip
    bench.add_argument(
        "--workload", action="append", metavar="NAME[:KEY=VALUE,...]",
        help="a workload, with its parameters if it has any, such as random:requests=8,prompt=100-1024; again for "
        "another (default random)",
    )  # fmt: skip
    bench.add_argument("--trace", action="append", default=[], metavar="FILE", help="a workload from a trace file")
    bench.add_argument("--seed", type=int, metavar="INT", help="of workloads that are drawn, and of arrivals")
    bench.add_argument("--requests", type=_positive, metavar="INT", help="cut workloads to their first requests")
    bench.add_argument("--rate", type=float, metavar="FLOAT", help="requests arrive, so many a second on average")
    bench.add_argument(
        "--arrivals", choices=("poisson", "bursty"), help="how they arrive, with --rate (default poisson)"
    )
    bench.add_argument("--burst", type=_positive, metavar="INT", help="requests of a burst (default 8)")
    bench.add_argument("--export", metavar="FILE", help="write the workload as a trace file, and run nothing")
    bench.add_argument(
        "--engines", nargs="+", default=["nanovllm"], metavar="NAME[:OPTION=VALUE,...]",
        help=f"of {', '.join(PLAYERS)}, with options of their own, in turn (default nanovllm); python=PATH is the "
        "interpreter of an engine in another environment",
    )  # fmt: skip
    bench.add_argument("--repeats", type=_positive, default=1, metavar="INT", help="processes of each (default 1)")
    bench.add_argument(
        "--warm-ups",
        type=_count,
        default=1,
        metavar="INT",
        help="unmeasured plays before each (default 1)",
    )
    bench.add_argument("--profile", action="store_true", help="show where the time of this engine's steps goes")
    bench.add_argument("--json", metavar="FILE", help="write all figures to FILE, or to standard output if it is -")
    add_model_flags(bench)
    bench.set_defaults(run=_bench)

    compare = bench.add_subparsers(metavar="").add_parser(
        "compare", help="two results side by side", description="Compare two results of `nanovllm bench --json`.",
        allow_abbrev=False,
    )  # fmt: skip
    compare.add_argument("results", nargs=2, metavar="FILE")
    compare.set_defaults(run=_compare)


def _about(name: str) -> str:
    maker = WORKLOADS[name]
    parameters = inspect.signature(maker).parameters.values()
    takes = " ".join(f"{parameter.name}={spelled(parameter.default)}" for parameter in parameters)
    first = inspect.getdoc(maker).splitlines()[0]  # type: ignore[union-attr]
    return first + (f"\n{'':<11}{takes}" if takes else "")


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is no count; it must be 0 or more")
    return value


def _positive(text: str) -> int:
    value = _count(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is too few; it must be at least 1")
    return value


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
    workloads = _workloads(options)
    if options.export:
        if len(workloads) != 1:
            raise ValueError(f"--export writes one workload to one file; there are {len(workloads)}.")
        write_trace(workloads[0], options.export)
        return 0
    for engine in engines:
        for workload in workloads:
            processes.check_takes(engine.name, workload)
    model = str(ensure_default_model()) if options.model == DEFAULT_MODEL else options.model
    settings = Settings(model, options.repeats, options.warm_ups, options.profile, options.verbose)

    def after_run(result: dict[str, Any]) -> None:
        if options.json and options.json != "-":
            Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        latest = result["runs"][-len(workloads) :]
        rates = ", ".join(f"{run['workload']} {run['output_tokens_per_second']:.0f}" for run in latest)
        print(f"{latest[0]['engine']}, tokens/s: {rates}", file=sys.stderr, flush=True)

    result = processes.run_all(engines, workloads, settings, after_run=after_run)
    print(json.dumps(result) if options.json == "-" else report.table(result))
    return 0


def _workloads(options: argparse.Namespace) -> list[Workload]:
    texts = options.workload or ([] if options.trace else ["random"])
    workloads = [build(text, seed=options.seed) for text in texts]
    workloads += [read_trace(path, tokenize=_Tokenize(options)) for path in options.trace]
    if options.requests:
        workloads = [workload.first(options.requests) for workload in workloads]
    if options.arrivals and options.rate is None:
        raise ValueError(f"--arrivals is {options.arrivals}, but without --rate all requests keep their own arrivals.")
    if options.burst and options.arrivals != "bursty":
        raise ValueError(f"--burst is {options.burst}, but only --arrivals bursty has bursts.")
    if options.rate is not None:
        seed = options.seed or 0
        if options.arrivals == "bursty":
            burst = options.burst or 8
            workloads = [bursty(workload, options.rate, burst=burst, seed=seed) for workload in workloads]
        else:
            workloads = [poisson(workload, options.rate, seed=seed) for workload in workloads]
    if len({workload.name for workload in workloads}) < len(workloads):
        raise ValueError("two workloads have the same name, and their results could not be told apart.")
    return workloads


class _Tokenize:
    """The model's tokenizer, loaded when the first text of a trace wants it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._name = options.tokenizer or options.model
        self._tokenizer: Any = None

    def __call__(self, text: str) -> list[int]:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            folder = ensure_default_model() if self._name == DEFAULT_MODEL else self._name
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
        return self._tokenizer(text)["input_ids"]


def _compare(options: argparse.Namespace) -> int:
    print(report.compare(*options.results))
    return 0
