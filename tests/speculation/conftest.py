"""In these tests steps take no time, so drafts are verified whatever the machine is doing, of all running sequences."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _steps_are_free(monkeypatch):
    monkeypatch.setattr("nanovllm.features.speculation.lengths.PLAIN_WINDOW", sys.maxsize)
    monkeypatch.setattr("nanovllm.features.speculation.lengths.BOUNDS", ((sys.maxsize, sys.maxsize),))
