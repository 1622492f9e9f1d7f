"""GGUF files on the command line: the commands that take a model, and what a server calls it."""

import io
import json
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.cli.main import main
from nanovllm.serving.server.settings import ServerSettings
from nanovllm.serving.server.state import served_name
from tests.support.command_line import words
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import tiny_model

FLAGS = words("--enforce-eager --max-model-len 256 --num-kv-blocks 9 --temperature 0 --max-tokens 8")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return str(write_gguf(folder / "tiny.Q8_0.gguf", tiny_model(head_dim=64)))


def test_generate_and_chat_answer_as_an_llm_of_the_file(path, capsys, monkeypatch):
    params = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(path, enforce_eager=True, max_model_len=256, num_kv_blocks=9) as llm:
        answer = llm.chat([{"role": "user", "content": "the capital"}], params, use_tqdm=False)[0].outputs[0].text
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate", "-m", path, "the capital", "--json", *FLAGS]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == answer
    monkeypatch.setattr("sys.stdin", io.StringIO("the capital\n"))
    assert main(["chat", path, *FLAGS]) == 0
    assert capsys.readouterr().out.strip() == answer.strip()


def test_a_server_calls_the_model_by_the_files_name_even_behind_a_link(path, tmp_path):
    link = tmp_path / "model-Q8_0.gguf"
    link.symlink_to(path)
    assert served_name(ServerSettings(), path) == "tiny.Q8_0"
    assert served_name(ServerSettings(), link) == "model-Q8_0"
    assert served_name(ServerSettings(served_model_name="mine"), link) == "mine"


def test_a_damaged_file_ends_every_command_with_2_and_its_reason(path, tmp_path, capsys, monkeypatch):
    damaged = tmp_path / "cut.gguf"
    damaged.write_bytes(Path(path).read_bytes()[:5000])
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    for command in (["generate", "-m", str(damaged), "x"], ["chat", str(damaged)], ["serve", str(damaged)]):
        assert main(command) == 2
        assert "truncated or damaged" in capsys.readouterr().err


def test_bench_refuses_engines_that_do_not_read_the_file(path, capsys):
    assert main(words(f"bench -m {path} --engines nanovllm transformers")) == 2
    assert "is a GGUF file, which transformers does not read" in capsys.readouterr().err


def test_text_prompts_of_a_workload_are_encoded_by_the_files_tokenizer(path, tmp_path):
    trace, exported = tmp_path / "trace.jsonl", tmp_path / "out.jsonl"
    trace.write_text(json.dumps({"prompt": "The capital", "output_tokens": 4}) + "\n")
    assert main(words(f"bench -m {path} --trace {trace} --export {exported}")) == 0
    with LLM(path, enforce_eager=True, max_model_len=256, num_kv_blocks=9) as llm:
        assert str(llm.tokenizer.encode("The capital"))[1:-1] in exported.read_text().replace(",", ", ").replace(
            "  ", " "
        )
