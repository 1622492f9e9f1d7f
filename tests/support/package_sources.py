"""The package's source, parsed once by the tests that read it."""

import ast
import functools
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "nanovllm"


@functools.cache
def trees():
    """Each file by its dotted name within the package; parsed at the first call, for all of them take 130 MB."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }
