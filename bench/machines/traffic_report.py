"""Results of the traffic benchmark as a file and as Markdown tables with ratios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COUNTED = ("captures", "captures, request unfinished", "pauses", "pauses, ms in all", "longest pause, ms")
OVERALL = dict(zip(COUNTED, (sum, sum, sum, sum, max), strict=True))  # of all cases

Cell = float | str | None


class Results:
    """Figures by part, case and engine; written to a file after each change.

    about: what all parts have in common, such as the device.
    failures: (part, engine, reason).
    """

    def __init__(self, engines: list[str], path: Path | None = None) -> None:
        self.about: dict[str, Any] = {}
        self.seconds: dict[str, dict[str, float]] = {}
        self.failures: list[tuple[str, str, str]] = []
        self._engines = engines
        self._figures: dict[str, dict[str, dict[str, dict[str, Cell]]]] = {}  # part -> case -> figure -> engine
        self._path = path

    def add(self, part: str, case: str, engine: str, figures: dict[str, Cell]) -> None:
        cells = self._figures.setdefault(part, {}).setdefault(case, {})
        for figure, value in figures.items():
            cells.setdefault(figure, {})[engine] = value
            if figure == "failed":
                self.failures.append((f"{part}: {case}", engine, str(value)))
        self.write()

    def ratios(self, part: str, case: str, engine: str) -> list[str]:
        """The first engine's figures and another one's with their ratio, where both are there."""
        first = self._engines[0]
        cells = self._figures.get(part, {}).get(case, {})
        return [
            f"{figure}: {first} {formatted(values[first])} / {engine} {formatted(values[engine])}"
            f" = {ratio(values[first], values[engine])}"
            for figure, values in cells.items()
            if engine != first and first in values and engine in values
        ]

    def ended(self, part: str, engine: str, seconds: float) -> None:
        self.seconds.setdefault(part, {})[engine] = seconds
        self.write()

    def write(self) -> None:
        if self._path:
            content = {
                "about": self.about, "figures": self._figures, "part_seconds": self.seconds, "failures": self.failures
            }  # fmt: skip
            self._path.write_text(json.dumps(content, indent=1), encoding="utf-8")

    def markdown(self) -> str:
        """Format all figures as tables, a part each; counters that are 0 appear in the part's sum alone."""
        text = [self._head(), *map(self._table, self._figures)]
        if self.failures:
            lines = [f"- {part}, {engine}: {' '.join(reason.split())}" for part, engine, reason in self.failures]
            text.append("\n".join(["Failed:", "", *lines]))
        return "\n\n".join(text)

    def _head(self) -> str:
        """What ran where."""
        environment = self.about.get("environment", {})
        device = environment.get("gpu") or environment.get("processor", "an unknown device")
        versions = [f"{name} {environment[name]}" for name in ("nanovllm", "torch") if name in environment]
        versions += [f"{key} {value}" for key, value in self.about.items() if key.endswith(" version")]
        copy = f"copy {self.about.get('copy_rate', 0.0) / 1e12:.3g} TB/s"
        return ", ".join([device, *versions, copy])

    def _table(self, part: str) -> str:
        first, *others = self._engines
        head = ["case", "figure", *self._engines, *(f"{first} / {other}" for other in others)]
        rows = [head, ["---"] * len(head)]
        for case, cells in self._figures[part].items():
            for figure, values in cells.items():
                if figure not in COUNTED or any(values.values()):
                    rows.append([case, figure, *self._cells(values)])
        for figure in COUNTED:
            if overall := self._overall(part, figure):
                rows.append(["**all cases**", figure, *self._cells(overall)])
        if part in self.seconds:
            rows.append(["**whole part**", "wall time, s", *self._cells(dict(self.seconds[part]))])
        return "\n".join([f"## {part}", "", *(f"| {' | '.join(row)} |" for row in rows)])

    def _overall(self, part: str, figure: str) -> dict[str, Cell]:
        """A counter's sum, or the longest pause, over all cases."""
        overall: dict[str, Cell] = {}
        for engine in self._engines:
            found = [cells[figure][engine] for cells in self._figures[part].values() if engine in cells.get(figure, {})]
            if found:
                overall[engine] = OVERALL[figure](value for value in found if isinstance(value, (int, float)))
        return overall

    def _cells(self, values: dict[str, Cell]) -> list[str]:
        first, *others = self._engines
        return [
            *(formatted(values.get(engine)) for engine in self._engines),
            *(ratio(values.get(first), values.get(other)) for other in others),
        ]


def formatted(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return "failed"
    if float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def ratio(ours: Cell, theirs: Cell) -> str:
    if isinstance(ours, str) or isinstance(theirs, str) or ours is None or not theirs:
        return "-"
    return f"{ours / theirs:.2f}"
