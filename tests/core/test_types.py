"""What a type checker finds: unknown engine options, values of another type, misspelt finish reasons."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from nanovllm import EngineConfig
from nanovllm.features.engine_options import EngineOptions
from nanovllm.outputs import FinishReason

ROOT = Path(__file__).parents[2]
# Read with their types; all other modules are skipped, so that a check takes a second.
READ = [
    "__init__.py", "serving/llm.py", "serving/async_llm.py", "features/engine_options.py", "outputs.py",
    "sampling_params.py",
]  # fmt: skip
SNIPPET = """\
from nanovllm import LLM, AsyncLLM, CompletionOutput

LLM("folder", max_num_seqs=4, dtype="float32", itl_goal="auto", client_weights={"batch": 0.5})
LLM("folder", max_num_seq=4)
AsyncLLM("folder", max_num_seqs="four")


def ended(completion: CompletionOutput) -> bool:
    return completion.finish_reason == "stopped"
"""


def test_the_options_of_type_checkers_are_those_of_the_engine():
    declared = {field.name: field for field in dataclasses.fields(EngineConfig)}
    written = EngineOptions.__annotations__
    assert list(written) == list(declared)
    for name, field in declared.items():
        kind = str(field.type).replace("Seconds | Any", "float | str").replace("Seconds", "float")
        kind = re.sub("PolicyKind|Modality|ProcessorOption", "str", kind)
        is_optional = field.default is None and not kind.endswith("| None")
        assert written[name].__forward_arg__ == kind + " | None" * is_optional, name


@pytest.mark.full
def test_a_type_checker_finds_unknown_options_and_reasons(tmp_path):
    snippet, config = tmp_path / "snippet.py", tmp_path / "mypy.ini"
    snippet.write_text(SNIPPET)
    config.write_text(f"[mypy]\nmypy_path = {ROOT}\nfollow_imports = skip\nstrict_equality = True\n")
    files = [str(ROOT / "nanovllm" / name) for name in READ]
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run([*command, str(snippet), *files], cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    found = [line.partition("snippet.py:")[2] for line in lines if ": error:" in line and "snippet.py" in line]
    assert [int(line.partition(":")[0]) for line in found] == [4, 5, 9], done.stdout
    assert 'Unexpected keyword argument "max_num_seq"' in found[0] and "max_num_seqs" in found[0]


def test_the_reasons_are_those_that_outputs_have():
    assert set(get_args(FinishReason)) == {"stop", "length", "timeout", "abort", "error"}
