"""What a command can know before the model is loaded, it refuses before torch is imported."""

import socket
import subprocess
from pathlib import Path

import pytest

from nanovllm import LLM
from nanovllm.cli.early_checks import check_output
from nanovllm.models import loader
from nanovllm.models.gguf import loading
from tests.support.command_line import assert_refused, python, words
from tests.support.refusals import invalid
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import tiny_model

PROGRAM = """
import sys
from nanovllm.cli.main import main
status = main(sys.argv[1:])
print(status, "torch" in sys.modules)
"""
EXACT = {"exact_activations": True, "quantization": "int8", "device": "cpu"}


@pytest.fixture(scope="module")
def held():
    """A port that another process listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    "arguments, named",
    {
        "serve --port HELD": "HELD & --port",
        "serve --host no.such.host.invalid": "no.such.host.invalid & does not resolve",
        "serve --record /no/such/folder/record.jsonl": "/no/such/folder/record.jsonl",
        "serve --kv-events tcp://*:HELD": "kv_events & HELD",
        "serve --max-model-len 4096": "max_model_len is 4096 & at most 2048",
        "serve --tensor-parallel-size 4": "tensor_parallel_size is 4 & 6 attention heads & 1, 2, 6",
        "serve --max-num-seqs 64 --max-num-batched-tokens 64": "max_num_batched_tokens is 64 & at least 80",
        "serve --tokenizer /no/such/tokenizer": "tokenizer & /no/such/tokenizer",
        "serve --exact-activations": "exact_activations is True & are not quantised & quantization='int8'",
        "generate one --max-model-len 4096": "at most 2048",
        "generate one --trace /no/such/folder/trace.json": "/no/such/folder/trace.json",
        "chat --max-model-len 4096": "at most 2048",
        "run-batch -i BATCH -o /no/such/folder/out": "--output-file & /no/such/folder",
        "run-batch -i BATCH -o out.jsonl --max-model-len 4096": "at most 2048",
        "bench --workload chat --json /no/such/folder/x.json": "--json & /no/such/folder",
        "bench --workload chat --record /no/such/folder/x.json": "--record & /no/such/folder",
        "bench --workload chat --engines nanovllm:max_model_len=4096": "at most 2048",
        "tune --workload chat --output /dev/null/folder": "--output & /dev/null is a file",
        "tune --workload chat --max-model-len 4096": "at most 2048",
        "calibrate --output x.json --max-model-len 4096": "at most 2048",
    }.items(),
)
def test_what_is_known_before_the_model_is_loaded_is_refused_before_torch_is_imported(
    folder, held, tmp_path, arguments, named
):
    batch = tmp_path / "batch.jsonl"
    batch.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n')

    def filled(text):
        return text.replace("HELD", str(held)).replace("BATCH", str(batch))

    line = [*words(filled(arguments)), "--model", folder]
    done = python("-c", PROGRAM, *line, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert done.stdout == "2 False\n", done.stderr
    assert [part for part in filled(named).split(" & ") if part not in done.stderr] == []
    assert [path.name for path in tmp_path.iterdir()] == ["batch.jsonl"]


@pytest.mark.parametrize(
    "options, named",
    [
        ({"max_model_len": 4096}, "at most 2048"),
        ({"tensor_parallel_size": 4, "device": "cpu"}, "6 attention heads"),
        ({"data_parallel_size": 2, "max_model_len": 4096, "device": "cpu"}, "at most 2048"),
        ({"tokenizer": "/no/such/tokenizer"}, "/no/such/tokenizer"),
        (EXACT | {"quantization": None}, "are not quantised, so no weights .* set quantization='int8' or 'int4'"),
        (EXACT | {"attention_backend": "flex"}, "attention_backend is 'flex', .* set attention_backend='cpp'"),
        (EXACT | {"enforce_eager": True}, "enforce_eager is True, .* drop enforce_eager"),
        (EXACT | {"device": "cuda:1"}, "the device is 'cuda:1', .* set device='cpu'"),
        (EXACT | {"quantization": None, "tensor_parallel_size": 2}, "exact_activations does not work with tensor_par"),
        (EXACT | {"quantization": None, "data_parallel_size": 2}, "are not quantised"),
    ],
    ids=str,
)
def test_an_llm_refuses_options_beyond_the_model_before_weights_are_read(folder, monkeypatch, options, named):
    monkeypatch.setattr(loader, "load_weights", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr("nanovllm.serving.replicas.fleet.Fleet.launch", lambda *_: pytest.fail("a process was started"))
    with invalid(named):
        LLM(folder, **options)


def test_exact_activations_are_refused_for_a_gpu_that_is_found_and_for_a_module(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(head_dim=64))
    with invalid(r"the device is 'cuda', so no weights are multiplied as bytes\. Leave it out"):
        LLM(str(path), exact_activations=True)
    with invalid(r"the model is a loaded module, .* save it \(save_pretrained\)"):
        LLM(tiny_model(), exact_activations=True)


def test_limits_of_a_configs_class_count_too_where_the_file_leaves_them_out(folder, tmp_path, monkeypatch):
    config = (folder / "config.json").read_text(encoding="utf-8").replace('"max_position_embeddings": 2048,', "")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("weights were read")
    )
    with invalid("at most 2048"):  # that of LlamaConfig
        LLM(tmp_path, max_model_len=4096)


def test_the_header_of_a_gguf_file_has_the_limits(tmp_path, monkeypatch, run):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(head_dim=64))
    monkeypatch.setattr("nanovllm.llm.LLM.__init__", lambda *_, **__: pytest.fail("the model was loaded"))
    result = run("generate one --max-model-len 100000", model=str(path))
    assert_refused(result, "max_model_len is 100000, but the model has positions for")


def test_a_file_that_can_be_written_is_neither_changed_nor_left_behind(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("results")
    for path in (old, new, Path("/dev/null")):
        check_output("--json", str(path))
    assert old.read_text() == "results" and not new.exists()


def test_a_folder_in_place_of_an_output_file_is_refused_by_name(tmp_path):
    with invalid(r"--json is .* Is a directory"):
        check_output("--json", str(tmp_path))


def test_a_trace_of_an_earlier_run_outlives_a_misspelt_model(tmp_path, run):
    trace = tmp_path / "trace.json"
    trace.write_text("[]")
    assert_refused(run(f"generate one --trace {trace}", model="/nowhere"), "/nowhere")
    assert trace.read_text() == "[]"
