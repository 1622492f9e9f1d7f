"""docs/guide/clients.md: each recipe runs against the real client."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm.models.default_model import ensure_default_model
from tests.support.evaluation_tasks import write_tasks

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "clients.md").read_text(encoding="utf-8")
HEAD = PAGE.partition("\n## ")[0]


def blocks(section, language):
    text = HEAD if not section else PAGE.split(f"\n## {section}\n")[1].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run(section, address):
    """The names that a recipe defines."""
    module = types.ModuleType(f"recipe_{section}")
    sys.modules[module.__name__] = module  # pydantic resolves the names of a model's fields there
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
    assert [isinstance(weather, found.Weather) for weather in found.found] == [True, True, True]


def test_litellm(address):
    found = run("LiteLLM", address)
    assert isinstance(found.weather, found.Weather)


def test_ollama(address):
    found = run("Ollama's clients", address)
    assert isinstance(found.weather, found.Weather) and found.text
    assert found.names == ["smollm2-135m-instruct"] and len(found.vectors) == 2
    assert found.said and found.also_said


def run_command(section, address, folder, **variables):
    """Run a recipe's command in a folder; returns what it prints. The hub's id is a folder, the task one of our own."""
    (command,) = blocks(section, "bash")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"} | variables
    command = command.replace("http://127.0.0.1:8000", address).replace(HUB_ID, str(ensure_default_model()))
    command = command.replace("arc_easy", f"store_choice --include_path {folder}")
    done = subprocess.run(
        ["bash", "-ec", command], env=environment, cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_llm(address, tmp_path):
    (models,) = blocks("llm", "yaml")
    (tmp_path / "extra-openai-models.yaml").write_text(models.replace("http://127.0.0.1:8000", address))
    assert json.loads(run_command("llm", address, tmp_path, LLM_USER_PATH=str(tmp_path)))["days"] in (1, 2, 3)


def test_lm_eval(address, tmp_path):
    """Its log-likelihoods are those of `transformers`."""
    write_tasks(tmp_path, 2)
    run_command("lm-eval", address, tmp_path, HF_DATASETS_OFFLINE="1")
    (path,) = (tmp_path / "results").rglob("samples_store_choice_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(samples) == 2
    folder = ensure_default_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    for sample in samples:
        for number, ((own, _),) in enumerate(sample["resps"]):
            context, continuation = sample["arguments"][f"gen_args_{number}"].values()
            length = len(tokenizer(context)["input_ids"])
            ids = torch.tensor([tokenizer(context + continuation)["input_ids"]])
            with torch.inference_mode():
                logprobs = model(ids).logits[0, length - 1 : -1].float().log_softmax(dim=-1)
            expected = logprobs.gather(1, ids[0, length:, None]).sum().item()
            assert float(own) == pytest.approx(expected, rel=0.02, abs=0.3), "in bfloat16"


def test_guidellm(address, tmp_path):
    run_command("guidellm", address, tmp_path)
    (benchmark,) = json.loads((tmp_path / "load.json").read_text())["benchmarks"]
    counts = benchmark["metrics"]["request_totals"]
    assert (counts["successful"], counts["errored"]) == (6, 0)
    assert benchmark["metrics"]["output_token_count"]["successful"]["total_sum"] == 6 * 12
