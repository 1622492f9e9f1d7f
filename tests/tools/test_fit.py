"""`nanovllm fit`: bytes by files and config are those of an engine; what fits; speeds of a calibration."""

import json
from dataclasses import replace

import pytest

from nanovllm import LLM
from nanovllm.models.sizes import kv_layers, read_sizes
from tests.support import layer_kinds
from tests.support.command_line import words
from tests.support.sweeps import CALIBRATION
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import FAMILIES, save_tiny, tiny_model

OPTIONS = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 65, "max_model_len": 256}


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_a_folder_are_those_of_an_engine(tmp_path, family):
    folder = save_tiny(tmp_path / family, family)
    sizes = read_sizes(str(folder))
    with LLM(str(folder), **OPTIONS) as llm:
        assert sizes.kv_token_bytes == llm._engine.model_runner.binding.caches.num_bytes(1)
    assert sizes.num_weights == sum(parameter.numel() for parameter in tiny_model(family).parameters())
    assert sizes.weight_bytes == 4 * sizes.num_weights and sizes.max_position_embeddings == 2048
    assert read_sizes(str(folder), quantization="int4").weight_bytes * 32 == sizes.num_weights * 20


@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text", "GptOss", "Cohere2", "Olmo3", "Gemma3nText", "DeepseekV2"])
def test_layers_of_several_kinds_keep_what_an_engine_keeps(family):
    module = layer_kinds.model(family)
    layers = kv_layers(module.config.to_dict(), 4)
    with LLM(module, enforce_eager=True, block_size=16, num_kv_blocks=65, max_model_len=128) as llm:
        groups = llm._engine.model_runner.pools.groups
    found = {group.kind.window: group.block_bytes // 16 for group in groups}
    windows = {window for window, _ in layers}
    assert {window: sum(size for own, size in layers if own == window) for window in windows} == found


def test_a_window_bounds_what_a_sequence_keeps():
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "sliding_window": 100}
    config["layer_types"] = ["sliding_attention", "full_attention"]
    layers = kv_layers(config, 2)
    assert layers == ((100, 128), (None, 128))
    assert sum(size * min(1000, window or 1000) for window, size in layers) == 128 * 1100


@pytest.fixture
def memory(monkeypatch):
    def set_available(num_bytes):
        monkeypatch.setattr("nanovllm.fast.host.memory.available_memory", lambda: num_bytes)

    return set_available


def fit(run, *arguments):
    status, out, err = run("fit --json --device cpu", *arguments)
    assert status == 0, err
    return json.loads(out)


@pytest.fixture
def run(folder, capsys):
    from nanovllm.cli.main import main

    def run(line, *arguments, model=None):
        command, *flags = words(line)
        status = main([command, "--model", model or str(folder), *flags, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_what_fits_is_what_the_cache_holds(run, memory):
    memory(2**30)
    found = fit(run)
    assert found["cache_bytes"] == (2**30 - found["weight_bytes"]) // 2
    for row in found["rows"]:
        assert row["num_requests"] == min(64, found["cache_bytes"] // row["kv_bytes"])
    assert [row["context"] for row in found["rows"]] == [1024, 2048]
    kv = found["rows"][0]["kv_bytes"]
    assert fit(run, "--kv-cache-memory-bytes", str(3 * kv))["rows"][0]["num_requests"] == 3
    assert fit(run, "--max-num-seqs", "2")["rows"][0]["num_requests"] == 2


def test_a_model_that_does_not_fit_is_told_with_the_remedy(run, memory):
    memory(100_000)
    status, out, _ = run("fit --device cpu")
    assert status == 0 and "It does not fit" in out and "With --quantization: int8" in out


def test_speeds_are_those_of_the_calibration(run, folder, tmp_path, memory):
    memory(2**30)
    path = tmp_path / "calibration.json"
    replace(CALIBRATION, model=str(folder)).save(path)
    first, _ = fit(run, "--calibration", str(path))["rows"]
    assert first["tokens_per_second_alone"] == pytest.approx(1 / (0.01 + 2e-4 + 1e-6))
    count = first["num_requests"]
    seconds = 0.01 + 1e-4 * (count - 16) + 2e-4 + 1e-6 * count
    assert first["tokens_per_second"] == pytest.approx(count / seconds)
    _, out, _ = run(f"fit --device cpu --calibration {path}")
    assert "TOKENS/S, ALL" in out and "Speeds were calibrated for" in out


def test_speeds_of_another_model_are_scaled_by_its_bytes(run, folder, tmp_path, memory):
    memory(2**30)
    larger = save_tiny(tmp_path / "larger", num_layers=6)
    path = tmp_path / "calibration.json"
    replace(CALIBRATION, model=str(folder)).save(path)
    own, other = (fit(run, "--calibration", str(path), "-m", str(model))["rows"][0] for model in (folder, larger))
    sizes, large = read_sizes(str(folder)), read_sizes(str(larger))
    ratio = (large.weight_bytes + large.kv_bytes(1024)) / (sizes.weight_bytes + sizes.kv_bytes(1024))
    assert own["tokens_per_second_alone"] / other["tokens_per_second_alone"] == pytest.approx(ratio)
    _, out, _ = run(f"fit --device cpu --calibration {path}", model=str(larger))
    assert "scaled from" in out and "nanovllm calibrate" in out


def test_without_a_calibration_the_way_to_one_is_told(run, memory, monkeypatch, tmp_path):
    memory(2**30)
    monkeypatch.chdir(tmp_path)
    _, out, _ = run("fit --device cpu")
    assert "TOKENS/S" not in out and "nanovllm calibrate -m" in out and "REQUESTS AT ONCE" in out


def test_a_gguf_file_needs_what_it_has_on_disk(run, tmp_path, memory):
    memory(2**30)
    path = write_gguf(tmp_path / "model.gguf", tiny_model(head_dim=64))
    found = fit(run, "-m", str(path))
    assert found["weight_bytes"] == path.stat().st_size and found["num_weights"] == 0
    status, _, err = run("fit --device cpu --quantization int8", model=str(path))
    assert status == 2 and "Leave --quantization out" in err
    status, _, err = run("fit --device cpu --kv-cache-dtype fp8", model=str(path))
    assert status == 2 and "for GPUs alone" in err and "Leave --kv-cache-dtype out" in err
    plain = fit(run, "-m", str(path), "--quantization", "dequantize", "--dtype", "float32")
    assert plain["weight_bytes"] == 4 * tiny_model(head_dim=64).num_parameters()


def test_a_model_that_is_not_here_is_named_with_the_way_to_it(run, monkeypatch):
    monkeypatch.setattr("nanovllm.models.hub.is_reachable", lambda *_, **__: True)
    status, _, err = run("fit --device cpu", model="own/nowhere")
    assert status == 2 and "nanovllm pull own/nowhere" in err
