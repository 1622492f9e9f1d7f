"""The command `nanovllm tune`: measures engine settings on a workload and recommends the best."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanovllm.cli.flags import add_model_flags
from nanovllm.cli.tune_question import Question, build_question, with_rates
from nanovllm.cli.tune_session import TuningSession, tuning_session
from nanovllm.cli.workload_flags import (
    about_workloads,
    add_arrival_flags,
    add_warm_ups_flag,
    add_workload_flags,
    positive,
)
from nanovllm.tools.bench.worker import environment
from nanovllm.tools.tune import plot, report, result
from nanovllm.tools.tune.find_rate import rates_around
from nanovllm.tools.tune.forecast import MOST_SIMULATED, Forecast, forecast
from nanovllm.tools.tune.goals import add_goal_flags
from nanovllm.tools.tune.halving import Sweep, num_measurements, rounds_for
from nanovllm.tools.tune.journal import Journal
from nanovllm.tools.tune.ranking import summarise
from nanovllm.tools.tune.settings import SWEPT, sample
from nanovllm.tools.tune.shares import smallest_share

OUTPUTS = ("result.json", "serve.toml", "curves.png")
CANDIDATES = 16
FORECAST_CANDIDATES = 6  # fewer than CANDIDATES: --simulate preselects them among many more


def add_tune_command(commands: Any) -> None:
    """Register the subcommand."""
    tune = commands.add_parser(
        "tune", help="find the best engine settings for a workload", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog=about_workloads(),
        description="Measure engine settings on a workload, and recommend the one with most output tokens/s\n"
        "among those that keep the goals. The same command resumes an interrupted one.",
    )  # fmt: skip
    add_workload_flags(tune, default=None)
    add_arrival_flags(tune, several=True)
    tune.add_argument(
        "--find-rate", action="store_true",
        help="find the highest arrival rate that keeps the goals, of the best setting; instead of --rate",
    )  # fmt: skip
    add_goal_flags(tune)
    values = tune.add_argument_group(
        "values to try", "instead of values around the device's defaults; a single value is fixed"
    )
    for name in SWEPT:
        values.add_argument(
            f"--{name.replace('_', '-')}", dest=f"try_{name}", type=_values, metavar="INT,...", help=f"values of {name}"
        )
    tune.add_argument("--only-named", action="store_true", help="leave options without values to try at their defaults")
    tune.add_argument(
        "--candidates", type=positive, metavar="INT",
        help=f"number of settings to measure (default {CANDIDATES}, {FORECAST_CANDIDATES} with --simulate)",
    )  # fmt: skip
    tune.add_argument(
        "--simulate", metavar="CALIBRATION",
        help="preselect settings in virtual time with the output of `nanovllm calibrate`, and measure the best",
    )  # fmt: skip
    tune.add_argument(
        "--repeats", type=positive, default=2, metavar="INT", help="measurements of each finalist (default 2)"
    )
    add_warm_ups_flag(tune)
    tune.add_argument(
        "--output", default="nanovllm-tune", metavar="FOLDER",
        help="folder for measurements.jsonl, result.json, serve.toml and curves.png (default nanovllm-tune)",
    )  # fmt: skip
    tune.add_argument("--retry", action="store_true", help="repeat measurements that failed before")
    add_model_flags(tune, leave_out=(*SWEPT, "record_itl"))
    tune.set_defaults(run=_tune)


def _values(text: str) -> list[int]:
    try:
        values = [int(item) for item in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form INT,INT,... such as 512,1024") from None
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text!r} names a value twice")
    return values


def _tune(options: argparse.Namespace) -> int:
    question = build_question(options)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / "measurements.jsonl", question.identity, retry=options.retry)
    journal.check_environment(environment())
    for name in OUTPUTS:  # results of an earlier sweep may be for other goals
        (folder / name).unlink(missing_ok=True)
    with tuning_session(question, journal) as session:
        try:
            outcome, is_complete = _measure(question, session)
        except KeyboardInterrupt:
            print(f"interrupted; the measurements are in {journal.path}, and the same command resumes.")
            return 130
    print(report.table(outcome))
    if not is_complete:
        print(f"\ninterrupted; the measurements are in {journal.path}, and the same command resumes.")
        return 130
    print("\n" + report.advice(outcome))
    _save(outcome, folder)
    finalists = outcome.sweep.finalists()
    keeps_goals = bool(finalists) and finalists[0].keeps_goals
    return 0 if keeps_goals or (outcome.found is not None and outcome.found.rate is not None) else 1


def _measure(question: Question, session: TuningSession) -> tuple[report.Outcome, bool]:
    """Measure until the recommendation; returns the outcome so far, and whether it is complete.

    Raises KeyboardInterrupt if there is no result yet.
    """
    if question.options.find_rate:
        capacity = session.capacity(question.candidates.settings[0])
        question = replace(question, workloads=with_rates(question.options, question.workload, rates_around(capacity)))
    predicted = _forecast(question) if question.calibration else Forecast()
    sweep = _sweep(question, predicted)
    for note in _notes(question, sweep):
        print(f"note: {note}", file=sys.stderr)
    is_complete = True
    found = None
    rival = None
    try:
        session.run(sweep, question)
        if question.options.find_rate and (finalists := sweep.finalists()):
            found, rival = session.find_rate(question, finalists)
    except KeyboardInterrupt:
        is_complete = False
    summaries = {setting: summarise(setting, [runs], question.goals) for setting, runs in predicted.runs.items()}
    refused = question.candidates.refused + [(setting.options, why) for setting, why in predicted.refused.items()]
    fit_error = question.calibration.residuals.get("p90") if question.calibration else None
    outcome = report.Outcome(
        sweep, question.resolver, question.identity, session.measurer.journal.environment, refused, summaries,
        fit_error, found, rival,
    )  # fmt: skip
    return outcome, is_complete


def _save(outcome: report.Outcome, folder: Path) -> None:
    """Write the files of `OUTPUTS`."""
    (folder / "result.json").write_text(json.dumps(result.as_json(outcome), indent=1) + "\n", encoding="utf-8")
    if not outcome.sweep.finalists():
        return
    path = folder / "serve.toml"
    path.write_text(result.serve_file(outcome), encoding="utf-8")
    print(f"to serve it: nanovllm serve --config {path}", file=sys.stderr)
    if plot.can_plot():
        plot.save_plot(outcome, folder / "curves.png")


def _forecast(question: Question) -> Forecast:
    settings = sample(question.candidates.settings, MOST_SIMULATED)
    assert question.calibration is not None
    with tqdm(total=len(settings), desc="simulated", unit="setting", disable=None) as bar:
        made = forecast(
            question.calibration, settings, question.workloads, question.fixed, model=question.options.model,
            after_each=bar.update,
        )  # fmt: skip
    if not made.runs:
        raise ValueError(f"no setting can be simulated: {next(iter(made.refused.values()))}")
    return made


def _sweep(question: Question, predicted: Forecast) -> Sweep:
    settings = question.candidates.settings
    asked_for = question.options.candidates
    if predicted.runs:
        chosen = predicted.best(asked_for or FORECAST_CANDIDATES, question.goals, settings[0])
    else:
        chosen = sample(settings, asked_for or CANDIDATES)
    most_seqs = max(setting.options["max_num_seqs"] for setting in chosen)
    smallest = max(smallest_share(workload, most_seqs) for workload in question.workloads.values())
    return Sweep(chosen, question.goals, rounds_for(len(chosen), smallest), question.options.repeats)


def _notes(question: Question, sweep: Sweep) -> Iterator[str]:
    """Yield notes on the plan, before hours of measuring."""
    planned = num_measurements(sweep.rounds, sweep.repeats)
    yield (
        f"{len(sweep.settings)} of {len(question.candidates.settings)} settings are measured, first on "
        f"{sweep.rounds[0].share:.3g} of the workload; {planned} measurements"
    )
    is_timed = any(workload.is_timed for workload in question.workloads.values())
    if len(sweep.rounds) > 1 and sweep.rounds[0].share == 1.0:
        yield (
            "too few requests for a meaningful share, so every setting runs the whole workload; more requests would "
            "save time"
            if is_timed
            else "all requests arrive at the start and a share of them cannot fill max_num_seqs, so every setting runs "
            "the whole workload; more requests, or a --rate, would save time"
        )
    if predicted_pool := question.pool_of_forecasts:
        yield (
            f"forecasts assume the calibrated engine's KV cache of {predicted_pool:,} bytes, regardless of "
            "--gpu-memory-utilization; give --kv-cache-memory-bytes for the same size in both"
        )
    if not is_timed and any(goal.time == "ttft" for goal in question.goals):
        yield ("all requests arrive at the start, so TTFT is mostly queueing time; give a --rate")
    if not plot.can_plot():
        yield "no curves.png without matplotlib; pip install 'nanovllm[plot]' and repeat the command"
