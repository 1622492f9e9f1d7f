"""`nanovllm models`: the embedded default and the hub's cache, each with its state."""

import json
import struct
from pathlib import Path

import pytest
from huggingface_hub import constants

from nanovllm.models.default_model import default_folder
from tests.support.command_line import assert_refused, records
from tests.support.hubs import snapshot
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import save_tiny, tiny_model


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "own"))
    hub = tmp_path / "hub"
    for place in ("constants", "utils._cache_manager", "file_download"):
        monkeypatch.setattr(f"huggingface_hub.{place}.HF_HUB_CACHE", str(hub), raising=False)
    hub.mkdir()
    save_tiny(snapshot(hub, "own/tiny"))
    packed = snapshot(hub, "own/packed")
    write_gguf(packed / "model.Q8_0.gguf", tiny_model(head_dim=64))
    (packed / "model.Q4_0.gguf").write_bytes(b"GGUF")
    (packed / "model-00002-of-00002.gguf").write_bytes(b"GGUF")
    partial = snapshot(hub, "own/partial")
    (partial / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096}')
    return hub


@pytest.fixture
def listed(hub, command):
    """The models that the command lists, by their names."""
    return lambda: {found["name"]: found for found in records(command("models --json")[1])}


def test_quantised_models_are_listed_with_their_format(hub, listed):
    for name, settings in (("gptq", {"quant_method": "gptq", "bits": 4}), ("quark", {"quant_method": "quark"})):
        path = save_tiny(snapshot(hub, f"own/{name}")) / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"quantization_config": settings}))
    found = listed()
    assert found["own/gptq"]["state"] == "ready: gptq, 4 bits"
    assert found["own/quark"]["state"] == "in a format that is not read: quark"


def test_what_the_cache_holds_is_listed_with_its_state(listed):
    found = listed()
    files = [name for name in found if name.endswith(".gguf")]
    assert [Path(name).name for name in files] == ["model.Q4_0.gguf", "model.Q8_0.gguf"]
    assert list(found) == ["smollm2-135m-instruct", *files, "own/partial", "own/tiny"]
    assert "GGUF, which is not read: is truncated or damaged" in found[files[0]]["state"]
    assert "93 MB" in found["smollm2-135m-instruct"]["state"]
    for name in (files[1], "own/tiny"):
        assert found[name]["state"] == "ready" and found[name]["size"] > 100_000
        assert found[name]["architecture"] == "LlamaForCausalLM" and found[name]["context"] == 2048
    assert "model.safetensors is missing" in found["own/partial"]["state"]


def test_a_split_file_is_as_large_as_its_parts(hub, listed):
    folder = next(hub.glob("models--own--packed/snapshots/*"))
    first, second = (folder / f"model-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_bytes((folder / "model.Q8_0.gguf").read_bytes())
    second.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(10_000))
    of_file = listed()[str(first)]
    assert of_file["state"] == "ready" and of_file["size"] == first.stat().st_size + second.stat().st_size


def test_the_default_is_ready_once_it_is_there(listed):
    save_tiny(default_folder())
    assert listed()["smollm2-135m-instruct"]["state"] == "ready, the default"


def test_the_table_says_what_else_may_be_named(hub, command, monkeypatch):
    status, out, _ = command("models")
    assert status == 0 and "own/tiny" in out and "2,048" in out and "-m ORG/NAME" in out
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in command("models")[1]


def test_a_model_that_is_nowhere_is_refused_with_the_nearest_name(hub, command, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("sys.stdin", None)
    result = command("generate hello -m own/tinny")
    assert_refused(result, "Did you mean own/tiny & HF_HUB_OFFLINE & nanovllm models")
    assert_refused(command("generate hello -m 'not a name!'"), "no id of the hub")
