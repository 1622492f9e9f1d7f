"""In these tests steps take no time, so every draft is verified, whatever the machine is doing."""

from __future__ import annotations

import pytest

from nanovllm.features.speculation import costs


@pytest.fixture(autouse=True)
def _steps_are_free(monkeypatch):
    monkeypatch.setattr(costs, "draft_costs", lambda *_: None)
