"""Each optional room can be deleted: answers stay the same without it, and what needs it names the missing part."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests.support.tiny_models import tiny_model, tiny_tokenizer


class Room(NamedTuple):
    """modules: below `nanovllm`; need: a statement that cannot run without them; refusal: a part of its error."""

    modules: tuple[str, ...]
    need: str
    refusal: str


RANKS = (
    "fast.gpu.rank_runner", "features.ranks.workers", "fast.gpu.rank_sampler", "features.ranks.ranks",
    "models.rank_guard", "features.ranks.sharding", "models.sharded_loading",
)  # fmt: skip
TRACES = ("observability.trace_writer", "observability.timeline", "observability.pages", "observability.json_lines")
FORM = "SamplingParams(structured_output=StructuredOutput(regex='a'))"
# Posts to the application of a server without the room.
OLLAMA = """
from starlette.testclient import TestClient
from nanovllm import AsyncLLM
from nanovllm.serving.server.app import create_app
from nanovllm.serving.server.settings import ServerSettings

app = create_app(AsyncLLM(".", max_model_len=64, num_kv_blocks=20, block_size=16), ServerSettings(), model=".")
client = TestClient(app, base_url="http://localhost")
assert client.get("/v1/models").status_code == 200
raise RuntimeError(client.post("/api/chat", json={}).text)
"""
ROOMS = {
    "kernels": Room(
        ("fast.kernels",), "LLM('.', attention_backend='cpp')", "the folder `kernels` of this installation"
    ),
    "grammar": Room(("features.grammar",), f"llm.generate([[5]], {FORM})", "nanovllm.features.grammar"),
    "gguf": Room(("models.gguf",), "LLM('empty.gguf')", "nanovllm.models.gguf"),
    "speculation": Room(("features.speculation",), "LLM('.', speculation='suffix')", "nanovllm.features.speculation"),
    "replicas": Room(("serving.replicas",), "LLM('.', data_parallel_size=2)", "nanovllm.serving.replicas"),
    "ranks": Room(RANKS, "LLM('.', tensor_parallel_size=2)", "nanovllm.fast.gpu.rank_runner"),
    "traces": Room(TRACES, "main(['generate', '--trace', 'trace', 'a'])", "nanovllm.observability.trace_writer"),
    "kv events": Room(
        ("features.kv_events.kv_events",), "LLM('.', kv_events='ipc://events')", "nanovllm.features.kv_events.kv_events"
    ),
    "server": Room(("serving.server",), "main(['serve'])", "nanovllm.serving.server"),
    "ollama": Room(("serving.server.ollama",), OLLAMA, "nanovllm.serving.server.ollama"),
    "ray": Room(("ray",), "import nanovllm.ray", "nanovllm.ray"),
    "tools": Room(("tools",), "main(['bench'])", "nanovllm.tools"),
}

# Forks a child for each room from a process that has imported the libraries, but nothing of nanovllm.
PROGRAM = """
import json, os, sys, traceback
from importlib.abc import MetaPathFinder
from pathlib import Path

import torch._inductor.compile_fx
from transformers import AutoTokenizer, LlamaForCausalLM

torch.set_num_threads(1)  # a fork has none of the others


class Missing(MetaPathFinder):
    def __init__(self, modules):
        self.names = [f"nanovllm.{module}." for module in modules]

    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith(tuple(self.names)):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def answers_and_refusal(modules, need):
    sys.meta_path.insert(0, Missing(modules))
    from nanovllm import LLM, SamplingParams, StructuredOutput
    from nanovllm.cli.main import main

    options = {} if "fast.kernels" in modules else {"attention_backend": "sdpa", "enforce_eager": True}
    params = [SamplingParams(temperature=0.0, max_tokens=6), SamplingParams(temperature=0.8, top_p=0.9, seed=3)]
    with LLM(".", **options, max_model_len=64, num_kv_blocks=20, block_size=16) as llm:
        outputs = llm.generate([[5, 6, 7], [8] * 20], params, use_tqdm=False)
        answers = [output.outputs[0].token_ids for output in outputs]
        try:
            exec(need)
        except Exception as error:
            return answers, str(error)
        return answers, ""


for name, (modules, need, _) in json.loads(sys.argv[1]).items():
    if (child := os.fork()) == 0:
        try:
            Path(f"{name}.json").write_text(json.dumps(answers_and_refusal(modules, need)))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The answers and the refusal without each room, in files of its name."""
    folder = tmp_path_factory.mktemp("rooms")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "empty.gguf").touch()
    rooms = json.dumps({"nothing": Room((), "pass", "")} | ROOMS)
    subprocess.run([sys.executable, "-c", PROGRAM, rooms], cwd=folder, check=True)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", ROOMS)
def test_without_a_room_answers_are_the_same_and_what_needs_it_names_it(folder, name):
    answers, refusal = json.loads((folder / f"{name}.json").read_text())
    assert answers == json.loads((folder / "nothing.json").read_text())[0]
    assert ROOMS[name].refusal in refusal
