"""Folders and files that are given by mistake: the error says what they are, not what a library failed at."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.errors import ModelLoadError, UnsupportedModelError
from nanovllm.features.option_checks import utf8
from nanovllm.models.gguf.config import read_config
from nanovllm.models.gguf.file import GGUFFile
from nanovllm.models.source import find_tokenizer
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import save_tiny, tiny_model

SMALL = {"enforce_eager": True, "max_model_len": 128, "num_kv_blocks": 40, "block_size": 16}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 269060552\n"


@pytest.fixture
def folder(tmp_path):
    return Path(save_tiny(tmp_path / "tiny"))


FILES = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")
TEXTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@pytest.mark.parametrize("name", FILES + TEXTS)
def test_a_git_lfs_pointer_is_named(folder, name):
    (folder / name).write_bytes(POINTER)
    with pytest.raises(ModelLoadError, match=_pointer(name)):
        LLM(folder, **SMALL)


def _pointer(name):
    return rf"{name} is a git-lfs pointer, not the file itself. Run git lfs pull"


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_pointers_of_a_slow_tokenizer_are_named(folder, name):
    (folder / "tokenizer.json").unlink()
    (folder / name).write_bytes(POINTER)
    with pytest.raises(ModelLoadError, match=_pointer(name)):
        LLM(folder, **SMALL)
    with pytest.raises(ModelLoadError, match=_pointer(name)):
        find_tokenizer(str(folder))


@pytest.mark.parametrize("name", ["model.gguf", "model"])
def test_a_file_that_is_a_git_lfs_pointer_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(ModelLoadError, match=_pointer(name)):
        LLM(tmp_path / name, **SMALL)
    with pytest.raises(ModelLoadError, match=_pointer(name)):
        find_tokenizer(str(tmp_path / name))


def test_pointers_that_nothing_reads_are_left_alone(folder):
    for name in ("pytorch_model.bin", "tokenizer.model", "picture.png", "README.md"):
        (folder / name).write_bytes(POINTER)
    with LLM(folder, **SMALL) as llm:
        assert llm.embed([1, 2, 3], use_tqdm=False)[0].embedding is not None
    for name in TEXTS:
        (folder / name).write_bytes(POINTER)
    with LLM(folder, skip_tokenizer_init=True, **SMALL) as llm:
        assert llm.embed([1, 2, 3], use_tqdm=False)[0].embedding is not None


def test_a_chat_template_given_as_a_pointer_is_named(folder, tmp_path):
    (tmp_path / "own.jinja").write_bytes(POINTER)
    with pytest.raises(ValueError, match=_pointer("own.jinja',")):
        LLM(folder, chat_template=str(tmp_path / "own.jinja"), **SMALL)


@pytest.mark.parametrize("has_config", [False, True])
def test_the_folder_of_an_adapter_is_named_with_its_model(folder, has_config):
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    if not has_config:
        (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"holds an adapter .* of the model 'org/base', not a model. Merge it"):
        LLM(folder, **SMALL)


def test_a_tensor_of_another_shape_is_named_with_both(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.embed_tokens.weight"
    tensors[name] = tensors[name][:-3].clone()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=rf"{name} has the shape \[\d+, \d+\] in the file and \[\d+, \d+\] by"):
        LLM(folder, **SMALL)


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
