"""Writes tests/RULES.md: each rule of the engine's files, the test that holds it, and the mistakes by which it fails.

    python .ci/rules.py [--check]

A rule is the name of a test that kills a mutant of .ci/mutants/ in one of the engine's files. `--check` writes nothing,
and fails where the page is not what the list gives.
"""

from __future__ import annotations

import sys

from mutants import read_mutants
from sources import PACKAGE, ROOT, engine_files

PAGE = ROOT / "tests" / "RULES.md"
HEAD = """# Rules of the engine

Each rule is a test of the default tier, below the file whose code it holds, with the mistakes in that file by which it
was seen to fail. `python .ci/rules.py` writes this page from `.ci/mutants/`, and `python .ci/mutants.py` makes each
mistake in a copy and runs the test.
"""


def page() -> str:
    """The page as it has to be."""
    mistakes: dict[str, dict[str, list[str]]] = {}
    for mutant in read_mutants(ROOT):
        for test in mutant.tests:
            mistakes.setdefault(mutant.file, {}).setdefault(test, []).append(mutant.name)
    sections = [HEAD]
    for path in sorted(engine_files()):
        name = path.relative_to(PACKAGE.parent).as_posix()
        if name in mistakes:
            rows = [row(test, names) for test, names in mistakes[name].items()]
            sections.append("\n".join((f"## {name}\n", "| rule | test | mistake |", "|---|---|---|", *rows)) + "\n")
    return "\n".join(sections)


def row(test: str, names: list[str]) -> str:
    """A test's name as a sentence, its file, and the mistakes."""
    file, _, function = test.partition("::")
    rule = function.rpartition("::")[2].removeprefix("test_").replace("_", " ")
    return f"| {rule} | `{file.removeprefix('tests/')}` | {'; '.join(names)} |"


def main(*options: str) -> int:
    if options == ("--check",):
        return PAGE.read_text(encoding="utf-8") != page()
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
