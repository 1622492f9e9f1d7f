"""Layers in a GPU's tiles hold the weights of the layers that they were made of, bit for bit; here without a GPU."""

import pytest
import torch

from nanovllm.fast.layers.merged_linears import MergedJoined, MergedPart, merging
from nanovllm.features.engine_config import EngineConfig
from nanovllm.models.experts import is_kept
from nanovllm.models.loader import load_module
from nanovllm.models.quantised.blocks import FORMATS
from nanovllm.models.quantised.scaled import ScaledLinear
from nanovllm.models.quantised.tiled import TiledLinear, place, placed_linear, tiled_linear
from tests.support.quantised import KINDS, random_layer
from tests.support.quantised_checkpoints import save_mxfp4, save_quantised, small_moe
from tests.support.tiny_models import tiny_model

CPU = torch.device("cpu")
# Quotients of scales; zero points as minima, since float16 does not hold these scales.
BOUNDS = {"NVFP4 over": 3e-7, "W4 exact zeros": 2e-6}


def tiled(kind, *sizes, **options):
    return tiled_linear(random_layer(kind, *sizes, **options).quantised_parts())


@pytest.mark.parametrize("sizes", [(48, 256), (200, 512), (7, 768)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_hold_the_weight(kind, sizes):
    layer = random_layer(kind, *sizes, torch.randn(sizes[0]))
    own = tiled_linear(layer.quantised_parts(), layer.bias)
    bound = BOUNDS.get(kind, 0)
    torch.testing.assert_close(own.dequantise(), layer.dequantise(), rtol=bound, atol=bound)
    states = torch.randn(3, sizes[1])
    torch.testing.assert_close(own(states), layer(states), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kind, run, shifts",
    [("W4 groups", 64, ""), ("W4 zeros", 128, "subtracted"), ("Q4_1", 32, "added"), ("Q6_K", 16, ""), ("int8", 0, "")],
)
def test_what_is_equal_is_stored_once(kind, run, shifts):
    form = tiled(kind, 32, 256).form
    assert (form.run, form.shifts) == (run, shifts)


def test_tiles_of_several_layers_are_joined():
    layers = [tiled("W4 zeros", rows, 256, seed=rows) for rows in (32, 48)]
    joined = TiledLinear.joined(layers)
    assert torch.equal(joined.dequantise(), torch.cat([layer.dequantise() for layer in layers]))
    odd = tiled("W4 zeros", 40, 256)
    assert layers[0].kind == layers[1].kind != odd.kind
    assert odd.kind != tiled("W4 zeros", 40, 256).kind


def test_layers_that_read_one_input_become_one_product():
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
        plain = getattr(attention, name)
        setattr(attention, name, tiled("MXFP4", plain.out_features, plain.in_features, seed=number))
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        with merging(model, [model.model.layers[0]]):
            model(tokens)
        torch.testing.assert_close(model(tokens).logits, expected)
    assert isinstance(attention.q_proj, MergedJoined) and isinstance(attention.v_proj, MergedPart)


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_has_a_place_on_a_gpu(kind, monkeypatch):
    monkeypatch.setattr("nanovllm.models.quantised.tiled.why_not_packed", lambda device: None)
    monkeypatch.setattr("nanovllm.models.quantised.tiled.why_not", lambda *_, **__: None)
    layer = random_layer(kind, 32, 256, torch.randn(32), dtype=torch.bfloat16)
    placed = placed_linear(layer, CPU)
    assert type(placed) is (ScaledLinear if kind == "FP8 rows" else TiledLinear)
    assert placed.bias is not None


def test_scales_that_kernels_cannot_multiply_are_left_to_others():
    parts = random_layer("FP8 blocks", 32, 256).quantised_parts()
    assert tiled_linear(parts) is not None and tiled_linear(parts._replace(scales=parts.scales * 1e6)) is None


def test_a_weight_is_not_read_or_loaded_by_itself():
    layer = tiled("Q4_1", 32, 256)
    with pytest.raises(Exception, match="quantised"):
        _ = layer.weight
    with pytest.raises(ValueError, match="state dict"):
        layer.load_state_dict({})
    assert "int4 in runs of 32" in repr(layer) and set(FORMATS) >= {"Q4_1"}


@pytest.mark.parametrize("is_gpt_oss", [False, True])
def test_experts_become_plain_again(is_gpt_oss, tmp_path):
    folder = save_mxfp4(tmp_path) if is_gpt_oss else save_quantised(tmp_path, "ct-nvfp4", small_moe())
    kept, plain = (
        load_module(str(folder), EngineConfig(quantization=option, device="cpu"), CPU)
        for option in ("keep", "dequantize")
    )
    assert any(is_kept(module) for module in kept.modules())
    place(kept, CPU)
    assert not any(is_kept(module) for module in kept.modules())
    for (name, own), (other, expected) in zip(kept.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(own, expected, rtol=1e-2 * (not is_gpt_oss), atol=0)  # NVFP4's quotients
