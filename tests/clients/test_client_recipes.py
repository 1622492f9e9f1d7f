"""docs/guide/clients.md: each recipe runs against the real client."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "clients.md").read_text(encoding="utf-8")
HEAD = PAGE.partition("\n## ")[0]


def blocks(section: str, language: str) -> list[str]:
    text = HEAD if not section else PAGE.split(f"\n## {section}\n")[1].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run(section: str, address: str) -> Any:
    """The names that a recipe defines."""
    module = types.ModuleType(f"recipe_{section}")
    sys.modules[module.__name__] = module  # where pydantic looks for what a model's fields name
    for block in [*blocks("", "python"), *blocks(section, "python")]:
        exec(compile(block.replace("http://127.0.0.1:8000", address), section, "exec"), module.__dict__)
    return module


def test_openai(address):
    found = run("openai", address)
    for weather in (found.weather, found.arguments, found.same):
        assert isinstance(weather, found.Weather)


def test_anthropic(address):
    found = run("anthropic", address)
    assert isinstance(found.weather, found.Weather)
    assert found.message.stop_reason == "tool_use" and found.num_tokens > 10


def test_langchain(address):
    found = run("LangChain", address)
    assert isinstance(found.by_schema, found.Weather) and isinstance(found.by_call, found.Weather)
    assert isinstance(json.loads(found.by_mode["raw"].content), dict)


def test_instructor(address):
    found = run("instructor", address)
    assert [isinstance(weather, found.Weather) for weather in found.found] == [True, True]


def test_litellm(address):
    found = run("LiteLLM", address)
    assert isinstance(found.weather, found.Weather)


def test_llm(address, tmp_path):
    (models,), (command,) = blocks("llm", "yaml"), blocks("llm", "bash")
    (tmp_path / "extra-openai-models.yaml").write_text(models.replace("http://127.0.0.1:8000", address))
    environment = os.environ | {
        "LLM_USER_PATH": str(tmp_path), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OPENAI_API_KEY": "none",
    }  # fmt: skip
    done = subprocess.run(["bash", "-ec", command], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["days"] in (1, 2, 3)
