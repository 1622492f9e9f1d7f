"""The parts of a decoder layer, or the reason why it is of another kind."""

import pytest
import torch
from torch import nn

from nanovllm.errors import NotFusedError
from nanovllm.fast.layers.decoder_block import describe_blocks, model_parts
from nanovllm.features.composition.binding import build_binding
from tests.support.other_models import small
from tests.support.tiny_models import DTYPES, LLAMAS_KIND, tiny_model


def blocks_of(model, change=None):
    """Those of a model, of which something is changed once its attention layers are known."""
    binding = build_binding(model, is_live=False)
    if change is not None:
        change(model.model.layers[1])
    return describe_blocks(binding.layer_modules, binding.layers)


@LLAMAS_KIND
@DTYPES
def test_the_parts_are_the_models_own_modules(family, dtype):
    model = tiny_model(family, dtype=dtype)
    layers = model.model.layers
    blocks = blocks_of(model)
    assert len(blocks) == len(layers)
    for layer, block in zip(layers, blocks, strict=True):
        attention = layer.self_attn
        assert list(block.linears.values()) == [
            attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
            layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj,
        ]  # fmt: skip
        assert block.norms["input"].module is layer.input_layernorm
        assert block.norms["post"].module is layer.post_attention_layernorm
        assert set(block.norms) == ({"input", "post", "q", "k"} if family == "qwen3" else {"input", "post"})
        assert block.sizes == (model.config.hidden_size, model.config.intermediate_size)


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: tiny_model("olmo2"), "Olmo2DecoderLayer has no RMS norm input_layernorm"),
        (lambda: small("Phi3"), "no linear layer gate_proj"),
        (lambda: small("Gemma", head_dim=32), "no RMS norm over"),
        (lambda: tiny_model("llama", hidden_act="gelu"), "no SiLU"),
    ],
)
def test_a_family_of_another_kind_is_refused_with_the_reason(make, reason):
    with pytest.raises(NotFusedError, match=reason):
        blocks_of(make())


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda layer: layer.register_parameter("gain", nn.Parameter(torch.ones(1))), "more parameters: gain"),
        (lambda layer: setattr(layer.self_attn, "k_norm", None), "q_norm alone"),
        (lambda layer: setattr(layer.mlp, "down_proj", nn.Linear(8, 8)), "projections of other sizes"),
        (
            lambda layer: layer.self_attn.q_norm.register_forward_hook(lambda norm, given, output: output * 0.98),
            "no RMS norm over 128 elements as its q norm",
        ),
    ],
)
def test_a_layer_that_differs_from_its_family_is_refused_with_the_reason(change, reason):
    assert len(blocks_of(tiny_model("qwen3"))) == 2
    with pytest.raises(NotFusedError, match=reason):
        blocks_of(tiny_model("qwen3"), change)


def test_layers_that_are_in_no_list_are_refused():
    with pytest.raises(NotFusedError, match="in no list of layers"):
        describe_blocks([], build_binding(tiny_model("llama"), is_live=False).layers)


def test_a_model_with_a_part_beside_the_known_ones_has_no_description():
    model = tiny_model("llama")
    parts = model_parts(model)
    assert parts.norm is model.model.norm and parts.head is model.lm_head
    model.model.extra = nn.Identity()
    assert model_parts(model) is None
