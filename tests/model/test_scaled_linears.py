"""Linear layers of 8-bit floats whose inputs are rounded too: products, quantisation on load, merging, refusals."""

import pytest
import torch
from torch import nn

from nanovllm import LLM
from nanovllm.errors import UnsupportedModelError
from nanovllm.fast.layers.merged_linears import MergedJoined, MergedPart, merging
from nanovllm.features.engine_config import EngineConfig
from nanovllm.models.exact_activations import check_exact_activations
from nanovllm.models.quantised import on_load, scaled
from nanovllm.models.quantised.on_load import quantise_model
from nanovllm.models.quantised.scaled import ScaledLinear, why_not
from tests.support.scaled_layers import Dense, replaced, scaled_linear
from tests.support.tiny_models import save_tiny, tiny_model

TOKENS = torch.arange(40)[None]


@pytest.fixture
def scaled_model(monkeypatch):
    """A tiny model by family, quantised as for a GPU."""
    monkeypatch.setattr(on_load, "why_not", lambda *sizes: None)

    def make(family):
        model = tiny_model(family)
        quantise_model(model, "fp8")
        return model

    return make


@pytest.mark.parametrize("bias", [None, torch.linspace(-3, 3, 48)], ids=["no bias", "bias"])
def test_a_product_is_that_of_rounded_rows_and_weights(bias):
    torch.manual_seed(0)
    layer = scaled_linear(torch.randn(48, 64), bias)
    states = torch.randn(2, 9, 64) * torch.logspace(-6, 4, 9)[:, None]
    states[0, 3] = 0.0
    torch.testing.assert_close(layer(states), Dense(layer)(states), atol=1e-5, rtol=1e-5)
    assert layer(states[:, :0]).shape == (2, 0, 48)


def test_a_row_that_is_not_finite_stays_alone():
    layer = scaled_linear(torch.randn(48, 64))
    states = torch.randn(3, 64)
    expected = layer(states)
    states[1, 5] = float("nan")
    output = layer(states)
    assert output[1].isnan().all() and torch.equal(output[::2], expected[::2])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_merged_model_computes_the_same(scaled_model, family):
    model = scaled_model(family)
    with torch.no_grad():
        expected = model(TOKENS).logits
        with merging(model, model.model.layers):
            model(TOKENS)
        torch.testing.assert_close(model(TOKENS).logits, expected, atol=1e-5, rtol=1e-5)
    attention = model.model.layers[0].self_attn
    assert isinstance(attention.q_proj, MergedJoined) and isinstance(attention.v_proj, MergedPart)
    assert attention.q_proj.num_outputs == sum(
        getattr(attention, f"{name}_proj").out_features for name in ("q", "k", "v")
    )
    with pytest.raises(UnsupportedModelError, match="reads the weight"):
        _ = attention.o_proj.weight


def test_on_load_all_layers_but_the_head_are_quantised_and_others_freed(scaled_model):
    model = scaled_model("llama")
    kinds = {type(module) for module in model.modules() if hasattr(module, "in_features")}
    assert kinds == {ScaledLinear, nn.Linear} and type(model.lm_head) is nn.Linear
    assert not [name for name, _ in model.named_parameters() if name.endswith("proj.weight")]
    with torch.no_grad():
        logits = model(TOKENS).logits
        torch.testing.assert_close(logits, replaced(model, Dense)(TOKENS).logits, atol=1e-4, rtol=1e-4)
        plain = tiny_model("llama")(TOKENS).logits
    assert 0 < (logits - plain).norm() / plain.norm() < 0.3


@pytest.mark.parametrize("sizes, reason", [((40, 64), "not multiples of 16"), ((64, 64), "cpu does not")])
def test_a_weight_without_a_product_says_why(sizes, reason):
    assert reason in why_not(*sizes, torch.device("cpu"))


def test_fp8_is_refused_without_such_a_gpu_before_the_model_is_loaded(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"quantization is 'fp8'.*8\.9.*cpu does not multiply.*'int4' on a CPU"):
        LLM(folder, quantization="fp8")
    assert torch.finfo(scaled.E4M3).max == scaled.LARGEST


def test_exact_activations_beside_fp8_are_refused_where_the_device_is_not_known_yet():
    with pytest.raises(ValueError, match=r"quantization is 'fp8', whose products are a GPU's.*'int8' or 'int4'"):
        check_exact_activations(EngineConfig(quantization="fp8", exact_activations=True), "a folder")
