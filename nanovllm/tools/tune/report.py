"""What came of a sweep, to be read: a table, and a recommendation with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nanovllm.tools.bench.report import aligned
from nanovllm.tools.tune.goals import TIMES, Goal
from nanovllm.tools.tune.halving import Sweep
from nanovllm.tools.tune.ranking import EQUAL, Run, Standing
from nanovllm.tools.tune.settings import Resolver, Setting

MOST_REFUSED = 5  # rows of settings that the engine refuses by their numbers alone
DISTURBED = 0.1  # a larger spread between measurements of one setting is worth a warning
SHORT = {
    "max_num_batched_tokens": "budget", "max_num_seqs": "seqs", "block_size": "block",
    "max_num_partial_prefills": "partial", "max_long_partial_prefills": "long",
    "long_prefill_token_threshold": "threshold",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """A sweep, done or interrupted, with what it was asked.

    question: what all measurements have in common.
    refused: combinations of values that contradict one another, and why.
    predicted: the simulator's forecast of settings, if it was asked.
    """

    sweep: Sweep
    resolver: Resolver
    question: dict[str, Any]
    environment: dict[str, Any] | None
    refused: list[tuple[dict[str, int], str]]
    predicted: dict[Setting, Standing] = field(default_factory=dict)

    @property
    def goals(self) -> list[Goal]:
        return list(self.sweep.goals)

    def latest(self) -> list[tuple[float, Standing]]:
        """Each measured setting on the largest share that it came to.

        The finalists come first, then larger shares, and of a share the best first.
        """
        shares = sorted({share for of in self.sweep.results.values() for share in of}, reverse=True)
        rows = {standing.setting: (1.0, standing) for standing in self.sweep.finalists()}
        for share in shares:
            for standing in self.sweep.standings(share, self.sweep.settings):
                rows.setdefault(standing.setting, (share, standing))
        return list(rows.values())


# -------------------------------------------------------------------------------------------------------------- table


def table(outcome: Outcome) -> str:
    """A line for each setting; options that no two settings differ in stand above."""
    latest, sweep = outcome.latest(), outcome.sweep
    measured = [standing.setting for _, standing in latest]
    tried = [*measured, *sweep.failures]
    if not tried:
        return "nothing was measured"
    varying = outcome.resolver.varying(sweep.settings)
    told = outcome.resolver.told(sweep.settings[0])
    common = ", ".join(f"{name} {value}" for name, value in told.items() if name not in varying)
    columns = ["share", "rate", "tokens/s", "TTFT ms p50/p99", "ITL ms p50/p99", "goals"]
    if outcome.predicted:
        columns[3:3] = ["predicted"]
        columns[-1:-1] = ["predicted"]
    rows = [["", *(SHORT[name] for name in varying), *columns]]
    for place, (share, standing) in enumerate(latest):
        mark = "->" if place == 0 and share == 1.0 else "  "
        own = [str(standing.setting.options[name]) for name in varying]
        note = "  (the defaults)" if standing.setting == sweep.settings[0] else ""
        rows.append([mark, *own, *_figures(outcome, share, standing), _kept(outcome.goals, standing) + note])
    lines = [aligned(rows)]
    lines += [
        f"   {spelled(setting.options, varying)}: failed: {_short(why)}" for setting, why in sweep.failures.items()
    ]
    lines += [
        f"   {spelled(options, list(options))}: refused: {why}" for options, why in outcome.refused[:MOST_REFUSED]
    ]
    if len(outcome.refused) > MOST_REFUSED:
        lines.append(f"   and {len(outcome.refused) - MOST_REFUSED} more combinations that are refused")
    return "\n".join([f"all: {common}" if common else "", *lines]).lstrip("\n")


def _figures(outcome: Outcome, share: float, standing: Standing) -> Iterator[str]:
    best, predicted = standing.best, outcome.predicted.get(standing.setting)
    expected = next((p for p in predicted.points if p["rate"] == best["rate"]), None) if predicted else None
    yield "all" if share == 1.0 else f"{share:.3g}"
    yield "-" if best["rate"] is None else f"{best['rate']:g}"
    yield f"{standing.tokens_per_second:.0f}"
    if outcome.predicted:
        yield f"{expected['output_tokens_per_second']:.0f}" if expected else "-"
    yield _tails(best["ttft"])
    yield _tails(best["itl"])
    if outcome.predicted:
        yield _tails(expected["itl"]) if expected else "-"


def line(setting: Setting, names: list[str], share: float, runs: list[Run] | None) -> str:
    """A measurement in one line, as it comes, with the options that are named; None for one that failed."""
    told = f"{spelled(setting.options, names)}, {share:.3g} of the workload: "
    if runs is None:
        return told + "failed"
    return told + "; ".join(map(_run, runs))


def _run(run: Run) -> str:
    rate = "" if run["rate"] is None else f"at {run['rate']:g}/s "
    tails = ", ".join(f"{time.upper()} p99 {1e3 * run[time]['p99']:.0f} ms" for time in TIMES if run[time])
    return f"{rate}{run['output_tokens_per_second']:.0f} tokens/s, {tails}"


def _tails(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{1e3 * spread['p50']:.0f} / {1e3 * spread['p99']:.0f}"


def _kept(goals: list[Goal], standing: Standing) -> str:
    if not goals:
        return "-"
    missed = [f"{goal.name} +{goal.excess(standing.best):.0%}" for goal in goals if goal.excess(standing.best) > 0.0]
    return ", ".join(missed) or "kept"


def spelled(options: dict[str, int], names: list[str]) -> str:
    """The named options in few words."""
    return ", ".join(f"{SHORT[name]} {options[name]}" for name in names) or "the only setting"


def _short(reason: str) -> str:
    """The first and the last line of what an engine said."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    if lines[0].endswith("-9"):
        lines[0] += " (killed, as the system does when memory runs out)"
    return "; ".join(dict.fromkeys([lines[0], lines[-1]]))


