"""`nanovllm fit`: bytes by files and config are those of an engine; what fits; speeds of a calibration."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from nanovllm import LLM
from nanovllm.models.sizes import kv_layers, read_sizes
from tests.support import layer_kinds
from tests.support.command_line import assert_refused
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
    assert kv_layers(config, 2) == ((100, 128), (None, 128))


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """1 GiB of memory, unless a test sets another number of bytes."""
    memory = SimpleNamespace(available=2**30)
    monkeypatch.setattr("nanovllm.fast.host.memory.available_memory", lambda: memory.available)
    return memory


@pytest.fixture
def run(folder, command):
    """The command on the tiny model or another one; returns the command's result."""
    return lambda flags, model=folder: command(f"fit --device cpu --model {model} {flags}")


@pytest.fixture
def fit(run):
    """The object that the command prints."""

    def fit(flags, *model):
        status, out, err = run(f"--json {flags}", *model)
        assert status == 0, err
        return json.loads(out)

    return fit


@pytest.fixture
def calibration(folder, tmp_path):
    """The flag of a calibration of the tiny model."""
    path = tmp_path / "calibration.json"
    replace(CALIBRATION, model=str(folder)).save(path)
    return f"--calibration {path}"


def test_what_fits_is_what_the_cache_holds(fit):
    found = fit("")
    assert found["cache_bytes"] == (2**30 - found["weight_bytes"]) // 2
    for row in found["rows"]:
        assert row["num_requests"] == min(64, found["cache_bytes"] // row["kv_bytes"])
    assert [row["context"] for row in found["rows"]] == [1024, 2048]
    kv = found["rows"][0]["kv_bytes"]
    assert fit(f"--kv-cache-memory-bytes {3 * kv}")["rows"][0]["num_requests"] == 3
    assert fit("--max-num-seqs 2")["rows"][0]["num_requests"] == 2


def test_a_model_that_does_not_fit_is_told_with_the_remedy(run, memory):
    memory.available = 100_000
    status, out, _ = run("")
    assert status == 0 and "It does not fit" in out and "With --quantization: int8" in out


def test_speeds_are_those_of_the_calibration(run, fit, calibration):
    first, _ = fit(calibration)["rows"]
    assert first["tokens_per_second_alone"] == pytest.approx(1 / (0.01 + 2e-4 + 1e-6))
    count = first["num_requests"]
    seconds = 0.01 + 1e-4 * (count - 16) + 2e-4 + 1e-6 * count
    assert first["tokens_per_second"] == pytest.approx(count / seconds)
    out = run(calibration)[1]
    assert "TOKENS/S, ALL" in out and "Speeds were calibrated for" in out


def test_speeds_of_another_model_are_scaled_by_its_bytes(run, fit, calibration, folder, tmp_path):
    larger = save_tiny(tmp_path / "larger", num_layers=6)
    own, other = (fit(calibration, model)["rows"][0] for model in (folder, larger))
    sizes, large = read_sizes(str(folder)), read_sizes(str(larger))
    ratio = (large.weight_bytes + large.kv_bytes(1024)) / (sizes.weight_bytes + sizes.kv_bytes(1024))
    assert own["tokens_per_second_alone"] / other["tokens_per_second_alone"] == pytest.approx(ratio)
    out = run(calibration, larger)[1]
    assert "scaled from" in out and "nanovllm calibrate" in out


def test_without_a_calibration_the_way_to_one_is_told(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    out = run("")[1]
    assert "TOKENS/S" not in out and "nanovllm calibrate -m" in out and "REQUESTS AT ONCE" in out


def test_a_gguf_file_needs_what_it_has_on_disk(run, fit, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model(head_dim=64))
    found = fit("", path)
    assert found["weight_bytes"] == path.stat().st_size and found["num_weights"] == 0
    assert_refused(run("--quantization int8", path), "Leave --quantization out")
    assert_refused(run("--kv-cache-dtype fp8", path), "for GPUs alone & Leave --kv-cache-dtype out")
    plain = fit("--quantization dequantize --dtype float32", path)
    assert plain["weight_bytes"] == 4 * tiny_model(head_dim=64).num_parameters()


def test_a_model_that_is_not_here_is_named_with_the_way_to_it(run, answering_hub):
    assert_refused(run("", "own/nowhere"), "nanovllm pull own/nowhere")
