"""Quantised linear layers and embeddings: their block formats against the `gguf` package, bit for bit."""

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import nn

from nanovllm.errors import UnsupportedModelError
from nanovllm.models import kept_weights
from nanovllm.models.quantised.blocks import FORMATS, KIND_OF_OPTION, QuantisedEmbedding, QuantisedLinear, quantise
from tests.support.quantised import random_blocks
from tests.support.tiny_models import DTYPES

GGUF_KINDS = [kind for kind in FORMATS if kind != "int8"]


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_blocks_are_dequantised_bit_for_bit_as_gguf_does(kind):
    blocks = random_blocks(kind, 40, 512)
    expected = dequantize(blocks.numpy(), GGMLQuantizationType[kind])
    assert np.array_equal(QuantisedLinear(kind, blocks).dequantise().numpy(), expected)


@pytest.mark.parametrize("kind", FORMATS)
@DTYPES
def test_forward_is_that_of_a_plain_layer_of_the_dequantised_weights(kind, dtype):
    layer = QuantisedLinear(kind, random_blocks(kind, 48, 256), torch.randn(48, dtype=dtype), dtype=dtype)
    states = torch.randn(2, 3, 256).to(dtype)
    plain = F.linear(states, layer.dequantise().to(dtype)) + layer.bias
    assert torch.equal(layer(states), plain)


@pytest.mark.parametrize("kind", FORMATS)
def test_an_embedding_looks_up_the_rows_of_the_dequantised_weight(kind):
    table = QuantisedEmbedding(kind, random_blocks(kind, 64, 256), dtype=torch.bfloat16)
    token_ids = torch.tensor([[3, 63, 3], [0, 17, 5]])
    assert torch.equal(table(token_ids), table.dequantise().bfloat16()[token_ids])


def test_int8_is_within_half_a_step_of_its_output_and_q4_1_within_half_a_step_of_its_block():
    weight = torch.randn(32, 96)
    weight[3] = 0
    eight = _quantised(weight, "int8")
    assert eight.kind == "int8"
    steps = weight.abs().amax(1, keepdim=True) / 127
    assert ((eight.dequantise() - weight).abs() <= 0.5001 * steps).all()
    four = _quantised(weight, "int4")
    blocks, own = weight.unflatten(1, (3, 32)), four.dequantise().unflatten(1, (3, 32))
    steps = (blocks.amax(2, keepdim=True) - blocks.amin(2, keepdim=True)) / 15
    assert ((own - blocks).abs() <= 0.51 * steps + 2e-3).all()  # float16 rounds the minimum and the scale
    assert (own[3] == 0).all()


def test_what_q4_1_holds_already_is_quantised_without_a_loss():
    blocks = random_blocks("Q4_1", 32, 256)
    blocks[:, 4::20] |= 0xF0  # both ends of the range occur in each block
    blocks[:, 5::20] &= 0xF0
    weight = QuantisedLinear("Q4_1", blocks).dequantise()
    again = QuantisedLinear("Q4_1", quantise(weight, "Q4_1")).dequantise()
    assert (again - weight).abs().max() <= 1e-3 * weight.abs().max()


def test_a_weight_that_something_else_reads_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="Leave quantization out"):
        _ = _quantised(torch.randn(32, 64), "int8").weight


def test_blocks_that_are_no_whole_rows_are_refused():
    with pytest.raises(ValueError, match="33 bytes are not of whole blocks of 34"):
        QuantisedLinear("Q8_0", torch.zeros(4, 33, dtype=torch.uint8))
    with pytest.raises(ValueError, match="must be one of int8, Q8_0"):
        QuantisedLinear("Q3_K", torch.zeros(4, 34, dtype=torch.uint8))
    with pytest.raises(ValueError, match="must be uint8"):
        QuantisedLinear("Q8_0", torch.zeros(4, 34))


def _quantised(weight, option):
    kind = KIND_OF_OPTION[option]
    return QuantisedLinear(kind, quantise(weight.detach(), kind), dtype=weight.dtype)


def test_the_first_passes_dequantise_a_weight_once(monkeypatch):
    linear, before = _quantised(nn.Linear(64, 32).weight, "int4"), kept_weights._total
    states, calls = torch.randn(3, 64), []
    dequantise = linear.dequantise
    monkeypatch.setattr(linear, "dequantise", lambda rows: calls.append(rows) or dequantise(rows))
    outputs = [linear(states) for _ in range(kept_weights.PASSES)]
    assert len(calls) == 1
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert torch.equal(linear(states), outputs[0])
    assert len(calls) == 2  # freed
    assert kept_weights._total == before


@pytest.mark.parametrize("frees", [True, False])
def test_a_weight_that_is_freed_makes_room_for_others(frees):
    linear, before = _quantised(nn.Linear(64, 32).weight, "int4"), kept_weights._total
    linear(torch.randn(3, 64))
    assert kept_weights._total == before + 64 * 32 * 4
    if frees:
        linear.free()
    del linear
    assert kept_weights._total == before


def test_layers_that_are_compiled_keep_no_weights_and_one_version_serves_all_passes():
    counter = torch._dynamo.testing.CompileCounter()
    layers = [
        nn.Sequential(QuantisedLinear("int8", quantise(torch.randn(64, 64), "int8"), None, dtype=torch.float32))
        for _ in range(2)
    ]
    compute = torch.compile(lambda layer, states: layer(states), backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for number in range(kept_weights.PASSES + 3):
            states = torch.randn(2 + number, 64)
            for layer in layers:
                torch.testing.assert_close(compute(layer, states), layer(states))
    assert counter.frame_count <= len(layers)
