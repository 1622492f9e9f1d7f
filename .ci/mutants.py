"""Applies each mutant of a fixed list to a copy of the project, and fails where the tests that must kill it pass.

    python .ci/mutants.py [--only WORD] [--jobs N] [--check]

A mutant is a mistake that a maintainer could make. `.ci/mutants/AREA.toml` lists those of an area:

    [[mutant]]
    name = "A released block keeps its last reference"        # what is wrong, as a sentence
    file = "nanovllm/block_manager.py"
    old = '''text that occurs exactly once in the file'''
    new = '''text in its place'''
    tests = ["tests/engine/test_block_manager.py::test_name"]  # functions of the default tier that must kill it

The unmutated copy has to pass the tests first. Each run is a fork of a process that has imported torch and pytest, and
nothing of the package.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# What most tests import, so that a run need not: each takes up to 4 s.
IMPORTS = ("pytest", "hypothesis", "torch", "torch._dynamo", "transformers.models.llama.modeling_llama", "tokenizers")
TIMEOUT_SECONDS = 120
DEFAULT_TIER = "not slow and not full"


@dataclass(frozen=True)
class Mutant:
    """One mistake in one file, and tests of which one must fail by it; no file means the unmutated project."""

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """End of a run: pytest's status, or None for one that was killed after the time limit."""

    status: int | None
    seconds: float
    passed: list[str]
    failed: list[str]
    output: str

    @property
    def is_kill(self) -> bool:
        return self.status is None or bool(self.failed)


def read_mutants(root: Path) -> list[Mutant]:
    """Mutants of all areas; ValueError for a table without exactly the keys of one."""
    expected = {field.name for field in fields(Mutant)} - {"area"}
    mutants = []
    for path in sorted((root / ".ci" / "mutants").glob("*.toml")):
        for table in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
            if set(table) != expected:
                raise ValueError(f"{path.name}: a mutant has the keys {sorted(table)}, not {sorted(expected)}: {table}")
            mutants.append(Mutant(path.stem, **table | {"tests": tuple(table["tests"])}))
    return mutants


# ----------------------------------------------------------------------------------------------------------- check


@cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def test_names(path: Path) -> frozenset[str]:
    """`function` and `Class::function` of a test file, without those that the default tier leaves out."""
    names = set()
    for node in ast.parse(source(path)).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names |= {prefix + found.name for found in inner if is_of_default_tier(found)}
    return frozenset(names)


def is_of_default_tier(found: ast.stmt) -> bool:
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not {"pytest.mark.full", "pytest.mark.slow"} & {ast.unparse(mark) for mark in found.decorator_list}


def problems_of(mutant: Mutant, root: Path) -> Iterator[str]:
    """What keeps a mutant from being run."""
    path = root / mutant.file
    if not path.is_file():
        yield f"{mutant.file} does not exist"
    elif (num_places := source(path).count(mutant.old)) != 1:
        yield f"its old text occurs {num_places} times in {mutant.file}"
    elif mutant.new == mutant.old:
        yield "its new text is the old one"
    if not mutant.tests:
        yield "it names no test"
    for test in mutant.tests:
        file, _, function = test.partition("::")
        if "[" in test:
            yield f"{test} names a case: name the function, whose case of the default tier runs"
        elif not (root / file).is_file() or function not in test_names(root / file):
            yield f"{test} does not exist in the default tier"


def problems(mutants: list[Mutant], root: Path) -> list[str]:
    """What is wrong with the list itself, by the mutants' names."""
    found = [f"{mutant.area}: {mutant.name}: {problem}" for mutant in mutants for problem in problems_of(mutant, root)]
    names = [mutant.name for mutant in mutants]
    return found + [f"two mutants are called {name!r}" for name in sorted({n for n in names if names.count(n) > 1})]


def syntax_errors(mutants: list[Mutant], root: Path) -> Iterator[str]:
    """Mutants that are no Python: every test that imports them would fail."""
    for mutant in mutants:
        try:
            if mutant.file.endswith(".py"):
                ast.parse(source(root / mutant.file).replace(mutant.old, mutant.new))
        except SyntaxError as error:
            yield f"{mutant.area}: {mutant.name}: {mutant.file} with it is no Python: {error}"


# ------------------------------------------------------------------------------------------------------------ runs


