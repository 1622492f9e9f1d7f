"""Which form of attention "auto" takes on a GPU where FlashAttention is there."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm import attention_choice
from nanovllm.attention.flash import TRIED_VERSION
from nanovllm.attention_choice import AttentionChoice, preferred_block_size
from nanovllm.config import EngineConfig

LAYER = SimpleNamespace(dtype=torch.bfloat16, head_dim=128)
BINDING = SimpleNamespace(device=torch.device("cuda", 0), layers=[LAYER])


@pytest.fixture
def flash_is_there(monkeypatch):
    monkeypatch.setattr(attention_choice, "missing_for_flash", lambda *_: None)
    monkeypatch.setattr(attention_choice, "has_tried_version", lambda: True)
    monkeypatch.setattr(attention_choice, "_missing_compiler", lambda _: None)


def choice(**options):
    config = EngineConfig(**options)
    size = preferred_block_size(BINDING, config)
    return AttentionChoice.of(BINDING, config.resolve_limits("cuda", 4096, block_size=size)).backend, size


def test_auto_takes_flash_and_blocks_of_its_size(flash_is_there):
    assert choice() == ("flash", 128)


def test_auto_takes_flex_for_blocks_of_another_size(flash_is_there):
    assert choice(block_size=64)[0] == "flex"


def test_auto_takes_neither_where_nothing_is_compiled(flash_is_there):
    assert choice(enforce_eager=True) == ("sdpa", None)


def test_auto_leaves_a_version_that_was_not_tried_alone(flash_is_there, monkeypatch):
    monkeypatch.setattr(attention_choice, "has_tried_version", lambda: False)
    assert choice() == ("flex", None)
    assert choice(attention_backend="flash") == ("flash", 128)


def test_the_extra_installs_the_version_that_was_tried():
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))
    assert f"flash-attn-4=={TRIED_VERSION}" in project["project"]["optional-dependencies"]["flash"]
