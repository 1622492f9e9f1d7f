"""Report of a sweep: a table of settings, and a recommendation with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nanovllm.tools.bench.report import format_rows
from nanovllm.tools.simulate.utilisation import warning
from nanovllm.tools.tune.find_rate import FoundRate
from nanovllm.tools.tune.goal_answer import GoalAnswer, RivalAtRate, goal_answer
from nanovllm.tools.tune.goals import TIMES, Goal
from nanovllm.tools.tune.halving import Sweep
from nanovllm.tools.tune.ranking import EQUAL, Run, SettingSummary
from nanovllm.tools.tune.settings import Resolver, Setting, format_value

MOST_REFUSED = 5  # rows for combinations that the engine refuses
DISTURBED = 0.1  # relative difference between measurements of one setting above which to warn
SHORT = {
    "max_num_batched_tokens": "budget", "max_num_seqs": "seqs", "block_size": "block",
    "max_num_partial_prefills": "partial", "max_long_partial_prefills": "long",
    "long_prefill_token_threshold": "threshold", "itl_goal": "goal",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """A sweep, complete or interrupted, and its question.

    question: identity of the sweep, common to all measurements.
    refused: contradictory combinations of values, with the reason.
    predicted: forecasts by setting; empty without --simulate.
    fit_error: relative error of the forecasts' step times, p90; None if unknown.
    found: the highest rate that keeps the goals; None without --find-rate.
    rival: best setting of the other kind (goal or fixed budget) at the found rate; None without one.
    """

    sweep: Sweep
    resolver: Resolver
    question: dict[str, Any]
    environment: dict[str, Any] | None
    refused: list[tuple[dict[str, int], str]]
    predicted: dict[Setting, SettingSummary] = field(default_factory=dict)
    fit_error: float | None = None
    found: FoundRate | None = None
    rival: RivalAtRate | None = None

    @property
    def goals(self) -> list[Goal]:
        return list(self.sweep.goals)

    @property
    def by_goal(self) -> GoalAnswer | None:
        return goal_answer(self.sweep.finalists(), self.found, self.rival)

    def latest(self) -> list[tuple[float, SettingSummary]]:
        """Return each measured setting on its largest share.

        Finalists come first, then larger shares; within a share the best first.
        """
        shares = sorted({share for repeats in self.sweep.results.values() for share in repeats}, reverse=True)
        rows = {summary.setting: (1.0, summary) for summary in self.sweep.finalists()}
        for share in shares:
            for summary in self.sweep.summaries(share, self.sweep.settings):
                rows.setdefault(summary.setting, (share, summary))
        return list(rows.values())


# -------------------------------------------------------------------------------------------------------------- table


def table(outcome: Outcome) -> str:
    """Format a line per setting, below the options common to all settings."""
    latest = outcome.latest()
    sweep = outcome.sweep
    measured = [summary.setting for _, summary in latest]
    tried = [*measured, *sweep.failures]
    if not tried:
        return "nothing was measured"
    varying = outcome.resolver.varying(sweep.settings)
    explicit = outcome.resolver.explicit(sweep.settings[0])
    common = ", ".join(f"{name} {value}" for name, value in explicit.items() if name not in varying)
    columns = ["share", "rate", "tokens/s", "TTFT ms p50/p99", "ITL ms p50/p99", "goals"]
    if outcome.predicted:
        columns[3:3] = ["predicted"]
        columns[-1:-1] = ["predicted"]
    rows = [["", *(SHORT[name] for name in varying), *columns]]
    for row, (share, summary) in enumerate(latest):
        mark = "->" if row == 0 and share == 1.0 else "  "
        own = [format_value(name, summary.setting.options.get(name, "-")) for name in varying]
        note = "  (the defaults)" if summary.setting == sweep.settings[0] else ""
        rows.append([mark, *own, *_figures(outcome, share, summary), _kept(outcome.goals, summary) + note])
    lines = [format_rows(rows)]
    lines += [
        f"   {format_options(setting.options, varying)}: failed: {_short(why)}"
        for setting, why in sweep.failures.items()
    ]
    lines += [
        f"   {format_options(options, list(options))}: refused: {why}"
        for options, why in outcome.refused[:MOST_REFUSED]
    ]
    if len(outcome.refused) > MOST_REFUSED:
        lines.append(f"   and {len(outcome.refused) - MOST_REFUSED} more refused combinations")
    return "\n".join([f"all: {common}" if common else "", *lines]).lstrip("\n")


def _figures(outcome: Outcome, share: float, summary: SettingSummary) -> Iterator[str]:
    best = summary.best
    predicted = outcome.predicted.get(summary.setting)
    expected = next((p for p in predicted.points if p["rate"] == best["rate"]), None) if predicted else None
    yield "all" if share == 1.0 else f"{share:.3g}"
    yield "-" if best["rate"] is None else f"{best['rate']:g}"
    yield f"{summary.tokens_per_second:.0f}"
    if outcome.predicted:
        yield f"{expected['output_tokens_per_second']:.0f}" if expected else "-"
    yield _tails(best["ttft"])
    yield _tails(best["itl"])
    if outcome.predicted:
        yield _tails(expected["itl"]) if expected else "-"


def line(setting: Setting, names: list[str], share: float, runs: list[Run] | None) -> str:
    """Format a measurement as one line, with the options in `names`; `runs` is None if it failed."""
    head = f"{format_options(setting.options, names)}, {share:.3g} of the workload: "
    if runs is None:
        return head + "failed"
    return head + "; ".join(map(_run, runs))


def _run(run: Run) -> str:
    rate = "" if run["rate"] is None else f"at {run['rate']:g}/s "
    tails = ", ".join(f"{time.upper()} p99 {1e3 * run[time]['p99']:.0f} ms" for time in TIMES if run[time])
    return f"{rate}{run['output_tokens_per_second']:.0f} tokens/s, {tails}"


def _tails(latency: dict[str, float] | None) -> str:
    return "-" if latency is None else f"{1e3 * latency['p50']:.0f} / {1e3 * latency['p99']:.0f}"


def _kept(goals: list[Goal], summary: SettingSummary) -> str:
    if not goals:
        return "-"
    missed = [f"{goal.name} +{goal.excess(summary.best):.0%}" for goal in goals if goal.excess(summary.best) > 0.0]
    return ", ".join(missed) or "kept"


def format_options(options: dict[str, Any], names: list[str]) -> str:
    """Format the options in `names` with short names."""
    given = (name for name in names if name in options)
    return ", ".join(f"{SHORT[name]} {format_value(name, options[name])}" for name in given) or "the only setting"


def _short(reason: str) -> str:
    """Return the first and last line of an engine's error."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    if lines[0].endswith("-9"):
        lines[0] += " (killed, possibly out of memory)"
    return "; ".join(dict.fromkeys([lines[0], lines[-1]]))


