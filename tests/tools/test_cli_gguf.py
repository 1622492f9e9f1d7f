"""GGUF files on the command line: the commands that take a model, and what a server calls it."""

import io
import json
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.serving.server.settings import ServerSettings
from nanovllm.serving.server.state import served_name
from tests.support.command_answers import encoded
from tests.support.command_line import assert_refused
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import tiny_model

FLAGS = "--enforce-eager --max-model-len 256 --num-kv-blocks 9 --temperature 0 --max-tokens 8"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return str(write_gguf(folder / "tiny.Q8_0.gguf", tiny_model(head_dim=64)))


def test_generate_and_chat_answer_as_an_llm_of_the_file(path, command, monkeypatch):
    params = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(path, enforce_eager=True, max_model_len=256, num_kv_blocks=9) as llm:
        answer = llm.chat([{"role": "user", "content": "the capital"}], params, use_tqdm=False)[0].outputs[0].text
    monkeypatch.setattr("sys.stdin", None)
    assert json.loads(command(f"generate -m {path} 'the capital' --json {FLAGS}")[1])["text"] == answer
    monkeypatch.setattr("sys.stdin", io.StringIO("the capital\n"))
    status, out, _ = command(f"chat {path} {FLAGS}")
    assert status == 0 and out.strip() == answer.strip()


def test_a_server_calls_the_model_by_the_files_name_even_behind_a_link(path, tmp_path):
    link = tmp_path / "model-Q8_0.gguf"
    link.symlink_to(path)
    assert served_name(ServerSettings(), path) == "tiny.Q8_0"
    assert served_name(ServerSettings(), link) == "model-Q8_0"
    assert served_name(ServerSettings(served_model_name="mine"), link) == "mine"


def test_a_damaged_file_ends_every_command_with_2_and_its_reason(path, tmp_path, command, monkeypatch):
    damaged = tmp_path / "cut.gguf"
    damaged.write_bytes(Path(path).read_bytes()[:5000])
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    for line in ("generate x -m", "chat", "serve"):
        assert_refused(command(f"{line} {damaged}"), "truncated or damaged")


def test_bench_refuses_engines_that_do_not_read_the_file(path, command):
    result = command(f"bench -m {path} --engines nanovllm transformers")
    assert_refused(result, "is a GGUF file, which transformers does not read")


def test_text_prompts_of_a_workload_are_encoded_by_the_files_tokenizer(path, tmp_path, command):
    trace, exported = tmp_path / "trace.jsonl", tmp_path / "out.jsonl"
    trace.write_text('{"prompt": "The capital", "output_tokens": 4}\n')
    assert command(f"bench -m {path} --trace {trace} --export {exported}")[0] == 0
    assert json.loads(exported.read_text())["prompt"] == encoded("The capital")
