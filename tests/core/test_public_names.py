"""What other projects import: the names that the package exports, and the paths that the page on upgrading promises."""

import re
from pathlib import Path

import pytest

import nanovllm

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "upgrading.md"
# Rows of its table of paths: | `from ... import ...` | `from ... import ...` |
MOVED = re.findall(r"\| `(from nanovllm[^`]+)` \| `(from nanovllm[^`]+)` \|", PAGE.read_text())


def test_the_reference_shows_every_public_name_and_no_other():
    shown = re.findall(r"^::: nanovllm\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(nanovllm.__all__)


def test_every_public_name_is_there():
    for name in nanovllm.__all__:
        assert getattr(nanovllm, name) is not None


def test_the_page_on_upgrading_has_a_table_of_moved_paths():
    assert MOVED


@pytest.mark.parametrize("statement", [now for _, now in MOVED])
def test_a_path_that_the_page_promises_imports(statement):
    exec(statement, {})


@pytest.mark.costly
@pytest.mark.parametrize("statement", [before for before, _ in MOVED])
def test_a_path_that_the_page_calls_gone_is_gone(statement):
    with pytest.raises(ModuleNotFoundError):
        exec(statement, {})
