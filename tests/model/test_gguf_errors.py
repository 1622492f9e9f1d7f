"""GGUF files that are damaged or hold what is not read, and options that contradict them: refused by name, early."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from nanovllm import LLM, ModelLoadError, UnsupportedModelError
from nanovllm.features.engine_config import EngineConfig
from nanovllm.models.gguf import loading
from nanovllm.models.gguf.config import generation_defaults
from nanovllm.models.gguf.file import GGUFFile
from nanovllm.models.gguf.tokenizer import build_tokenizer
from nanovllm.models.quantised.blocks import QuantisedLinear
from tests.support.tiny_gguf import write_gguf, write_header
from tests.support.tiny_models import tiny_model

OPTIONS = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 33, "max_model_len": 256}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file that loads; nobody writes to it."""
    return make(tmp_path_factory.mktemp("gguf") / "whole.gguf")


def make(path, **options):
    model = tiny_model(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=64)
    return write_gguf(path, model, **options)


def refusal(path, kind=ModelLoadError, **options):
    """What `LLM` says of it, before any weight was read."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(kind) as caught:
        patch.setattr(torch, "from_numpy", lambda data: pytest.fail("a weight was read"))
        LLM(path, **(OPTIONS | options))
    return str(caught.value)


def cut(path, target, num_bytes):
    target.write_bytes(path.read_bytes()[:num_bytes])
    return target


@pytest.mark.parametrize("share", [0.02, 0.3, 0.999])
def test_a_truncated_file_is_an_error_wherever_it_ends(whole, tmp_path, share):
    path = cut(whole, tmp_path / "cut.gguf", int(whole.stat().st_size * share))
    message = refusal(path)
    assert str(path) in message and "truncated" in message and "Fetch it again" in message


def test_every_length_of_a_header_is_an_error_of_ours(whole, tmp_path):
    head = 600
    for num_bytes in range(0, head, 7):
        with pytest.raises(ModelLoadError):
            GGUFFile(cut(whole, tmp_path / f"{num_bytes}.gguf", num_bytes))


def test_random_bytes_in_the_header_are_an_error_of_ours_or_another_valid_header(whole, tmp_path):
    content, random = bytearray(whole.read_bytes()), np.random.default_rng(0)
    path = tmp_path / "spoilt.gguf"
    refused = 0
    for _ in range(150):
        spoilt = bytearray(content)
        for at in random.integers(4, 400, size=4):
            spoilt[at] = random.integers(256)
        path.write_bytes(spoilt)
        try:
            GGUFFile(path)
        except ModelLoadError:
            refused += 1
    assert refused > 75


def text(content):
    return struct.pack("<Q", len(content)) + content.encode()


def header(path, *parts, num_tensors=0, num_keys=1, size=0):
    """A file that begins so, and goes on with zeros (which take no space) up to `size`."""
    named = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + named + b"".join(parts))
        file.truncate(max(size, file.tell() + 64))
    return path


def entry(name, dims, offset):
    """Of a tensor in float32."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, offset)


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


_AN_ARRAY = struct.pack("<IQ", 9, 1)


@pytest.mark.parametrize(
    "options, parts, words",
    [
        ({"num_keys": 2}, [key("a", 9, _AN_ARRAY * 5000)], "an array of arrays"),
        ({"num_keys": 2}, [key("a", 8, struct.pack("<Q", 2 << 30))], "2,147,483,648 bytes of one text"),
        ({"num_keys": 2}, [key("a", 9, struct.pack("<IQ", 0, 2 << 30))], "2,147,483,648 items of an array"),
        ({"num_keys": 2}, [key("a", 9, struct.pack("<IQ", 8, 1 << 27))], "134,217,728 items"),
        ({"num_keys": 1 << 27}, [], "134,217,728 metadata"),
        ({"num_tensors": 1 << 27}, [], "134,217,728 tensors"),
        ({"num_tensors": 1}, [entry("t", [1] * 5, 0)], "5 dimensions of t"),
        ({"num_tensors": 1}, [entry("t", [0, 1 << 62, 1 << 62], 0)], "but of shape"),
        ({"num_tensors": 1}, [entry("t", [4], 4)], "t begins at 4, no multiple of 32"),
        ({"num_tensors": 2}, [entry("t", [16], 0), entry("u", [8], 32)], "tensors t and u overlap"),
        ({"num_keys": 3}, [key("a", 4, bytes(4))] * 2, "'a' twice"),
        ({"num_keys": 2}, [key("general.alignment", 4, struct.pack("<I", 3))], "is 3, which is no power of two"),
    ],
)
def test_damaged_counts_in_a_large_file_are_refused_at_once(tmp_path, options, parts, words):
    """Not after minutes and gigabytes, for which the rest of the file would do."""
    path = header(tmp_path / "m.gguf", *parts, size=3 << 30, **options)
    with pytest.raises(ModelLoadError, match="damaged") as caught:
        GGUFFile(path)
    assert words in str(caught.value)


