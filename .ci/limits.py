"""Measures how large and how winding the project is, and fails where a figure exceeds its limit.

    python .ci/limits.py

A limit changes in a commit of its own, which says what fell by as much, or what was gained for it.
tests/test_architecture.py has the limits of single files, functions and signatures.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from alone import measure, share_reached
from capabilities import PAGE, differences
from sources import (
    COMPOSITION_ROOT,
    ENTRIES,
    NATIVE_SUFFIXES,
    PACKAGE,
    PAGE_SUFFIXES,
    ROOT,
    closure,
    engine_files,
    files,
    function_size,
    functions,
    num_code_lines,
    num_dialect_words,
    num_lines,
    num_lines_that_name_a_feature,
    num_loose_comments,
    num_loose_parameters,
    num_parallel_assignments,
    num_tokens,
)
from walk import default_walks

MAX_FUNCTION_TOKENS = 300
PYTHON = files(PACKAGE, {".py"})


def printed_by(script: str) -> str:
    """Output of a script beside this one, in a process that has imported nothing of the package."""
    return subprocess.check_output([sys.executable, str(Path(__file__).with_name(script))], cwd=ROOT, text=True)


def engine_figures() -> Iterator[tuple[str, float, float]]:
    """(name, figure, limit) of what a reader of the engine has to know."""
    reached = closure(ENTRIES, without=(COMPOSITION_ROOT,))
    yield "closure of the engine, functions' imports too: files", len(reached), 24
    yield "closure of the engine: lines", num_lines(reached), 6_866
    yield "closure of the engine: tokens", num_tokens(reached), 41_000
    yield "folders that the engine cannot do without", int(printed_by("deletions.py").split()[-1]), 0
    has_passed, branches = measure([])
    yield "the engine's files, copied alone, fail tests/engine", not has_passed, 0
    yield "branches of the engine's files that tests/engine leaves out, %", round(100 - share_reached(branches), 1), 4.2
    yield "modules that the plainest run imports", int(printed_by("plain_run.py")), 138
    yield "build.py: tokens", num_tokens([PACKAGE / "build.py"]), 2_348
    yield "lines of the engine's files that name a feature", num_lines_that_name_a_feature(engine_files()), 148
    for file, function, max_lines, max_tokens in (
        ("scheduler.py", "schedule", 28, 272),
        ("engine.py", "step", 31, 241),
        ("fast/gpu/cuda_graphs.py", "launch", 51, 575),
    ):
        num_function_lines, num_function_tokens = function_size(PACKAGE / file, function)
        yield f"{function} in {file}: lines", num_function_lines, max_lines
        yield f"{function} in {file}: tokens", num_function_tokens, max_tokens
    # Processors differ in the layers that they run fused, runs in the pieces of memory that a thread takes.
    limits = {"construction": (84, 441, 1_440), "one token": (35, 154, 86)}
    for name, walk in default_walks():
        for what, figure, limit in zip(
            ("files", "functions", "room changes"),
            (len(walk.files), len(walk.functions), walk.num_room_changes),
            limits[name],
            strict=True,
        ):
            yield f"walk of the default engine, {name}: {what}", figure, limit


def project_figures() -> Iterator[tuple[str, float, float]]:
    """(name, figure, limit) of everything that is kept."""
    yield "package: tokens", num_tokens(PYTHON), 570_400
    yield "tests: tokens", num_tokens(files(ROOT / "tests", {".py"})), 662_000
    yield "bench: tokens", num_tokens(files(ROOT / "bench", {".py"})), 58_800
    yield "native code: lines", num_lines(files(PACKAGE, NATIVE_SUFFIXES)), 9_422
    yield "pages: lines", num_lines(files(PACKAGE, PAGE_SUFFIXES)), 3_213
    yield "tokens in a line of code", round(num_tokens(PYTHON) / num_code_lines(PYTHON), 2), 9.82
    parallel = 1_000 * num_parallel_assignments(PYTHON) / num_code_lines(PYTHON)
    yield "parallel assignments in 1,000 lines of code", round(parallel, 1), 4
    sizes = [tokens for path in PYTHON for _, _, tokens in functions(path)]
    yield f"functions of over {MAX_FUNCTION_TOKENS} tokens", sum(size > MAX_FUNCTION_TOKENS for size in sizes), 159
    yield "stale rows of docs/capabilities.md", len(differences(PAGE.read_text(encoding="utf-8"))), 0
    names = [path for path in PACKAGE.iterdir() if path.name not in ("__init__.py", "__pycache__")]
    yield "names at the top of the package", len(names), 36
    yield "parameters described by the rest of a sentence", num_loose_parameters(PYTHON), 0
    yield "comments that are the rest of a sentence", num_loose_comments(PYTHON), 0
    yield "dialect words in 1,000 lines", round(1_000 * num_dialect_words(PYTHON) / num_lines(PYTHON), 2), 0.05


def report(line: Callable[[str], object] = print) -> int:
    """Prints each figure beside its limit; returns how many exceed theirs."""
    exceeded = 0
    for name, figure, limit in (*engine_figures(), *project_figures()):
        is_above = figure > limit
        exceeded += is_above
        line(f"{name}: {figure:,} of {limit:,}{', EXCEEDED' if is_above else ''}")
    return exceeded


if __name__ == "__main__":
    sys.exit(f"{exceeded} of the project's limits exceeded (.ci/limits.py)" if (exceeded := report()) else 0)
