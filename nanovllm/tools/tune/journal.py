"""Journal of a sweep as JSON lines: the question first, then each measurement when it is done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanovllm.tools.tune.halving import MeasurementError
from nanovllm.tools.tune.ranking import Run
from nanovllm.tools.tune.settings import Setting

FORMAT = 1
OF_OTHER_ENGINES = ("vllm", "llama-cpp-python")  # packages of an environment without effect here


class Journal:
    """Measurements of one question, in a file.

    A question is the fixed part of a measurement: model, workload, common engine options. Measurements are keyed by
    setting, share, arrival rates and repeat, so goals and values may change between runs of the command.
    """

    def __init__(self, path: Path, question: dict[str, Any], *, retry: bool = False) -> None:
        """Open or create a journal.

        Args:
            question: JSON values.
            retry: ignore failed measurements.

        Raises ValueError for a journal of another question, naming the differences, or for any other file.
        """
        self.path = path
        self._question = json.loads(json.dumps({"format": FORMAT} | question))
        self._entries: dict[str, dict[str, Any]] = {}
        self.environment: dict[str, Any] | None = None
        first = {"question": self._question}
        lines = _whole_lines(path, json.dumps(first)) if path.exists() else []
        if lines:
            self._check_question(lines[0])
            for line in lines[1:]:
                if not (retry and "failed" in line):
                    self._record(line)
        else:
            self._write(first)

    def find(self, setting: Setting, share: float, rates: list[float | None], repeat: int) -> list[Run] | None:
        """Return a measurement's runs, None without one; raises MeasurementError if it failed."""
        entry = self._entries.get(_key(setting.options, share, rates, repeat))
        if entry is None:
            return None
        if "failed" in entry:
            raise MeasurementError(entry["failed"])
        runs: list[Run] = entry["runs"]
        return runs

    def add(self, setting: Setting, share: float, rates: list[float | None], repeat: int, **outcome: Any) -> None:
        """Append a measurement: `runs`, or `failed` with the reason.

        Raises ValueError for runs on other hardware or versions than earlier ones.
        """
        entry = {"setting": setting.options, "share": share, "rates": rates, "repeat": repeat, **outcome}
        if "runs" in entry:
            self.check_environment(entry["runs"][0]["environment"])
        self._write(entry)
        self._record(entry)

    def check_environment(self, environment: dict[str, Any]) -> None:
        """Raise ValueError if hardware or versions differ from those of the journal."""
        known = {
            name: value for name, value in environment.items() if value is not None and name not in OF_OTHER_ENGINES
        }
        before = self.environment or known
        self._refuse_differences({name: before.get(name) for name in known}, known)

    def _check_question(self, line: dict[str, Any]) -> None:
        question = line.get("question")
        if not isinstance(question, dict):
            raise ValueError(f"{str(self.path)!r} is no record of `nanovllm tune`. Name another folder with --output.")
        self._refuse_differences(question, self._question)

    def _refuse_differences(self, there: dict[str, Any], here: dict[str, Any]) -> None:
        differences = list(_differences(there, here))
        if differences:
            raise ValueError(
                f"{str(self.path)!r} holds measurements of another question, which cannot be compared: "
                f"{'; '.join(differences)}. Name another folder with --output, or delete that file."
            )

    def _record(self, entry: dict[str, Any]) -> None:
        key = _key(entry["setting"], entry["share"], entry["rates"], entry["repeat"])
        self._entries[key] = entry
        if "runs" in entry and self.environment is None:
            self.environment = entry["runs"][0]["environment"]

    def _write(self, entry: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _key(options: dict[str, int], share: float, rates: list[float | None], repeat: int) -> str:
    return json.dumps([sorted(options.items()), share, rates, repeat])


def _whole_lines(path: Path, first: str) -> list[dict[str, Any]]:
    """Read the lines of a journal; an incomplete last line, say after a full disk, is removed from the file.

    Args:
        first: first line of this sweep's journal; an incomplete first line must be a prefix of it.

    Raises ValueError for any other file, which stays unchanged.
    """
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
        if not all(isinstance(line, dict) for line in lines) or (not lines and not first.startswith(text)):
            raise ValueError("a line is not a JSON object")
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r} is no record of `nanovllm tune` ({error}). Name another folder with --output."
        ) from error
    if whole != text:
        with open(path, "r+b") as file:
            file.truncate(len(whole.encode("utf-8")))
    return lines


def _differences(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a line per differing value, by its path."""
    for name in dict.fromkeys([*there, *here]):
        left = there.get(name)
        right = here.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from _differences(left, right, f"{prefix}{name}.")
        elif left != right:
            yield f"{prefix}{name} was {left}, and is {right}"
