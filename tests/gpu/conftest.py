"""These tests need a GPU: `python -m pytest tests/gpu` on a machine with one; elsewhere they are skipped."""

import pytest
import torch

from nanovllm.models.quantised import tiled


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu/" in item.nodeid or item.nodeid.startswith("gpu/"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch sees none"))


@pytest.fixture
def placed(monkeypatch):
    """Types of the layers of models that were placed on a GPU."""
    found = []

    def recorded(model, device, **options):
        place(model, device, **options)
        found.extend(type(module) for module in model.modules())

    place = tiled.place
    monkeypatch.setattr(tiled, "place", recorded)
    return found