def test_a_file_of_another_kind_is_told_from_a_gguf_file(tmp_path):
    named, other = tmp_path / "model.gguf", tmp_path / "weights.bin"
    for path in (named, other):
        path.write_bytes(b"PK\x03\x04 something else")
    assert f"{named} is no GGUF file: it begins with b'PK" in refusal(named)
    assert f"{other} is a file, but no GGUF file" in refusal(other)


def test_a_file_without_the_ending_is_known_by_its_first_bytes(whole, tmp_path):
    blob = tmp_path / "3fa9c0"  # as in the cache of the hub
    blob.symlink_to(whole)
    with LLM(blob, **OPTIONS) as llm:
        assert llm.tokenizer.chat_template


def test_a_path_to_nothing_and_a_folder_of_gguf_files_are_told(whole, tmp_path):
    for name in ("none.gguf", "models/none.gguf"):  # no hub ids
        assert refusal(Path(name)) == f"there is no file {name}."
    assert refusal(tmp_path / "none.gguf") == f"there is no file {tmp_path / 'none.gguf'}."
    (tmp_path / "a.gguf").symlink_to(whole)
    assert f"name one: {tmp_path / 'a.gguf'}" in refusal(tmp_path)


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_another_version_or_byte_order_is_refused(whole, tmp_path, version):
    content = bytearray(whole.read_bytes())
    content[4:8] = struct.pack("<I", version)
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    message = refusal(path)
    assert ("is big-endian" if version > 4 else f"version {version} of the format") in message


def test_types_without_a_kernel_are_listed_with_their_tensors_and_the_remedy(whole, tmp_path):
    path = tmp_path / "iq4.gguf"
    reader = gguf.GGUFReader(whole)
    content = bytearray(whole.read_bytes())
    for tensor in reader.tensors:
        if "attn_k" in tensor.name:  # IQ4_NL in place of Q8_0: smaller, so the bytes still lie in the file
            _, name, _, _, kind, _ = tensor.field.parts
            at = tensor.field.offset + 8 + len(name) + 4 + 8 * len(tensor.shape)
            assert struct.unpack_from("<I", content, at)[0] == kind[0]
            struct.pack_into("<I", content, at, gguf.GGMLQuantizationType.IQ4_NL)
    path.write_bytes(content)
    message = refusal(path, UnsupportedModelError)
    assert "without a kernel (IQ4_NL: blk.0.attn_k.weight, blk.1.attn_k.weight)" in message
    assert "Q4_K_M" in message


def test_a_part_of_a_split_file_is_missing_or_not_the_first(whole, tmp_path):
    first, second = (tmp_path / f"m-0000{index}-of-00003.gguf" for index in (1, 2))
    first.symlink_to(whole)
    assert "missing beside it: m-00002-of-00003.gguf, m-00003-of-00003.gguf" in refusal(first)
    second.symlink_to(whole)
    assert "part 2 of 3 of a model; name the first one, m-00001-of-00003.gguf" in refusal(second)
    first = tmp_path / "m-00001-of-09999.gguf"
    first.symlink_to(whole)
    assert "9998 are missing" in refusal(first) and len(refusal(first)) < len(str(first)) + 200
    third = tmp_path / "m-00003-of-00000.gguf"
    third.symlink_to(whole)
    assert "would be part 3 of 0" in refusal(third)


def test_an_architecture_without_a_mapping_is_named(tmp_path):
    message = refusal(write_header(tmp_path / "m.gguf", "mamba", token_list=["a"]), UnsupportedModelError)
    assert "'mamba'" in message and "llama" in message and "qwen3" in message


@pytest.mark.parametrize(
    "key, value",
    [
        ("expert_count", 8),
        ("attention.scale", 0.5),
        ("rope.scaling.type", "dynamic"),
        ("rope.dimension_count", 8),
        ("attention.value_length", 32),
        ("attention.head_count_kv", [2, 1]),
    ],
)
def test_metadata_that_would_change_the_answers_are_refused_and_not_ignored(tmp_path, key, value):
    message = refusal(make(tmp_path / "m.gguf", metadata={key: value}), UnsupportedModelError)
    assert str(tmp_path) in message
    assert any(word in message for word in (key, str(value), f"'{value}'"))


