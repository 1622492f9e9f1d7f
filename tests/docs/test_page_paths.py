"""Files and names that pages say are there, and the page of private names of torch and transformers, both ways."""

import ast
import re

import pytest
from torch import nn

from nanovllm.config import ATTENTION_BACKENDS
from tests.support.package_sources import PACKAGE, trees
from tests.support.pages import PAGES, ROOT, TEXTS, inline_code, tables

FOLDERS = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
INTERNALS = "docs/internals/torch_internals.md"
ROWS = [row for table in tables(TEXTS[INTERNALS]) for row in table[1:]]
NAME = re.compile(r"[A-Za-z_]\w+")
# Private attributes of `nn.Module`, which any object of the package may be.
OF_MODULES = {name for name in {*vars(nn.Module()), *vars(nn.Module)} if re.match(r"_[a-z]", name)}


def files(cell):
    """The package's files that a cell names."""
    return [code for code in inline_code(cell) if code.endswith(".py")]


def source(file):
    return (PACKAGE / file).read_text(encoding="utf-8")


def private_names(tree):
    """Private names of torch that a file reaches: within modules of torch, and private attributes of `nn.Module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_of_torch = re.match(r"torch\.", ast.unparse(node)) and re.match(r"_[A-Za-z]", node.attr)
            if is_of_torch or (node.attr in OF_MODULES and ast.unparse(node.value) != "self"):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and re.match(r"torch\..*\b_|torch\._", node.module or ""):
            yield from (alias.name for alias in node.names)


@pytest.mark.costly
@pytest.mark.parametrize("name", [name for name in PAGES if name != "CHANGELOG.md"])
def test_files_that_a_page_names_are_there(name):
    """Below the repository, or below the package where the first folder is one of its rooms."""
    for code in inline_code(TEXTS[name]):
        path = re.match(r"([\w.]+)/[\w./]+\.(?:py|cpp|html|md|service|yaml|jsonl)(?=$| )", code)
        if path and (path[1] in FOLDERS or (ROOT / path[1]).is_dir()):
            assert (ROOT / path[0]).is_file() or (PACKAGE / path[0]).is_file(), code


@pytest.mark.parametrize("name", [name for name in PAGES if name != "CHANGELOG.md"])
def test_a_name_is_in_the_file_that_a_page_says_it_is_in(name):
    """As "`name` in `room/file.py`" or "`name` (`room/file.py`)"."""
    found = re.findall(r"`([\w.]+)`\s(?:in|of|\()\s?`((?:nanovllm/)?[\w/]+\.py)`", TEXTS[name])
    for symbol, file in ((symbol, file) for symbol, file in found if symbol not in ATTENTION_BACKENDS):
        text = source(file.removeprefix("nanovllm/"))
        assert all(re.search(rf"\b{part}\b", text) for part in symbol.split(".")), f"{symbol} in {file}"


@pytest.mark.parametrize("part, pattern", [(0, "**/test_*.py"), (1, "support/[a-z]*.py")], ids=["tests", "support"])
def test_every_file_is_on_the_map_of_the_tests(part, pattern):
    rows = [row for table in tables(TEXTS["tests/README.md"].split("**support**")[part]) for row in table[1:]]
    listed = {code for row in rows for cell in row[:2] for code in inline_code(cell)}
    assert {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob(pattern)} <= listed


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:60] for row in ROWS])
def test_a_private_name_is_used_where_its_row_says(row):
    names = [NAME.findall(code.partition("(")[0])[-1] for code in inline_code(row[0])]
    for file in files(row[1]):
        assert not names or any(name in source(file) for name in names), file
    for file, symbol in re.findall(r"`([\w/]+\.py)`: `(\w+)`", row[1]):
        assert re.search(rf"\b{symbol}\b", source(file)), f"{file}: {symbol}"


def test_every_private_name_of_torch_has_a_row_with_its_file():
    used = {
        (f"{module.replace('.', '/')}.py", name) for module, tree in trees().items() for name in private_names(tree)
    }
    assert len(used) > 20
    for file, name in used:
        assert any(re.search(rf"\b{name}\b", row[0]) and file in files(row[1]) for row in ROWS), f"{file}: {name}"