# ----------------------------------------------------------------------------------------------------- recommendation


def advice(outcome: Outcome) -> str:
    """Format the recommended setting and its reason."""
    finalists = outcome.sweep.finalists()
    if not finalists:
        return "no setting was measured on the whole workload."
    best = finalists[0]
    flags = outcome.resolver.flags(best.setting)
    is_found = outcome.found is not None and outcome.found.rate is not None  # it may be below all compared rates
    verdict = "recommended" if best.keeps_goals or is_found else "no setting keeps the goals; the nearest"
    lines = [f"{verdict}: {flags}", f"because: {reason(outcome, finalists)}"]
    if outcome.found is not None:
        lines.append(outcome.found.sentence)
    if (answer := outcome.by_goal) is not None:
        lines.append(answer.sentence)
    return "\n".join([*lines, *_remarks(outcome, finalists)])


def reason(outcome: Outcome, finalists: list[SettingSummary]) -> str:
    """Return the reason for the first finalist, in one sentence of figures."""
    best = finalists[0]
    goals = outcome.goals
    achieved = _throughput(best)
    limits = " and ".join(f"{goal} ({_milliseconds(goal, best)})" for goal in goals)
    if not best.keeps_goals:
        worst = max(goals, key=lambda goal: goal.excess(best.best))
        return (
            f"of {len(finalists)} settings measured on the whole workload it comes nearest, with {achieved}: "
            f"{worst.name} is {_milliseconds(worst, best)}, {best.excess:.0%} above the goal of "
            f"{1e3 * worst.limit:g} ms"
        )
    keeping = [summary for summary in finalists if summary.keeps_goals]
    equal = [s for s in keeping if s.tokens_per_second >= (1.0 - EQUAL) * max(k.tokens_per_second for k in keeping)]
    kept = f" that keep {limits}" if goals else ""
    if len(keeping) == 1 < len(finalists):
        why = f"of {len(finalists)} settings measured on the whole workload it alone keeps {limits}, with {achieved}"
    elif len(equal) > 1:
        by = "is furthest below the limits" if goals else "has the lowest ITL p99"
        why = (
            f"{achieved}, and of {len(keeping)} settings measured on the whole workload{kept} the {len(equal)} with "
            f"most tokens/s differ by less than {EQUAL:.0%}; it {by}"
        )
    else:
        why = f"{achieved} is the most of {len(keeping)} settings measured on the whole workload{kept}"
    return why + _against_defaults(outcome, best)


