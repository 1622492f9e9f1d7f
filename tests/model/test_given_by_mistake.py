"""Folders and files that are given by mistake: the error says what they are, not what a library failed at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.core.errors import ModelLoadError, UnsupportedModelError
from nanovllm.core.validation import utf8
from nanovllm.model.gguf.config import read_config
from nanovllm.model.gguf.file import GGUFFile
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import save_tiny, tiny_model

SMALL = {"enforce_eager": True, "max_model_len": 128, "num_kv_blocks": 40, "block_size": 16}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 269060552\n"


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(save_tiny(tmp_path / "tiny"))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_git_lfs_pointer_is_named(folder, name):
    (folder / name).write_bytes(POINTER)
    with pytest.raises(ModelLoadError, match=rf"{name} is a git-lfs pointer, not the file itself. Run git lfs pull"):
        LLM(str(folder), **SMALL)


@pytest.mark.parametrize("has_config", [False, True])
def test_the_folder_of_an_adapter_is_named_with_its_model(folder, has_config):
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    if not has_config:
        (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"holds an adapter .* of the model 'org/base', not a model. Merge it"):
        LLM(str(folder), **SMALL)


def test_a_tensor_of_another_shape_is_named_with_both(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.embed_tokens.weight"
    tensors[name] = tensors[name][:-3].clone()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=rf"{name} has the shape \[\d+, \d+\] in the file and \[\d+, \d+\] by"):
        LLM(str(folder), **SMALL)


@pytest.mark.parametrize("metadata", [
    {"pooling_type": 3},
    {"attention.sliding_window": 0},
    {"classifier.output_labels": ["yes", "no"]},
    {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0, "rope.scaling.yarn_ext_factor": 1.0},
], ids=["pooling", "window", "labels", "yarn"])  # fmt: skip
def test_keys_at_the_value_that_is_done_anyway_change_nothing(tmp_path, metadata):
    configs = []
    for number, keys in enumerate(({}, metadata)):
        path = tmp_path / f"{number}.gguf"
        write_gguf(path, tiny_model("qwen3"), "F32", architecture="qwen3", metadata=keys)
        configs.append(read_config(GGUFFile(path)))
    assert configs[0] == configs[1]


@pytest.mark.parametrize("metadata", [{"pooling_type": 1}, {"rope.scaling.yarn_beta_fast": 16.0}], ids=["mean", "beta"])
def test_keys_at_other_values_are_refused_by_name(tmp_path, metadata):
    write_gguf(tmp_path / "m.gguf", tiny_model("qwen3"), "F32", architecture="qwen3", metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=next(iter(metadata))):
        read_config(GGUFFile(tmp_path / "m.gguf"))


def test_a_byte_order_mark_is_no_part_of_a_text():
    """Editors on Windows write it; of batch files, prompts and key files."""
    assert utf8("x", b"\xef\xbb\xbf{}\r\n") == "{}\n"
