"""The order of packed weights, element by element, and which plain weights may be freed."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP

from nanovllm import LLM
from nanovllm.errors import UnsupportedModelError
from nanovllm.fast.kernels.packed_product import LANES, PANEL, can_pack, pack
from nanovllm.models.packed_linears import OneDnnLinear, pack_linear_layers, with_own_weights, with_weights_hidden
from tests.support.cpu_answers import ON_A_CPU, OPTIONS, by_transformers, tokens
from tests.support.tiny_models import DTYPES, save_tiny, tiny_model

DEPTH = 62


def matrix(num_outputs, dtype, depth=DEPTH):
    return torch.arange(num_outputs * depth).view(num_outputs, depth).mul(7).remainder(251).to(dtype)


def in_order(rows):
    """[num_panels, depth / step, PANEL, step] of rows that are in their panels' order, by the definition."""
    step = 4 // rows.element_size()
    packed = torch.empty(len(rows) // PANEL, rows.shape[1] // step, PANEL, step, dtype=rows.dtype)
    for output, row in enumerate(rows):
        packed[output // PANEL, :, output % PANEL] = row.view(-1, step)
    return packed


@DTYPES
@pytest.mark.parametrize("sizes", [(32,), (64, 32, 96), (48, 16), (16, 16, 32)], ids=str)
def test_weights_are_packed_side_by_side(sizes, dtype):
    weights = [matrix(size, dtype) + index for index, size in enumerate(sizes)]
    packed = pack(*weights)
    assert packed.is_contiguous()
    assert torch.equal(packed, in_order(torch.cat(weights)))


@DTYPES
@pytest.mark.parametrize("num_outputs", [16, 32, 48, 96])
def test_interleaved_weights_share_each_panel(num_outputs, dtype):
    first, second = matrix(num_outputs, dtype), matrix(num_outputs, dtype) + 3
    pairs = zip(first.split(LANES), second.split(LANES), strict=True)
    expected = in_order(torch.cat([part for pair in pairs for part in pair]))
    assert torch.equal(pack(first, second, interleave=True), expected)


@DTYPES
def test_weights_that_lie_anyhow_are_packed_alike(dtype):
    expected = in_order(matrix(32, dtype))
    wide, shifted = torch.zeros(32, 2 * DEPTH, dtype=dtype), torch.zeros(32 * DEPTH + 1, dtype=dtype)
    wide[:, 1 : DEPTH + 1] = matrix(32, dtype)
    shifted[1:] = matrix(32, dtype).flatten()
    assert torch.equal(pack(wide[:, 1 : DEPTH + 1]), expected)
    assert torch.equal(pack(shifted[1:].view(32, DEPTH)), expected)
    assert torch.equal(pack(matrix(32, dtype).t().contiguous().t()), expected)
    assert torch.equal(pack(nn.Parameter(matrix(32, dtype))), expected)


class Reader(nn.Module):
    """Two linear layers, of which the second is used past itself if so wished."""

    def __init__(self, *, reads_directly):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reads_directly = reads_directly

    def forward(self, rows):
        rows = self.first(rows)
        return F.linear(rows, self.second.weight, self.second.bias) if self.reads_directly else self.second(rows)


@pytest.mark.parametrize("reads_directly", [False, True])
def test_weights_are_freed_only_if_no_module_reads_them_directly(reads_directly):
    model, rows, calls = Reader(reads_directly=reads_directly), torch.randn(3, 4), []
    expected = model(rows)

    def check(hiding):
        try:
            with hiding():
                calls.append(model.second.weight.numel())
                return model(rows)
        except RuntimeError as error:
            raise UnsupportedModelError(str(error)) from error

    seen, may_be_freed = with_weights_hidden(model, check)
    assert torch.equal(seen, expected)
    assert may_be_freed == (set() if reads_directly else {model.first, model.second})
    assert calls == ([0, 16] if reads_directly else [0])
    assert torch.equal(model(rows), expected)
    assert not {"forward"} & (vars(model.first).keys() | vars(model.second).keys())


class KeepsAJoinedWeight(LlamaMLP):
    """Joins two weights in its first pass."""

    joined = None

    def forward(self, states):
        if self.joined is None:
            self.joined = torch.cat([self.gate_proj.weight, self.up_proj.weight])
        gate, up = F.linear(states, self.joined).chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up)


class KeepsANorm(LlamaMLP):
    """Computes a factor in its first pass."""

    factor = None

    def forward(self, states):
        if self.factor is None:
            self.factor = 4 / self.down_proj.weight.norm()
        return super().forward(states) * self.factor


class Rescales(LlamaMLP):
    """Changes its weight in its first pass."""

    is_rescaled = False

    def forward(self, states):
        if not self.is_rescaled:
            self.down_proj.weight.mul_(0.25)
            self.is_rescaled = True
        return super().forward(states) * 4


class ReadsANorm(LlamaMLP):
    """Computes a factor in each pass."""

    def forward(self, states):
        return super().forward(states) / (1 + self.down_proj.weight.norm())


@pytest.mark.costly
@ON_A_CPU
@pytest.mark.parametrize("kind, is_freed", [
    (KeepsAJoinedWeight, True), (KeepsANorm, True), (Rescales, True), (ReadsANorm, False),
])  # fmt: skip
def test_a_module_that_computes_something_of_its_weights_sees_them(kind, is_freed, tmp_path, monkeypatch):
    folder = save_tiny(tmp_path)
    monkeypatch.setattr("tests.support.tiny_models._BUILT", {})  # models of the module below
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP", kind)
    with LLM(folder, **OPTIONS) as llm:
        weight = llm._engine.model_runner.binding.model.model.layers[0].mlp.down_proj.weight
        assert (weight.numel() == 0) == is_freed
        assert tokens(llm) == by_transformers(tiny_model())


@ON_A_CPU
def test_a_head_that_is_read_directly_in_steps_alone_keeps_its_weight(tmp_path, monkeypatch):
    """Steps name the rows of their logits; the model's own pass does not."""

    def forward(self, input_ids, logits_to_keep=0, **inputs):
        states = self.model(input_ids=input_ids, **inputs).last_hidden_state
        if isinstance(logits_to_keep, torch.Tensor):
            return CausalLMOutputWithPast(logits=F.linear(states[:, logits_to_keep], self.lm_head.weight))
        return CausalLMOutputWithPast(logits=self.lm_head(states))

    folder, expected = save_tiny(tmp_path, tie_word_embeddings=False), None
    with LLM(folder, **OPTIONS) as llm:
        expected = tokens(llm)
        assert llm._engine.model_runner.binding.model.lm_head.weight.numel() == 0
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaForCausalLM.forward", forward)
    with LLM(folder, **OPTIONS) as llm:
        assert llm._engine.model_runner.binding.model.lm_head.weight.numel() > 0
        assert tokens(llm) == expected


def test_a_product_of_one_dnn_is_wrong_by_one_row(monkeypatch):
    linear = nn.Linear(32, 16)
    own = OneDnnLinear.__new__(OneDnnLinear)
    for factor, is_right in ((1.0, True), (0.0, False), (torch.nan, False)):
        factors = torch.tensor([[1.0], [factor], [1.0]])
        monkeypatch.setattr(OneDnnLinear, "__call__", lambda self, rows, by=factors: by * linear(rows))
        assert own.is_right(linear) == is_right


def test_a_head_that_shares_its_weight_keeps_it():
    model = tiny_model(tie_word_embeddings=True)
    assert model.lm_head not in with_own_weights(model) and len(with_own_weights(model)) > 6


def test_a_linear_layer_with_a_forward_of_its_own_keeps_it():
    model = Reader(reads_directly=False)
    own = model.second.forward = lambda rows: 2 * F.linear(rows, model.second.weight)
    assert with_own_weights(model) == {model.first}
    assert not can_pack([model.second], torch.float32)
    pack_linear_layers(model, None, unshared={model.first}, packed=())
    assert model.second.forward is own and "forward" in vars(model.first)


ALONE = """
import ctypes
import torch
from nanovllm.fast.kernels.cpp import load_kernels
from nanovllm.fast.kernels.packed_product import ProductStruct, pack

kernels = load_kernels(torch.float32, 16, 1)
for num_outputs, depth, num_threads in ((32 * 7, 40, 4), (32 * 70_000, 2, 1)):
    weight, row = torch.randn(num_outputs, depth), torch.randn(1, depth)
    packed, output = pack(weight), torch.full((1, num_outputs), torch.nan)
    product = ProductStruct(packed.data_ptr(), None, num_outputs, depth)
    kernels.linear(ctypes.byref(product), row.data_ptr(), output.data_ptr(), 1, num_threads)
    torch.testing.assert_close(output, row @ weight.T)
"""


@pytest.mark.full
def test_panels_of_threads_that_never_come_are_computed_by_others():
    """One thread computes the shares of four, and a share of more panels than its counter has bits for."""
    environment = os.environ | {"OMP_THREAD_LIMIT": "1"}
    done = subprocess.run([sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
