"""Routed experts in a GPU's tiles compute as the dequantised ones of `transformers`; here by the kernels' reference."""

import math

import pytest
import torch
from torch import nn
from transformers.integrations.moe import _default_apply_gate

from nanovllm.errors import UnsupportedModelError
from nanovllm.fast.kernels import packed_experts
from nanovllm.fast.kernels.packed_experts import apply_gate, expert_products
from nanovllm.features.engine_config import EngineConfig
from nanovllm.models.experts import KEPT_EXPERTS, experts_of, is_kept
from nanovllm.models.loader import load_module
from nanovllm.models.quantised import tiled, tiled_experts
from nanovllm.models.quantised.tiled_experts import TiledExperts, _gate_of
from tests.support.quantised_checkpoints import save_mxfp4, save_quantised, small_moe

CPU = torch.device("cpu")
FORMS = ("mxfp4", "ct-w4a16", "ct-w4a16-asym", "ct-nvfp4", "ct-int8-channel", "fp8-block", "ct-fp8-channel")
ACT = {"SiLU": nn.SiLU(), "GELU": nn.GELU()}


@pytest.fixture
def gpu(monkeypatch):
    """The CPU in place of a GPU with packed products."""
    for module in (tiled, tiled_experts):
        monkeypatch.setattr(module, "why_not_packed", lambda device: None)
    for name in ("packed_rows", "packed_experts"):
        monkeypatch.setattr(f"nanovllm.fast.kernels.{name}.compile_kernels", lambda *_: None)


def load(folder, option, dtype="bfloat16"):
    return load_module(str(folder), EngineConfig(quantization=option, device="cpu", dtype=dtype), CPU).eval()


def save(folder, form):
    return save_mxfp4(folder) if form == "mxfp4" else save_quantised(folder, form, small_moe())


@pytest.fixture
def experts(gpu, tmp_path):
    """Packed ones of a small GPT-OSS's first layer."""
    return placed(load(save_mxfp4(tmp_path), "keep"))[0]


def routes(num_rows, num_experts=4, top_k=2):
    chosen = torch.rand(num_rows, num_experts).topk(top_k).indices
    return chosen, torch.rand(num_rows, top_k)


def plain_experts(model):
    return [module for module in model.modules() if hasattr(module, "has_gate")]


def placed(model):
    tiled.place(model, CPU)
    return [module for module in model.modules() if isinstance(module, TiledExperts)]


@pytest.mark.parametrize("form", FORMS)
def test_packed_experts_are_those_of_the_dequantised_weights(form, tmp_path, gpu):
    torch.manual_seed(0)
    folder = save(tmp_path, form)
    model = load(folder, "keep")
    exact = plain_experts(load(folder, "dequantize", "float32"))
    found = placed(model)
    assert len(found) == len(exact) == 2 and all(is_kept(module) for module in found) and not experts_of(model)
    assert all(part.is_contiguous() for own in found for part in own.buffers())  # kernels take no strides
    for own, plain in zip(found, exact, strict=True):
        for num_rows in (1, 9):
            states = torch.randn(num_rows, own.up.width).bfloat16()
            chosen, weights = routes(num_rows)
            chosen[:, 0] = 2  # skewed, and in a step of one row two experts are left out
            chosen[:, 1] %= 2
            with torch.no_grad():
                expected = plain(states.float(), chosen, weights).double()
            output = own(states, chosen, weights)
            assert output.dtype == torch.bfloat16
            assert (output.double() - expected).norm() < 1e-2 * expected.norm(), (form, num_rows)


def test_packed_experts_take_a_quarter_of_the_memory(tmp_path, gpu):
    model = load(save(tmp_path, "mxfp4"), "keep")
    plain = sum(each.nbytes for module in plain_experts(load(tmp_path, "dequantize")) for each in module.parameters())
    own = sum(each.nbytes for module in placed(model) for each in module.buffers())
    assert own < 0.32 * plain  # scales take as much as an eighth of 4-bit weights; biases are plain


def test_torch_compile_takes_the_experts_whole(experts):
    states = torch.randn(5, experts.up.width).bfloat16()
    arguments = states, *routes(5)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), experts(*arguments))


class _Experts(nn.Module):
    def __init__(self, gate, **numbers):
        super().__init__()
        self._apply_gate = gate
        vars(self).update(numbers)


def halves(products):
    return products.chunk(2, dim=-1)


@pytest.mark.parametrize("act, numbers", [("SiLU", (1.0, math.inf, 0.0)), ("GELU", None)])
def test_a_gate_is_known_by_its_results(act, numbers):
    module = _Experts(None)
    module.act_fn = ACT[act]
    module._apply_gate = lambda products: _default_apply_gate(module, products)
    found = _gate_of(module, 64)
    assert (None if found is None else found.numbers) == numbers


def test_a_clamped_gate_is_known_by_its_limit():
    def gate(products):
        one, other = halves(products)
        return torch.sigmoid(one.clamp(max=10)) * one.clamp(max=10) * other.clamp(-10, 10)

    assert _gate_of(_Experts(gate, swiglu_limit=10), 64).numbers == (1.0, 10.0, 0.0)
    assert _gate_of(_Experts(gate), 64) is None  # no attribute tells the limit
    products = torch.randn(3, 64) * 8
    found = _gate_of(_Experts(gate, limit=10.0), 64)
    torch.testing.assert_close(apply_gate(products[:, found.order], found.numbers), gate(products))


def test_other_gates_run_in_the_code_of_the_model(tmp_path, gpu):
    folder = save(tmp_path, "ct-w4a16")
    model, plain = load(folder, "keep"), load(folder, "dequantize", "float32")
    exact = plain_experts(plain)
    for module in (*plain_experts(model), *exact):
        module.act_fn = nn.GELU()
    found = placed(model)
    assert [each.up.gate for each in found] == [[], []]
    states = torch.randn(6, 256)
    chosen, weights = routes(6)
    for own, other in zip(found, exact, strict=True):
        expected = other(states.bfloat16().float(), chosen, weights)
        assert (own(states.bfloat16(), chosen, weights).float() - expected).norm() < 1e-2 * expected.norm()


def test_experts_without_a_kernel_are_dequantised_with_the_bytes_said(tmp_path, gpu, caplog):
    model = load(save(tmp_path, "mxfp4"), "keep", "float32")
    assert placed(model) == []
    assert "2 modules of experts have no kernel for their quantised weights" in caplog.text
    assert not any(KEPT_EXPERTS in vars(module) for module in model.modules())


def test_a_kernel_that_errs_by_some_percent_is_refused(tmp_path, gpu, monkeypatch):
    def wrong(*args, **kwargs):
        return products(*args, **kwargs) * 1.03

    products = packed_experts.expert_products
    monkeypatch.setattr(packed_experts, "expert_products", wrong)
    model = load(save(tmp_path, "mxfp4"), "keep")
    with pytest.raises(UnsupportedModelError, match=r"differs from their dequantised weights by 3.*dequantize"):
        placed(model)


def test_pairs_of_no_expert_get_zeros(experts):
    products = expert_products(
        torch.randn(2, 128), torch.tensor([1, 4, 4, 0]), 2, experts.up.experts, None, gathers=True
    )
    assert (products == 0).all(dim=1).tolist() == [False, True, True, False]


def test_weights_are_not_loaded_from_a_state_dict(experts):
    with pytest.raises(ValueError, match="state dict"):
        experts.load_state_dict({})
    assert "experts=4, in_features=128, out_features=128" in repr(experts)