def copy_project(root: Path, folder: Path) -> None:
    """The files that git tracks or would, as they are in the working tree, with their times."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(command, cwd=root, text=True).split("\0"):
        if name and (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)


class Outcomes:
    """Plugin of pytest: functions with a case that passed, and reports of cases that failed."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid.partition("[")[0])


def run_tests(folder: Path, tests: Iterable[str], options: list[str]) -> None:
    """Run tests in this process, a fork, and end it; outcomes.json beside the folder has what became of them."""
    import pytest

    os.setsid()
    os.chdir(folder)
    output = os.open(f"{folder}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path[0] = os.environ["PYTHONPATH"] = str(folder)
    outcomes = Outcomes()
    command = ["-q", "-p", "no:cacheprovider", "-m", DEFAULT_TIER, "--tb=short", *options, *tests]
    status = pytest.main(command, plugins=[outcomes])
    Path(f"{folder}.json").write_text(json.dumps(vars(outcomes)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Run:
    """A mutant applied to a worker's folder, and the process with its tests."""

    def __init__(self, mutant: Mutant, folder: Path) -> None:
        self.mutant = mutant
        self.folder = folder
        self.started = time.monotonic()
        self.path = folder / mutant.file
        self.text = self.path.read_text(encoding="utf-8") if mutant.file else ""
        Path(f"{folder}.json").unlink(missing_ok=True)
        if mutant.file:
            self._write(self.text.replace(mutant.old, mutant.new), num_later_seconds=10)
        # Bytecode of unmutated files is worth keeping; that of a mutant would be read by the next run.
        sys.dont_write_bytecode = bool(mutant.file)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1" if mutant.file else ""
        self.process = os.fork()
        if self.process == 0:
            run_tests(folder, mutant.tests, ["-x"] if mutant.file else [])

    def _write(self, text: str, num_later_seconds: int) -> None:
        """Write the mutated file with another time than its bytecode has, or again with the same."""
        modified = self.path.stat().st_mtime + num_later_seconds
        self.path.write_text(text, encoding="utf-8")
        os.utime(self.path, (modified, modified))

    def result(self) -> Result | None:
        """End of the run, with the file as before; None while it lasts."""
        seconds = time.monotonic() - self.started
        ended, status = os.waitpid(self.process, os.WNOHANG)
        is_late = seconds > TIMEOUT_SECONDS and bool(self.mutant.file)
        if not ended and not is_late:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)  # and what its tests have started and left
        if not ended:
            os.waitpid(self.process, 0)
        if self.mutant.file:
            self._write(self.text, num_later_seconds=-10)
        outcomes = Path(f"{self.folder}.json")
        found = json.loads(outcomes.read_text()) if outcomes.is_file() else {"passed": [], "failed": []}
        output = Path(f"{self.folder}.txt").read_text(encoding="utf-8", errors="replace")
        return Result(os.waitstatus_to_exitcode(status) if ended else None, seconds, **found, output=output)


def run_all(mutants: Iterable[Mutant], folders: list[Path]) -> Iterator[tuple[Mutant, Result]]:
    """Each mutant and its result, as they end; a folder has one at a time."""
    pending = deque(mutants)
    free = list(folders)
    running: list[Run] = []
    while pending or running:
        while pending and free:
            running.append(Run(pending.popleft(), free.pop()))
        for run in list(running):
            if (result := run.result()) is not None:
                running.remove(run)
                free.append(run.folder)
                yield run.mutant, result
        time.sleep(0.02)


def failures_without_mutants(mutants: list[Mutant], folders: list[Path]) -> list[str]:
    """Tests that a mutant names and that do not pass by themselves, with what pytest says of their file."""
    by_file: dict[str, set[str]] = {}
    for test in (test for mutant in mutants for test in mutant.tests):
        by_file.setdefault(test.partition("::")[0], set()).add(test)
    runs = [Mutant("", file, "", "", "", tuple(sorted(tests))) for file, tests in by_file.items()]
    found = []
    for run, result in run_all(runs, folders):
        wrong = sorted({*result.failed, *run.tests} - {*result.passed} if result.status == 0 else {*run.tests})
        found += [f"unmutated, these do not pass: {', '.join(wrong)}\n{result.output}"] if wrong else []
    return found


def verdict(result: Result) -> str:
    """What a mutant's line says of its run."""
    if result.status is None:
        return f"killed by the time limit of {TIMEOUT_SECONDS} s"
    if result.failed:
        return f"killed by {result.failed[0].rpartition('/')[2]}"
    return "SURVIVED" if result.status == 0 else f"NOT RUN, status {result.status}\n{result.output}"


def run_mutants(mutants: list[Mutant], root: Path, num_jobs: int) -> int:
    """Prints a line a mutant; returns how many survived, or could not be judged."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folders = [Path(name).resolve() / f"worker{number}" for number in range(num_jobs)]
        for folder in folders:
            copy_project(root, folder)
        if failures := failures_without_mutants(mutants, folders):
            print(*failures, sep="\n")
            return len(failures)
        num_alive = 0
        for mutant, result in run_all(mutants, folders):
            num_alive += not result.is_kill
            print(f"{mutant.area}: {mutant.name}: {verdict(result)}, {result.seconds:.1f} s", flush=True)
    print(f"{len(mutants) - num_alive} of {len(mutants)} mutants killed")
    return num_alive


def main(arguments: list[str], root: Path = ROOT, imports: tuple[str, ...] = IMPORTS) -> int:
    """Exit status: 1 for a list that does not apply, and for a mutant that survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="mutants with this in their area, name or file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once; default: the cores")
    parser.add_argument("--check", action="store_true", help="only whether texts apply and tests exist")
    options = parser.parse_args(arguments)
    mutants = [
        mutant
        for mutant in read_mutants(root)
        if options.only.lower() in f"{mutant.area} {mutant.name} {mutant.file}".lower()
    ]
    found = problems(mutants, root)
    if not mutants:
        found.append(f"no mutant has {options.only!r} in its area, name or file")
    if not (found or options.check):
        found.extend(syntax_errors(mutants, root))
    print(*found, sep="\n", end="\n" if found else "")
    if found or options.check:
        return bool(found)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in imports:
        importlib.import_module(module)
    return bool(run_mutants(mutants, root, options.jobs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
