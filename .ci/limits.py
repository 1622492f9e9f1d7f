"""Measures how large and how winding the package is, and fails where a figure exceeds its limit.

    python .ci/limits.py

A limit changes in a commit of its own, which says why. tests/test_architecture.py has the limits of single files,
functions and signatures; figures without a limit are printed for comparison.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

from walk import walks

ROOT = Path(__file__).resolve().parent.parent / "nanovllm"
FILES = sorted(ROOT.rglob("*.py"))
# What every request passes on a CPU, counted by folder, so that a file that moves stays counted.
CORE = (
    "core/", "cache/", "scheduler.py", "block_manager.py", "model_runner.py", "engine.py", "build.py", "llm.py",
    "attention/operator.py", "attention/block_mask.py", "attention/flex_cpu.py", "attention/flex_tiles.py",
    "sampling/sampler.py",
)  # fmt: skip
# Rooms within these folders that no request passes unless an option asks for them.
OPTIONAL = ("cache/tiers/", "cache/state_blocks.py", "cache/forks.py")
BEYOND_THE_ENGINE = ("server/", "ray/", "tools/", "cli/")
# Relative clauses and idioms where the field has a noun or a verb.
DIALECT = re.compile(
    r"\b(what|whose|whom|of which|that of|those that|let go|beside|be it|one another|behind|as it is|is told|are told|"
    r"tells of|to be had|can be had|comes of it|but for|of its own|by itself|heard of|no sooner|who reads|who gets)\b",
    re.IGNORECASE,
)
VAGUE_OPENING = re.compile(r"(What|The same|Of|Where|How)\b")


def num_lines(*places: str) -> int:
    """Lines of the files and folders named, or of the whole package."""
    return sum(
        path.read_text(encoding="utf-8").count("\n")
        for path in FILES
        if not places or ((name := str(path.relative_to(ROOT))).startswith(places) and not name.startswith(OPTIONAL))
    )


def docstrings() -> Iterator[str]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield ast.get_docstring(node) or ""


def comments() -> Iterator[str]:
    for path in FILES:
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        yield from (token.string for token in tokens if token.type == tokenize.COMMENT)


def figures() -> Iterator[tuple[str, float, float | None]]:
    """(name, figure, limit) of each figure."""
    names = [path for path in ROOT.iterdir() if path.name not in ("__init__.py", "__pycache__")]
    yield "names at the top of the package", len(names), 28
    walked: set[str] = set()
    for name, walk in walks():
        walked |= walk.files
        if name == "construction":
            yield "construction of a tiny model: files", len(walk.files), 44
        else:
            yield "one token: files", len(walk.files), 30
            yield "one token: functions", len(walk.functions), 122
            yield "one token: changes of room", walk.num_room_changes, 58
    yield "path, lines: files of construction and of one token", num_lines(*walked), 9_369
    yield "core, lines", num_lines(*CORE), 6_832
    found = [text for text in docstrings() if text]
    words = sum(len(DIALECT.findall(text)) for text in (*found, *comments()))
    yield "dialect words in 1,000 lines", round(1000 * words / num_lines(), 1), 0.6
    vague = sum(1 for text in found if VAGUE_OPENING.match(text))
    yield "docstrings that begin with What, The same, Of, Where or How, %", round(100 * vague / len(found), 1), 0.1
    yield "package, lines", num_lines(), None
    yield "package without server, ray, tools and cli, lines", num_lines() - num_lines(*BEYOND_THE_ENGINE), None


def report(line: Callable[[str], object] = print) -> int:
    """Prints each figure beside its limit; returns how many exceed theirs."""
    exceeded = 0
    for name, figure, limit in figures():
        is_above = limit is not None and figure > limit
        exceeded += is_above
        bound = "" if limit is None else f" of {limit:,}{', EXCEEDED' if is_above else ''}"
        line(f"{name}: {figure:,}{bound}")
    return exceeded


if __name__ == "__main__":
    sys.exit(f"{exceeded} of the package's limits exceeded (.ci/limits.py)" if (exceeded := report()) else 0)
