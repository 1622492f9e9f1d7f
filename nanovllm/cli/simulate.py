"""The commands `nanovllm calibrate` and `nanovllm simulate`: measured step costs, and replays in virtual time."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from nanovllm.cli.early_checks import check_output, check_start
from nanovllm.cli.flags import add_engine_flags, add_model_flags, add_verbose_flag, engine_options
from nanovllm.cli.workload_flags import about_workloads, add_arrival_flags, add_workload_flags, one_workload
from nanovllm.features.engine_config import EngineConfig
from nanovllm.serving.replicas.routing import POLICIES
from nanovllm.tools.simulate.calibration import Calibration
from nanovllm.tools.simulate.simulator import Simulation, report, simulate
from nanovllm.tools.simulate.utilisation import interval, seconds_at_once, warning
from nanovllm.tools.tune.goals import add_request_goal_flags, duration, request_goals_from_flags

# Engine options without effect on a simulation; the pool comes from the calibration or from the other options.
NOT_SIMULATED = (
    "gpu_memory_utilization",
    "record_itl",
    "seed",
    "revision",
    "trust_remote_code",
    "allow_control_tokens_in_messages",
    "chat_template",
    "skip_tokenizer_init",
    "kv_events",
    "kv_events_replay",
    "kv_events_topic",
    "kv_events_rank",
    "data_parallel_size",  # --replicas
    "routing",
    "step_costs",  # --calibration
)


def add_calibrate_command(commands: Any) -> None:
    """Register `nanovllm calibrate`."""
    parser = commands.add_parser(
        "calibrate", help="measure step costs for the simulator", allow_abbrev=False,
        description="Measure the step costs of an engine on this machine for `nanovllm simulate`.",
    )  # fmt: skip
    parser.add_argument("--output", required=True, metavar="FILE", help="write the calibration to FILE as JSON")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each step (default 3)")
    add_model_flags(parser)
    parser.set_defaults(run=_calibrate)


def add_simulate_command(commands: Any) -> None:
    """Register `nanovllm simulate`."""
    parser = commands.add_parser(
        "simulate", help="replay a workload in virtual time", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog=about_workloads(),
        description="Replay a workload in virtual time, with the step costs of `nanovllm calibrate`.",
    )  # fmt: skip
    parser.add_argument("--calibration", required=True, metavar="FILE", help="output of `nanovllm calibrate`")
    add_workload_flags(parser)
    add_arrival_flags(parser)
    parser.add_argument(
        "--replicas", type=int, default=1, help="number of replicas that share the requests (default 1)"
    )
    parser.add_argument(
        "--routing",
        dest="route",
        choices=list(POLICIES),
        default="round-robin",
        help="routing policy (default round-robin)",
    )
    parser.add_argument(
        "--index-delay", type=int, metavar="STEPS",
        help="a router learns of what a replica caches this many steps late (default: it sees the cache itself)",
    )  # fmt: skip
    parser.add_argument(
        "--front-delay", type=duration, metavar="TIME",
        help="from a request's arrival until its engine has it, such as 1.5ms: its queue time on an idle server "
        "less the intake (default: the calibration's, which is 0 as measured)",
    )  # fmt: skip
    parser.add_argument(
        "--json", metavar="FILE", help="write figures, requests and steps to FILE as JSON, - for standard output"
    )
    add_request_goal_flags(parser)
    add_verbose_flag(parser)
    parser.add_argument("--model", help="expected model; a calibration of another one is refused")
    add_engine_flags(parser, leave_out=NOT_SIMULATED)
    parser.set_defaults(run=_simulate)


def _calibrate(options: argparse.Namespace) -> int:
    given = engine_options(options)
    check_output("--output", options.output)
    check_start(options, given)
    from nanovllm.tools.simulate.calibrate import calibrate  # imports torch and transformers

    calibration = calibrate(options.model, tokenizer=options.tokenizer, repeats=options.repeats, **given)
    calibration.save(options.output)
    errors = ", ".join(f"{name} {error:.1%}" for name, error in calibration.residuals.items())
    print(f"{options.output}: {calibration.num_samples} steps measured; relative errors of the fit: {errors}")
    return 0


def _simulate(options: argparse.Namespace) -> int:
    if options.json != "-":
        check_output("--json", options.json)
    calibration = Calibration.load(options.calibration)
    config = calibration.resolve(EngineConfig.from_options(**engine_options(options)), model=options.model)
    workload = one_workload(options)
    cost_model = calibration.cost_model
    if options.front_delay is not None:
        cost_model = replace(cost_model, front_delay=options.front_delay)
    begin = time.perf_counter()
    simulation = simulate(
        workload,
        config,
        cost_model,
        num_replicas=options.replicas,
        route=POLICIES[options.route](),
        keep_steps=bool(options.json),
        index_delay=options.index_delay,
        pools=calibration.pools(config),
    )
    took = time.perf_counter() - begin
    figures = simulation.figures() | _certainty(options, simulation, config, calibration)
    if (goals := request_goals_from_flags(options)) is not None:
        figures["goals"] = goals.figures(simulation.requests, figures["seconds"])
    if options.json:
        about = {"workload": workload.name, "model": calibration.model, "config": _as_dict(config)}
        text = json.dumps(about | _as_json(options, simulation, cost_model.front_delay) | {"figures": figures})
        if options.json == "-":
            print(text)
            return 0
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    print(f"{workload.name} on {options.replicas} x {calibration.model}, simulated in {took:.2f} s\n{report(figures)}")
    if goals is not None:
        kept = figures["goals"]
        print(f"{kept['share']:.1%} of requests within {goals}: {kept['requests_per_second']:.2f} requests/s")
    if (note := warning(figures["utilisation"])) is not None:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _as_json(options: argparse.Namespace, simulation: Simulation, front_delay: float) -> dict[str, Any]:
    return {
        "replicas": options.replicas,
        "routing": options.route,
        "index_delay": options.index_delay,
        "front_delay": front_delay,
        "requests": [
            _as_dict(metrics) | {"replica": replica}
            for metrics, replica in zip(simulation.requests, simulation.replica_of, strict=True)
        ],
        "steps": [[_as_dict(record) for record in records] for records in simulation.steps],
    }


def _certainty(
    options: argparse.Namespace, simulation: Simulation, config: EngineConfig, calibration: Calibration
) -> dict[str, Any]:
    """Return "utilisation" (None if all requests arrive at the start) and "interval" of a forecast."""
    figures = simulation.figures()
    utilisation = None
    if simulation.workload.is_timed:
        route = POLICIES[options.route]()
        work = seconds_at_once(simulation.workload, config, calibration, num_replicas=options.replicas, route=route)
        utilisation = min(1.0, work / figures["seconds"])
    return {"utilisation": utilisation, "interval": interval(figures, calibration)}


def _as_dict(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}
