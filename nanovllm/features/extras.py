"""Checks of an installation: libraries that extras install, and parts of the package itself."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from importlib.machinery import PathFinder
from typing import Any


class MissingLibraryError(RuntimeError, ValueError):
    """A feature needs a library that an extra of the package installs; the message names all three."""


def check_extra(feature: str, extra: str, *libraries: str) -> None:
    """Raise MissingLibraryError if a library that a feature needs is missing; only parents of modules are imported."""
    missing = [name for name in libraries if not is_installed(name)]
    if missing:
        raise MissingLibraryError(f"{feature} needs {', '.join(missing)}: pip install 'nanovllm[{extra}]'.")


def is_installed(name: str) -> bool:
    """Whether a module can be imported; nothing but its parents is."""
    if name == "pip" and name not in sys.modules:
        # The hook of setuptools takes any other search for pip as one of pip's own runs and gives up its distutils, so
        # that a later import of setuptools, as by torch.compile, fails.
        return PathFinder.find_spec(name) is not None
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # a parent is missing
        return False


def check_parts(options: Any) -> None:
    """Raise ValueError for an option that is not at its default and has no part installed."""
    for field in dataclasses.fields(options):
        module = f"nanovllm.{field.metadata['needs']}"
        if field.metadata["needs"] and getattr(options, field.name) != field.default and not is_installed(module):
            raise ValueError(
                f"{field.name} is set, and {module}, which it needs, is not installed. Leave the option out, or "
                "install the whole package."
            )
