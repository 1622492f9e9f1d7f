"""Settings for every test: a quiet tokenizers library, since tests fork; slow tests only when asked for."""

from __future__ import annotations

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(config, items):
    """The slow matrix runs with `pytest -m slow`; without -m it is left out, as the count of deselected tests says."""
    if config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
