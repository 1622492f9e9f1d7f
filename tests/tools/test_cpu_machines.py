"""`bench/machines/cpu_table.py`: tables of machines as the page has them, peaks, counts of work."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.machines import cpu_table
from nanovllm.models.gguf.file import GGUFFile

ROOT = Path(__file__).parents[2]
MACHINES = sorted((ROOT / "docs/results/cpus").glob("*.json"))


def test_the_page_has_the_table_of_all_machines_side_by_side():
    table = cpu_table.table([json.loads(path.read_text()) for path in MACHINES])
    assert MACHINES and table in (ROOT / "docs/results/cpu.md").read_text()


def test_machines_with_other_parts_stand_side_by_side():
    (one, *_) = [json.loads(path.read_text()) for path in MACHINES]
    other = json.loads(json.dumps(one)) | {"processor": "Other"}
    other["threads"] = {"1": other["threads"]["1"]}
    del other["threads"]["1"]["workloads"]["P"]
    lines = cpu_table.table([one, other]).splitlines()
    assert lines[0].endswith("| Other, 1 thread |")
    assert len({line.count("|") for line in lines}) == 1
    assert next(line for line in lines if line.startswith("| P |")).endswith("| - |")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_peaks_are_measured_in_every_unit(monkeypatch):
    monkeypatch.setattr(cpu_table, "NUM_BURSTS", 2)
    monkeypatch.setattr(cpu_table, "READ_BYTES", 2**20)
    rates = cpu_table.rates(2, True)
    assert set(rates) == {"float32 GFLOP/s", "bfloat16 GFLOP/s", "memory GB/s"}
    assert rates["float32 GFLOP/s"] > 1 and rates["memory GB/s"] > 0.1


def test_llama_cpp_gets_the_same_requests_and_a_file_that_it_can_read(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(ROOT / "bench/machines")
    binary = tmp_path / "llama-batched-bench"
    binary.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho \'{{"t": 2.0}}\'\n')
    binary.chmod(0o755)
    figures = cpu_table.llama_cpp(str(binary), "tiny", "4 streams", 3)
    assert figures == {"seconds": 2.0, "tokens/s": 4 * 32 / 2.0}
    arguments = (tmp_path / "arguments").read_text()
    assert "-npp 128 -ntg 32 -npl 4 -c 640 -t 3 -tb 3" in arguments
    (path,) = tmp_path.glob("*.gguf")
    file = GGUFFile(path)
    assert str(path) in arguments and {tensor.kind for tensor in file.tensors.values()} == {"BF16", "F32"}
    assert file.metadata["tokenizer.ggml.model"] == "no_vocab" and not file.has_tokenizer


def test_work_is_that_of_the_models_own_modules():
    """Two operations for each weight and token, as PyTorch counts those of the modules, and four for each pair."""
    from torch.utils.flop_counter import FlopCounterMode

    from tests.support.tiny_models import tiny_model

    model, length = tiny_model("llama"), 12
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(length)[None], logits_to_keep=1)
    products = counter.get_flop_counts()["Global"]
    counted = sum(count for name, count in products.items() if str(name) in ("aten.mm", "aten.addmm"))
    request = SimpleNamespace(prompt_token_ids=list(range(length)), num_output_tokens=1)
    ended = SimpleNamespace(number=0, num_cached_tokens=0)
    operations, num_bytes = cpu_table.work(
        model.config, SimpleNamespace(requests=[request]), SimpleNamespace(finished=[ended]),
        {"computed_tokens": length, "steps": 1}, weight=2.0,
    )  # fmt: skip
    config = model.config
    pairs = config.num_hidden_layers * config.num_attention_heads * config.head_dim * length * (length + 1) // 2
    assert operations == counted + 4 * pairs
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    assert num_bytes == 2 * weights  # once, in bfloat16
