"""In these tests steps take no time, so drafts are verified whatever the machine is doing, of all running sequences."""

import sys

import pytest

from nanovllm.features.speculation import lengths


@pytest.fixture(autouse=True)
def _steps_are_free(monkeypatch):
    monkeypatch.setattr(lengths, "PLAIN_WINDOW", sys.maxsize)
    monkeypatch.setattr(lengths, "BOUNDS", ((sys.maxsize, sys.maxsize),))