def test_missing_metadata_and_tensors_are_named(tmp_path):
    path = make(tmp_path / "keys.gguf", metadata={"embedding_length": None})
    assert "its metadata lack llama.embedding_length" in refusal(path)
    path = make(tmp_path / "layers.gguf", metadata={"block_count": 3}, more={"blk.2.attn_norm.weight": np.ones(64)})
    assert "8 tensors are missing" in refusal(path) and "model.layers.2." in refusal(path)
    path = make(tmp_path / "heads.gguf", metadata={"attention.head_count": 3})
    assert "does not take its config" in refusal(path) and "(64)" in refusal(path)
    path = make(tmp_path / "width.gguf", metadata={"feed_forward_length": 128})
    assert "has the shape [64, 64], but the metadata make it [128, 64]" in refusal(path)


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("block_count", 2**31, "of 2147483648 layers (block_count) it has 2"),
        ("attention.head_count_kv", 0, "attention.head_count_kv to 0"),
        ("rope.freq_base", "fast", "rope.freq_base to fast"),
        ("rope.freq_base", 0.0, "rope.freq_base to 0.0"),
        ("rope.scaling.attn_factor", "x", "rope.scaling.attn_factor to x"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "attention.layer_norm_rms_epsilon to nan"),
    ],
)
def test_numbers_that_no_model_has_are_refused_by_their_keys(tmp_path, key, value, words):
    assert words in refusal(make(tmp_path / "m.gguf", metadata={key: value}))


def test_a_number_for_each_layer_is_read_if_all_are_the_same(tmp_path):
    path = make(tmp_path / "m.gguf", metadata={"attention.head_count": [4, 4], "attention.head_count_kv": [2, 2]})
    with LLM(path, **OPTIONS) as llm:
        config = llm._engine.model_runner.binding.model.config
        assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)


def test_a_damaged_vocabulary_is_an_error_of_ours(whole, monkeypatch):
    spoilt = {"merges": ["no merge", "nor"], "eos_token_id": 10**6, "token_type": [3] * 10_000, "tokens": [1, 2]}
    for name, value in spoilt.items():
        file = GGUFFile(whole)
        file.metadata[f"tokenizer.ggml.{name}"] = value
        generation_defaults(file)
        with monkeypatch.context() as patch, pytest.raises(ModelLoadError, match=r"damaged tokenizer.*tokenizer="):
            patch.setattr(loading, "open_gguf", lambda source, file=file: file)
            loading.load_tokenizer(str(whole))


def test_a_tensor_without_a_meaning_is_refused(tmp_path):
    path = make(tmp_path / "m.gguf", more={"blk.0.attn_sinks.weight": np.ones(4)})
    assert "1 tensors that are not read" in refusal(path, UnsupportedModelError)
    path = make(tmp_path / "b.gguf", more={"blk.0.attn_v.bias": np.ones(32)})
    assert "blk.0.attn_v.bias" in refusal(path, UnsupportedModelError)


def test_a_file_without_a_tokenizer_is_refused_unless_one_is_passed(whole, tmp_path):
    path = make(tmp_path / "m.gguf", has_tokenizer=False)
    assert f"{path} has no tokenizer" in refusal(path)
    with LLM(path, tokenizer=whole, **OPTIONS) as llm:
        assert llm.tokenizer.decode(llm.tokenizer.encode("The capital")) == "The capital"


def test_a_tokenizer_whose_splitting_is_not_known_is_refused(tmp_path):
    known = {"tokenizer_model": "gpt2", "tokenizer_pre": "gpt-2", "token_list": ["a"]}
    for key, value in (("pre", "some-new-one"), ("model", "rwkv")):
        path = write_header(tmp_path / "m.gguf", **known | {f"tokenizer_{key}": value})
        with pytest.raises(UnsupportedModelError, match=f"tokenizer.ggml.{key} is '{value}'.*tokenizer="):
            build_tokenizer(GGUFFile(path))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"revision": "main"}, "is no hub model"),
        ({"trust_remote_code": True}, "a GGUF file has none"),
        ({"quantization": "int8"}, "quantised as they are in it"),
    ],
)
def test_options_that_contradict_a_file_are_refused(whole, options, words):
    with pytest.raises(ValueError, match=words):
        LLM(whole, tokenizer=loading.load_tokenizer(str(whole)), **OPTIONS, **options)


@pytest.mark.parametrize(
    "device, is_sharded, option",
    [("cuda", False, None), ("cpu", True, None), ("cpu", False, "dequantize"), ("cpu", False, "keep")],
)
def test_gpus_ranks_and_who_asks_get_plain_weights(whole, device, is_sharded, option):
    config = EngineConfig(quantization=option)
    model = loading.load_module(str(whole), config, torch.device(device), is_sharded=is_sharded)
    kinds = {type(model.get_submodule(f"model.layers.0.mlp.{name}_proj")) for name in ("up", "down")}
    assert kinds == {QuantisedLinear if option == "keep" else torch.nn.Linear}


def test_blocks_cannot_be_kept_on_a_gpu(whole):
    with pytest.raises(ValueError, match="quantization is 'keep', but blocks of a GGUF file have kernels in one"):
        loading.load_module(str(whole), EngineConfig(quantization="keep"), torch.device("cuda"), is_sharded=False)