def _against_defaults(outcome: Outcome, best: SettingSummary) -> str:
    first = outcome.sweep.settings[0]
    if best.setting == first:
        return "; these are the defaults"
    defaults = next((s for s in outcome.sweep.finalists() if s.setting == first), None)
    if defaults is None:
        return "; the defaults could not be measured"
    ratio = best.tokens_per_second / defaults.tokens_per_second - 1.0
    missed = "" if defaults.keeps_goals else f", which miss the goals ({_kept(outcome.goals, defaults)})"
    than = f"{abs(ratio):.1%} {'more' if ratio >= 0.0 else 'less'} than the defaults ({_throughput(defaults)})"
    return f"; {than}{missed}"


def _throughput(summary: SettingSummary) -> str:
    arrivals = "" if summary.best["rate"] is None else f" at {summary.best['rate']:g} requests/s"
    return f"{summary.tokens_per_second:.0f} tokens/s{arrivals}"


def _milliseconds(goal: Goal, summary: SettingSummary) -> str:
    return f"{1e3 * goal.value(summary.best):.3g} ms"


def _remarks(outcome: Outcome, finalists: list[SettingSummary]) -> Iterator[str]:
    best = finalists[0]
    rates = rates_of_repeats(outcome, best)
    if len(rates) > 1:
        bounds = f"{min(rates):.0f} to {max(rates):.0f} tokens/s"
        repeated = f"measured {len(rates)} times: {bounds}, {_difference(rates):.1%} apart"
        is_last = len(rates) > outcome.sweep.repeats  # the final run may belong to a setting that was the best before
        yield repeated + (f"; first {rates[0]:.0f}, last, after all others, {rates[-1]:.0f}" if is_last else "")
    if (apart := max(_apart(outcome, summary) for summary in finalists)) > DISTURBED:
        yield (
            f"repeated measurements of a setting differ by up to {apart:.0%}: the machine was not idle, and smaller "
            "differences mean nothing; measure again on an idle machine, with another --output"
        )
    fastest = [max(s.points, key=lambda p: p["rate"] or 0.0)["output_tokens_per_second"] for s in finalists]
    if best.best["rate"] is not None and len(finalists) > 1 and min(fastest) >= (1.0 - EQUAL) * max(fastest):
        yield (
            f"at the highest arrival rate all finalists differ by less than {EQUAL:.0%}: the arrivals or the machine "
            "bound them; a higher --rate shows which"
        )
    if outcome.predicted:
        yield from _certainty(outcome, best)
        yield _accuracy(outcome, finalists)


def _apart(outcome: Outcome, summary: SettingSummary) -> float:
    """Return the largest relative difference between repeats of a setting, over its arrival rates."""
    repeats = outcome.sweep.results[summary.setting][1.0]
    return max(_difference([run["output_tokens_per_second"] for run in runs]) for runs in zip(*repeats, strict=True))


def _difference(rates: list[float]) -> float:
    return (max(rates) - min(rates)) / min(rates)


def rates_of_repeats(outcome: Outcome, summary: SettingSummary) -> list[float]:
    """Return tokens/s of each repeat at the best arrival rate, in order of measurement."""
    repeats = outcome.sweep.results[summary.setting][1.0]
    return [run["output_tokens_per_second"] for runs in repeats for run in runs if run["rate"] == summary.best["rate"]]


def _certainty(outcome: Outcome, best: SettingSummary) -> Iterator[str]:
    """Yield how far the forecasts may be off, of the recommended setting."""
    if outcome.fit_error is not None:
        yield f"forecasts are within {outcome.fit_error:.0%} if the steps are (p90 of the calibration's fit)"
    predicted = outcome.predicted.get(best.setting)
    expected = next((p for p in predicted.points if p["rate"] == best.best["rate"]), None) if predicted else None
    if expected is not None and (note := warning(expected.get("utilisation"))) is not None:
        yield note


def _accuracy(outcome: Outcome, finalists: list[SettingSummary]) -> str:
    rates = []
    tails = []
    for summary in finalists:
        predicted = outcome.predicted.get(summary.setting)
        for expected, point in zip(predicted.points if predicted else (), summary.points, strict=False):
            rates.append(abs(expected["output_tokens_per_second"] / point["output_tokens_per_second"] - 1.0))
            if point["itl"]:
                tails.append(abs(expected["itl"]["p99"] / point["itl"]["p99"] - 1.0))
    worst = f", and on ITL p99 by {max(tails):.0%}" if tails else ""
    return f"forecasts of {len(rates)} runs were off by at most {max(rates, default=0.0):.0%} on tokens/s{worst}"