# ----------------------------------------------------------------------------------------------------- recommendation


def advice(outcome: Outcome) -> str:
    """The setting to take, and why, in numbers."""
    finalists = outcome.sweep.finalists()
    if not finalists:
        return "no setting was measured on the whole workload."
    best = finalists[0]
    flags = outcome.resolver.flags(best.setting)
    verdict = "recommended" if best.keeps_goals else "no setting keeps the goals; the nearest"
    return "\n".join([f"{verdict}: {flags}", f"because: {reason(outcome, finalists)}", *_remarks(outcome, finalists)])


def reason(outcome: Outcome, finalists: list[Standing]) -> str:
    """Why the first of the finalists, in one sentence of numbers."""
    best, goals = finalists[0], outcome.goals
    told = _rate_of(best)
    limits = " and ".join(f"{goal} ({_milliseconds(goal, best)})" for goal in goals)
    if not best.keeps_goals:
        worst = max(goals, key=lambda goal: goal.excess(best.best))
        return (
            f"of {len(finalists)} settings measured on the whole workload it comes nearest, with {told}: {worst.name} "
            f"is {_milliseconds(worst, best)}, {best.excess:.0%} above the {1e3 * worst.limit:g} ms that were asked for"
        )
    keeping = [standing for standing in finalists if standing.keeps_goals]
    equal = [s for s in keeping if s.tokens_per_second >= (1.0 - EQUAL) * max(k.tokens_per_second for k in keeping)]
    kept = f" that keep {limits}" if goals else ""
    if len(keeping) == 1 < len(finalists):
        told = f"of {len(finalists)} settings measured on the whole workload it alone keeps {limits}, with {told}"
    elif len(equal) > 1:
        by = "is furthest from the limits" if goals else "has the lowest p99 between tokens"
        told = (
            f"{told}, and of {len(keeping)} settings measured on the whole workload{kept} the {len(equal)} with most "
            f"tokens/s differ by less than {EQUAL:.0%}; it {by}"
        )
    else:
        told = f"{told} is the most of {len(keeping)} settings measured on the whole workload{kept}"
    return told + _against_defaults(outcome, best)


