"""These tests need a GPU: `python -m pytest tests/gpu` on a machine with one; elsewhere they are skipped."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu/" in item.nodeid or item.nodeid.startswith("gpu/"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch sees none"))
