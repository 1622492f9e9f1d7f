"""What a start of the command imports, and how its process ends."""

import json
import os

import pytest

from nanovllm import defaults as plain
from nanovllm.cli import main
from nanovllm.device import cpp_compiler
from tests.support.command_line import command_parsers, python, words
from tests.support.tiny_models import tiny_model, tiny_tokenizer

# None of them serves a first token; each costs a tenth of a second or more, or pulls in what does.
NOT_IMPORTED = """
    torch._inductor.codecache torch._inductor.compile_fx torch.export.pt2_archive gguf llguidance fastapi uvicorn
    pydantic starlette prometheus_client openai msgspec zmq ray pandas scipy sklearn matplotlib numpy.testing
    nanovllm.serving.async_llm nanovllm.serving.server nanovllm.serving.replicas.pool nanovllm.tools
    nanovllm.cli.bench nanovllm.cli.serve nanovllm.cli.tune nanovllm.cli.simulate
"""
PROGRAM = """
import atexit, gc, json, sys
atexit.register(lambda: print(json.dumps([gc.get_freeze_count(), sorted(sys.modules)]), file=sys.stderr))
from nanovllm.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.full
def test_a_start_imports_nothing_heavy_that_the_first_token_needs_not_and_ends_without_a_collection(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    line = f"generate 'a b c' --raw --max-tokens 1 --temperature 0 --max-model-len 128 --model {tmp_path}"
    done = python("-c", PROGRAM, *words(line), env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    num_frozen, modules = json.loads(done.stderr.splitlines()[-1])
    assert {"torch", "transformers", "nanovllm.model_runner"} <= set(modules)
    assert [name for name in NOT_IMPORTED.split() if name in modules] == []
    assert num_frozen > 100_000  # what Python would go through otherwise


@pytest.mark.parametrize("name", main.COMMANDS)
def test_a_command_that_is_named_has_the_parser_that_it_has_among_all(name):
    assert command_parsers([name])[name].format_help() == command_parsers()[name].format_help()


def test_the_compiler_is_the_one_that_torch_finds(monkeypatch):
    from torch._inductor.cpp_builder import get_cpp_compiler

    assert cpp_compiler() == get_cpp_compiler()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cpp_compiler() == "no-such-compiler"
    assert plain._missing_compiler(plain.torch.device("cpu")) == "a C++ compiler"
