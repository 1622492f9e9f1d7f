"""The command `nanovllm bench`: workloads on this engine and others, as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from nanovllm.cli.early_checks import check_output, check_start
from nanovllm.cli.flags import add_model_flags, engine_options, model_source
from nanovllm.cli.sampling_flags import load_llm
from nanovllm.cli.workload_flags import (
    about_workloads,
    add_arrival_flags,
    add_warm_ups_flag,
    add_workload_flags,
    positive,
    several_workloads,
)
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.extras import check_extra
from nanovllm.features.option_checks import utf8
from nanovllm.features.refusals import check_one_process
from nanovllm.models.source import is_gguf
from nanovllm.tools.bench import perplexity, processes, report
from nanovllm.tools.bench.engines import ENGINES, check_arrivals, check_sampling
from nanovllm.tools.bench.perplexity import CHUNK
from nanovllm.tools.bench.processes import EngineSpec, Settings
from nanovllm.tools.workloads.files import write_trace
from nanovllm.tools.workloads.specs import parse_values
from nanovllm.tools.workloads.workloads import Workload

READ_GGUF = ("nanovllm", "llama.cpp")  # engines


def add_bench_command(commands: Any) -> None:
    """Register the subcommand."""
    bench = commands.add_parser(
        "bench", help="benchmark this engine and others", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Replay workloads in real time on this engine, and on others with the same data.",
        epilog=about_workloads(),
    )  # fmt: skip
    add_workload_flags(bench, several=True)
    add_arrival_flags(bench)
    bench.add_argument("--export", metavar="FILE", help="write the workload as a trace file to FILE without running it")
    bench.add_argument(
        "--engines", nargs="+", default=["nanovllm"], metavar="NAME[:OPTION=VALUE,...]",
        help=f"engines to run in turn, of {', '.join(ENGINES)}, each with its options (default nanovllm); python=PATH "
        "is the interpreter of another environment",
    )  # fmt: skip
    bench.add_argument(
        "--repeats", type=positive, default=1, metavar="INT",
        help="runs of each engine, each in a new process (default 1)",
    )  # fmt: skip
    add_warm_ups_flag(bench)
    bench.add_argument(
        "--sampling", default="", metavar="NAME=VALUE,...",
        help="sampling options of all requests, such as temperature=0.8,top_p=0.95 (default: greedy)",
    )  # fmt: skip
    bench.add_argument("--profile", action="store_true", help="profile the parts of this engine's steps")
    bench.add_argument(
        "--record", metavar="FILE",
        help="write a trace of the measured run's requests and steps to FILE; see `nanovllm timeline`",
    )  # fmt: skip
    bench.add_argument(
        "--perplexity",
        metavar="FILE",
        help="measure the perplexity of a text instead of speed",
    )
    bench.add_argument(
        "--perplexity-tokens", type=positive, metavar="INT",
        help=f"tokens of the chunks in which --perplexity reads the text, each alone (default {CHUNK})",
    )  # fmt: skip
    bench.add_argument("--json", metavar="FILE", help="write all figures to FILE as JSON, - for standard output")
    add_model_flags(bench)
    bench.set_defaults(run=_bench)

    compare = bench.add_subparsers(metavar="").add_parser(
        "compare", help="compare two results", description="Compare two results of `nanovllm bench --json`.",
        allow_abbrev=False,
    )  # fmt: skip
    compare.add_argument("results", nargs=2, metavar="FILE")
    compare.set_defaults(run=_compare)


def _bench(options: argparse.Namespace) -> int:
    if options.perplexity is not None or options.perplexity_tokens is not None:
        return _perplexity(options)
    given = engine_options(options)
    check_one_process("nanovllm bench", given)
    check_extra("nanovllm bench", "cli", "psutil")
    if options.tokenizer:
        given["tokenizer"] = options.tokenizer
    engines = [EngineSpec.parse(text, given) for text in options.engines]
    labels = [engine.label for engine in engines]
    if len(set(labels)) < len(labels):
        raise ValueError(
            f"two engines have the same label {max(labels, key=labels.count)}. Give them different options."
        )
    if is_gguf(options.model) and (unsupported := [e.label for e in engines if e.name not in READ_GGUF]):
        raise ValueError(
            f"{options.model} is a GGUF file, which {unsupported[0]} does not read; {' and '.join(READ_GGUF)} do. "
            "Leave the others out."
        )
    if options.profile and (unsupported := [engine.label for engine in engines if engine.name != "nanovllm"]):
        raise ValueError(f"--profile supports this engine only, not {unsupported[0]}. Leave one of them out.")
    if options.record and (labels[1:] or engines[0].name != "nanovllm" or options.repeats > 1):
        raise ValueError("--record supports one run of this engine. Leave other engines and --repeats out.")
    workloads = several_workloads(options)
    if len({workload.name for workload in workloads}) < len(workloads):
        raise ValueError("two workloads have the same name, which identifies them in results. Leave one out.")
    sampling = parse_values(options.sampling)
    if options.export:
        return _export(options, workloads, sampling)
    _check_early(options, engines)
    for engine in engines:
        check_sampling(engine.name, sampling)
        for workload in workloads:
            check_arrivals(engine.name, workload)
    settings = Settings(
        model_source(options.model), options.repeats, options.warm_ups, options.profile,
        options.record and os.path.abspath(options.record), options.verbose, sampling,
    )  # fmt: skip

    def after_run(result: dict[str, Any]) -> None:
        if options.json and options.json != "-":
            Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    def after_workload(engine: EngineSpec, workload: Workload, run: dict[str, Any]) -> None:
        print(f"{engine.label}, {workload.name}: {report.line(run)}", file=sys.stderr, flush=True)

    result = processes.run_all(engines, workloads, settings, after_run=after_run, after_workload=after_workload)
    print(json.dumps(result) if options.json == "-" else report.table(result))
    return 0


def _perplexity(options: argparse.Namespace) -> int:
    if options.perplexity is None:
        raise ValueError("--perplexity-tokens is about --perplexity FILE. Add it, or leave both out.")
    for flag in ("workload", "trace", "export", "profile", "record", "sampling"):
        if getattr(options, flag):
            raise ValueError(f"--perplexity reads a text, and plays no workload: leave --{flag} out.")
    if options.engines != ["nanovllm"]:
        raise ValueError("--perplexity measures this engine alone. Leave --engines out.")
    if options.json != "-":
        check_output("--json", options.json)
    path = Path(options.perplexity)
    text = utf8(str(path), path.read_bytes())
    given = engine_options(options)
    check_start(options, given)
    from nanovllm.models.loader import load_tokenizer  # imports torch

    tokenizer = load_tokenizer(model_source(options.model), options.tokenizer, EngineConfig.from_options(**given))
    length = options.perplexity_tokens or CHUNK
    chunks = perplexity.chunks_of(str(path), text, tokenizer, length)
    with load_llm(options) as llm:
        figures = perplexity.measure(llm, str(path), chunks)
    if options.json and options.json != "-":
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures) if options.json == "-" else perplexity.table(figures))
    return 0


def _export(options: argparse.Namespace, workloads: list[Workload], sampling: dict[str, Any]) -> int:
    if sampling:
        raise ValueError("--export writes prompts and lengths, which --sampling does not change. Leave it out.")
    if len(workloads) != 1:
        raise ValueError(f"--export writes one workload, but {len(workloads)} are given. Leave the others out.")
    write_trace(workloads[0], options.export)
    return 0


def _check_early(options: argparse.Namespace, engines: list[EngineSpec]) -> None:
    """Raise for files that cannot be written, and for options that this engine's processes would refuse."""
    check_output("--record", options.record)
    if options.json != "-":
        check_output("--json", options.json)
    for engine in engines:
        if engine.name == "nanovllm":
            check_start(options, {name: value for name, value in engine.options.items() if name != "tokenizer"})


def _compare(options: argparse.Namespace) -> int:
    print(report.compare(*options.results))
    return 0
