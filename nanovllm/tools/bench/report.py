"""Benchmark results as tables: one result, or two compared."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Runs = list[dict[str, Any]]

# Figures of a comparison: path in a run, name, factor.
COMPARED = (
    ("output_tokens_per_second", "tokens/s", 1.0),
    ("ttft.p50", "TTFT p50, s", 1.0),
    ("ttft.p99", "TTFT p99, s", 1.0),
    ("itl.p50", "ITL p50, ms", 1e3),
    ("itl.p99", "ITL p99, ms", 1e3),
    ("peak_memory_mib", "peak MiB", 1.0),
    ("load_seconds", "load, s", 1.0),
)


def table(result: dict[str, Any]) -> str:
    """Format one result: a line per workload and engine, medians over the repeats."""
    rows = [[
        "workload", "engine", "tokens/s (min-max)", "TTFT s mean/p50/p90/p99", "ITL ms mean/p50/p90/p99", "cached",
        "steps", "tokens/step", "peak MiB", "load s", "ratio",
    ]]  # fmt: skip
    first_rate: dict[str, float] = {}
    for (workload, engine), runs in grouped(result).items():
        rates = sorted(run["output_tokens_per_second"] for run in runs)
        rate = statistics.median(rates)
        ours = first_rate.setdefault(workload, rate)
        span = f" ({rates[0]:.0f}-{rates[-1]:.0f})" if len(rates) > 1 else ""
        rows.append([
            workload, engine, f"{rate:.0f}{span}",
            _percentiles(runs, "ttft", 1.0, 2), _percentiles(runs, "itl", 1e3, 1),
            _number(median(runs, "cached_tokens"), 0), _number(median(runs, "steps"), 0),
            _number(median(runs, "tokens_per_step"), 1), _number(median(runs, "peak_memory_mib"), 0),
            _number(median(runs, "load_seconds"), 1), f"{ours / rate:.2f}",
        ])  # fmt: skip
    parts = [part for run in result["runs"] if "parts" in run for part in ("", _parts(run))]
    return "\n".join([format_rows(rows), *parts])


def line(run: dict[str, Any]) -> str:
    """Format the figures of one run as one line."""
    tails = [
        f"{time.upper()} p50 {1e3 * run[time]['p50']:.0f} ms, p99 {1e3 * run[time]['p99']:.0f} ms"
        for time in ("ttft", "itl")
        if run[time]
    ]
    return ", ".join([f"{run['output_tokens_per_second']:.0f} tokens/s in {run['seconds']:.1f} s", *tails])


def compare(path_a: str, path_b: str) -> str:
    """Compare two results: ratios of the second to the first for common runs, and differing settings.

    Raises ValueError for a file that is no result of `nanovllm bench`, or without a common run.
    """
    a = load(path_a)
    b = load(path_b)
    runs_a = grouped(a)
    runs_b = grouped(b)
    rows = [["workload", "engine", "figure", path_a, path_b, "ratio"]]
    for key in (common := [key for key in runs_a if key in runs_b]):
        for figure, name, factor in COMPARED:
            left = median(runs_a[key], figure)
            right = median(runs_b[key], figure)
            if left is not None and right is not None:
                ratio = f"{right / left:.3f}" if left else "-"
                rows.append([*key, name, f"{left * factor:.4g}", f"{right * factor:.4g}", ratio])
    if not common:
        raise ValueError(f"{path_a} and {path_b} have no workload and engine in common.")
    alone = [
        f"only in {path}: {engine} on {workload}"
        for path, mine, theirs in ((path_a, runs_a, runs_b), (path_b, runs_b, runs_a))
        for workload, engine in mine
        if (workload, engine) not in theirs
    ]
    return "\n".join([format_rows(rows), *alone, *_differences(a, b, common)])


def load(path: str) -> dict[str, Any]:
    """Read a result file; raises ValueError for any other file."""
    try:
        result: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        grouped(result)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result of `nanovllm bench --json`: {error!r}") from error
    return result


def grouped(result: dict[str, Any]) -> dict[tuple[str, str], Runs]:
    """Group runs by workload and engine, ordered by workload."""
    groups: dict[tuple[str, str], Runs] = {}
    for workload in result["workloads"]:
        for run in result["runs"]:
            if run["workload"] == workload:
                groups.setdefault((workload, run["engine"]), []).append(run)
    return groups


def median(runs: Runs, figure: str) -> float | None:
    """Return the median of a figure such as "ttft.p50" over runs; None if a run lacks it."""
    values = []
    for run in runs:
        value: Any = run
        for key in figure.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            return None
        values.append(value)
    return float(statistics.median(values))


def _differences(a: dict[str, Any], b: dict[str, Any], common: list[tuple[str, str]]) -> Iterator[str]:
    """Yield a line per setting, version or hardware item that differs."""
    common_settings = ("model", "warm_ups", "sampling")
    sides = [("", {k: a.get(k) or None for k in common_settings}, {k: b.get(k) or None for k in common_settings})]
    sides += [(f"{name}: ", a["workloads"][name], b["workloads"][name]) for name in dict.fromkeys(w for w, _ in common)]
    runs_a = grouped(a)
    runs_b = grouped(b)
    engines = {engine: (workload, engine) for workload, engine in reversed(common)}
    for engine, key in engines.items():
        left = runs_a[key][-1]
        right = runs_b[key][-1]
        sides += [(f"{engine}: ", left.get(part) or {}, right.get(part) or {}) for part in ("environment", "config")]
    for label, left, right in sides:
        for name in dict.fromkeys([*left, *right]):
            if left.get(name) != right.get(name):
                yield f"differs: {label}{name}: {left.get(name)} | {right.get(name)}"


def _parts(run: dict[str, Any]) -> str:
    """Format the profile of a run's steps."""
    parts = run["parts"] | {"step": sum(run["parts"].values())}
    rows = [[f"part ({run['workload']})", "ms a step", "share"]]
    for part, seconds in parts.items():
        rows.append([part, f"{1e3 * seconds / run['steps']:.3f}", f"{seconds / parts['step']:.1%}"])
    return format_rows(rows)


def _percentiles(runs: Runs, figure: str, factor: float, digits: int) -> str:
    values = [median(runs, f"{figure}.{name}") for name in ("mean", "p50", "p90", "p99")]
    return " / ".join(_number(None if value is None else factor * value, digits) for value in values)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def format_rows(rows: list[list[str]]) -> str:
    """Format rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
