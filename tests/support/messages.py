"""Texts that the package can say: strings of its source, with `…` for what is filled in."""

import ast
import functools
import re

from tests.support.package_sources import trees

GAP = "…"
_LOGGED = ("warning", "error", "exception")


def source_texts():
    """Every string of the package's source, docstrings included."""
    return [text for tree in trees().values() for node in ast.walk(tree) if (text := _text(node))]


def logged_texts():
    """What loggers are given as a warning or an error."""
    return {
        text
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOGGED
        and isinstance(node.func.value, ast.Name) and node.func.value.id == "logger"
        and (text := _text(node.args[0])) and text != GAP
    }  # fmt: skip


def says(text, quoted):
    """Whether a text of the source can read as quoted, whose gaps stand for anything."""
    return _pattern(quoted).search(text) is not None


@functools.cache
def _pattern(quoted):
    parts = [part for part in re.split(rf"\s*{GAP}\s*", quoted.strip()) if part]
    return re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)


def _text(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-+.\d]*[sdrgfi]", GAP, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else GAP for part in node.values)
    return None
