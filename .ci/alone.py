"""Copies the engine's files alone into an empty package, and runs tests/engine on the copy.

    python .ci/alone.py [--lines] [PYTEST OPTIONS]

Prints the share of the branches of each file that tests reach; `--lines` adds those that they do not.
What the copy lacks, the engine cannot need: no other file of the package can be imported there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import copy, copytree, ignore_patterns
from typing import Any, NamedTuple

from sources import COMPOSITION_ROOT, ENTRIES, PACKAGE, ROOT, closure

INIT = '''"""The engine alone."""

from nanovllm.sampling_params import SamplingParams
from nanovllm.llm import LLM

__all__ = ["LLM", "SamplingParams"]
'''


class Reached(NamedTuple):
    """Branches of a file, how many of them tests reach, and the lines from which the others leave."""

    num_branches: int
    num_reached: int
    unreached: list[tuple[int, int]]


def copy_engine(folder: Path) -> None:
    """The engine's files as package `nanovllm` of a folder, and their tests beside it."""
    package = folder / "nanovllm"
    for path in (*closure(ENTRIES, without=(COMPOSITION_ROOT,)), PACKAGE / "build.py"):
        target = package / path.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        copy(path, target)
    (package / "__init__.py").write_text(INIT)
    copytree(ROOT / "tests" / "engine", folder / "tests" / "engine", ignore=ignore_patterns("__pycache__"))


def run_tests(folder: Path, options: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the copy's tests with only the copy importable, and measure branches."""
    settings = folder / "coverage.ini"
    settings.write_text(f"[run]\nbranch = True\nsource = {folder / 'nanovllm'}\ndata_file = {folder / 'data'}\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", "--import-mode=importlib", "tests/engine", *options]
    return subprocess.run(
        command, cwd=folder, env=environment | {"PYTHONPATH": str(folder)}, text=True, stdout=sys.stderr
    )


def reached(folder: Path) -> dict[str, Reached]:
    """Branches by file, as `coverage` reports them; build.py, which knows every capability, does not count."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "coverage", "json", f"--rcfile={folder / 'coverage.ini'}", "-q", "-o", str(report)]
    subprocess.run(command, cwd=folder, check=True)
    files: dict[str, Any] = json.loads(report.read_text())["files"]
    return {
        name.removeprefix("nanovllm/"): Reached(
            file["summary"]["num_branches"],
            file["summary"]["covered_branches"],
            [(start, end) for start, end in file["missing_branches"]],
        )
        for name, file in files.items()
        if name != "nanovllm/build.py"
    }


def measure(options: list[str]) -> tuple[bool, dict[str, Reached]]:
    """Whether the tests pass on the copy, and the branches that they reach in each file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_engine(folder)
        run = run_tests(folder, options)
        return run.returncode == 0, reached(folder)


def share_reached(files: dict[str, Reached]) -> float:
    """Percentage of the branches of all files."""
    return 100 * sum(f.num_reached for f in files.values()) / sum(f.num_branches for f in files.values())


def main(arguments: list[str]) -> int:
    has_passed, files = measure([argument for argument in arguments if argument != "--lines"])
    for file, of_file in sorted(files.items(), key=lambda item: item[1].num_reached - item[1].num_branches):
        print(f"{file}: {of_file.num_reached} of {of_file.num_branches} branches")
        if "--lines" in arguments and of_file.unreached:
            print("    ", " ".join(f"{start}->{end}" for start, end in of_file.unreached))
    print(f"reached: {share_reached(files):.1f} % of the branches; tests {'passed' if has_passed else 'FAILED'}")
    return not has_passed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