def _against_defaults(outcome: Outcome, best: Standing) -> str:
    first = outcome.sweep.settings[0]
    if best.setting == first:
        return "; these are the defaults"
    defaults = next((s for s in outcome.sweep.finalists() if s.setting == first), None)
    if defaults is None:
        return "; the defaults could not be measured"
    ratio = best.tokens_per_second / defaults.tokens_per_second - 1.0
    missed = "" if defaults.keeps_goals else f", which miss the goals ({_kept(outcome.goals, defaults)})"
    than = f"{abs(ratio):.1%} {'more' if ratio >= 0.0 else 'less'} than the defaults ({_rate_of(defaults)})"
    return f"; {than}{missed}"


def _rate_of(standing: Standing) -> str:
    arrivals = "" if standing.best["rate"] is None else f" at {standing.best['rate']:g} requests/s"
    return f"{standing.tokens_per_second:.0f} tokens/s{arrivals}"


def _milliseconds(goal: Goal, standing: Standing) -> str:
    return f"{1e3 * goal.value(standing.best):.3g} ms"


def _remarks(outcome: Outcome, finalists: list[Standing]) -> Iterator[str]:
    best = finalists[0]
    rates = spread_of(outcome, best)
    if len(rates) > 1:
        told = f"measured {len(rates)} times: {min(rates):.0f} to {max(rates):.0f} tokens/s, {_spread(rates):.1%} apart"
        is_last = len(rates) > outcome.sweep.repeats  # else another one was best when the last run came
        yield told + (
            f"; the last time, after all others, {rates[-1]:.0f}, and {rates[0]:.0f} the first" if is_last else ""
        )
    if (apart := max(_apart(outcome, standing) for standing in finalists)) > DISTURBED:
        yield (
            f"the same setting came out up to {apart:.0%} apart when it was measured again: something else used the "
            "machine, and what differs by less means nothing; measure again, with another --output, when it is idle"
        )
    fastest = [max(s.points, key=lambda p: p["rate"] or 0.0)["output_tokens_per_second"] for s in finalists]
    if best.best["rate"] is not None and len(finalists) > 1 and min(fastest) >= (1.0 - EQUAL) * max(fastest):
        yield (
            f"at the highest rate of arrival all of them differ by less than {EQUAL:.0%}: the arrivals bound "
            "them, and a higher --rate would show more, or the machine does"
        )
    if outcome.predicted:
        yield _accuracy(outcome, finalists)


def _apart(outcome: Outcome, standing: Standing) -> float:
    """The largest spread of a setting's tokens a second, over its rates of arrival."""
    repeats = outcome.sweep.results[standing.setting][1.0]
    return max(_spread([run["output_tokens_per_second"] for run in runs]) for runs in zip(*repeats, strict=True))


def _spread(rates: list[float]) -> float:
    return (max(rates) - min(rates)) / min(rates)


def spread_of(outcome: Outcome, standing: Standing) -> list[float]:
    """Tokens a second of each repeat at the rate that counts, in the order in which they were measured."""
    repeats = outcome.sweep.results[standing.setting][1.0]
    return [run["output_tokens_per_second"] for runs in repeats for run in runs if run["rate"] == standing.best["rate"]]


def _accuracy(outcome: Outcome, finalists: list[Standing]) -> str:
    rates, tails = [], []
    for standing in finalists:
        predicted = outcome.predicted.get(standing.setting)
        for expected, point in zip(predicted.points if predicted else (), standing.points, strict=False):
            rates.append(abs(expected["output_tokens_per_second"] / point["output_tokens_per_second"] - 1.0))
            if point["itl"]:
                tails.append(abs(expected["itl"]["p99"] / point["itl"]["p99"] - 1.0))
    worst = f", p99 between tokens by {max(tails):.0%}" if tails else ""
    return f"forecasts of {len(rates)} runs were off by at most {max(rates, default=0.0):.0%} on tokens/s{worst}"
