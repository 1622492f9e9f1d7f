"""The graph passes for few rows: layers of many families compute the same, with the kernels that suit each.

The kernels' results come from plain PyTorch here; tests/gpu/test_few_experts.py has the kernels.
"""

import pytest
import torch
import torch.nn.functional as F
import transformers.models.qwen3_moe.modeling_qwen3_moe as qwen
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from nanovllm.device import find_kernel, own_code
from nanovllm.fast.kernels import few_experts, normed_linear
from nanovllm.fast.kernels.few_experts import Router
from nanovllm.fast.layers.few_experts import join_experts
from nanovllm.fast.layers.joined_sums import join_last_sum
from nanovllm.fast.layers.merged_linears import merging
from nanovllm.fast.layers.normed_linears import join_norms
from nanovllm.models import experts
from tests.support.tiny_classes import tiny_class_model

OPERATORS = "operators of experts, traced"  # an experts implementation
SCHEMAS = {
    "sort_by_expert": "(Tensor ids, int num_experts, int top_k) -> (Tensor, Tensor)",
    "expert_products": "(Tensor rows, Tensor weight, Tensor? bias, Tensor ids, Tensor order, Tensor ends, "
    "bool is_transposed, int top_k) -> Tensor",
}


def _sorted(ids, num_experts, top_k):
    return torch.empty_like(ids), ids.new_empty(num_experts, dtype=torch.int32)


def _products(rows, weight, bias, ids, *rest):
    return rows.new_empty(len(ids), weight.shape[2 if rest[2] else 1])


LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
if not hasattr(torch.ops.nanovllm, "expert_products"):  # without Triton; no test runs them
    for name, fake in (("sort_by_expert", _sorted), ("expert_products", _products)):
        LIBRARY.define(name + SCHEMAS[name])
        torch.library.register_fake(f"nanovllm::{name}", fake, lib=LIBRARY)
ALL_EXPERTS_FUNCTIONS.register(OPERATORS, experts._by_operators)


def normalised(states, weight, epsilon):
    wide = states.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(states.dtype)


@pytest.fixture
def launches(monkeypatch):
    """Fills with the kernels that run; they suit all sizes and compute by PyTorch."""
    seen = []

    class Experts:
        def __init__(self, sizes):
            self.top_k = sizes.top_k

        def run(self, states, gate_up, down, choice, slots):
            inputs, norm = states, None
            if isinstance(choice, Router):
                norm = choice.norm
                seen.append("experts and router" if norm is None else "experts, router and norm")
                inputs = states if norm is None else normalised(states, norm, choice.epsilon)
                weights, ids = F.linear(inputs, choice.weight).float().softmax(-1).topk(self.top_k)
                weights = weights / weights.sum(-1, keepdim=True) if choice.normalises else weights
                weights = weights.bfloat16().float() if choice.rounds else weights
            else:
                seen.append("experts")
                ids, weights = choice
                assert ids.dtype == torch.int64 and weights.dtype == torch.float32
            output = torch.zeros(states.shape)
            for row, chosen in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
                for expert, weight in zip(*chosen, strict=True):
                    gate, upper = F.linear(inputs[row].float(), gate_up[expert].float()).chunk(2)
                    output[row] += weight * F.linear(F.silu(gate) * upper, down[expert].float())
            return output.bfloat16() if norm is None else states + output.bfloat16()

    class Product:
        def run(self, states, norm, epsilon, weight, *_):
            seen.append("norm and product")
            return F.linear(normalised(states, norm, epsilon), weight)

    monkeypatch.setattr(few_experts, "suits", lambda *_: True)
    monkeypatch.setattr(few_experts, "few_experts", lambda sizes, device: Experts(sizes))
    monkeypatch.setattr(normed_linear, "suits", lambda *_: True)
    monkeypatch.setattr(normed_linear, "normed_linear", lambda *_: Product())
    return seen


def compiled(layer):
    """The layer after both passes, traced for any number of rows."""

    def backend(module, inputs):
        for change in (join_experts, join_norms, join_last_sum):
            change(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    def call(layer, *args, **kwargs):
        return layer._call_impl(*args, **kwargs)

    run = torch.compile(own_code(call), fullgraph=True, dynamic=False, backend=backend)

    def run_rows(states, **kwargs):
        torch._dynamo.maybe_mark_dynamic(states, 1)
        return run(layer, states, **kwargs)

    return run_rows


def difference(name):
    """Between the last layer of a class's tiny model and its compiled form, of the change that the layer makes."""
    torch.manual_seed(0)
    model = tiny_class_model(name).to(torch.bfloat16).eval()
    layer, differences = model.model.layers[-1], []
    run = compiled(layer)
    with torch.no_grad():
        for num_rows in (6, 4):
            states = torch.randn(1, num_rows, model.config.hidden_size).bfloat16()
            turns = model.model.rotary_emb(states, torch.arange(num_rows)[None])
            model.config._experts_implementation = "eager"
            expected = layer(states, position_embeddings=turns, attention_mask=None)
            model.config._experts_implementation = OPERATORS
            found = run(states, position_embeddings=turns, attention_mask=None)
            differences.append(float((found - expected).float().norm() / (expected - states).float().norm()))
    return max(differences)


@pytest.mark.full
@pytest.mark.parametrize(
    "name, expected",
    [
        ("Qwen3MoeForCausalLM", "experts, router and norm"),
        ("MixtralForCausalLM", "experts, router and norm"),
        ("OlmoeForCausalLM", "experts, router and norm"),
        ("Qwen2MoeForCausalLM", "experts and router"),  # another expert's output is added before the residual
        ("DeepseekV3ForCausalLM", "experts"),  # groups of experts, chosen by sigmoids
        ("Glm4MoeForCausalLM", "experts"),
    ],
)
def test_layers_compute_the_same_with_the_kernels_that_suit_them(name, expected, launches):
    assert difference(name) < 0.04
    assert [launch for launch in launches if launch.startswith("experts")] == 2 * [expected]


@pytest.mark.full
def test_a_router_of_another_kind_stays_in_the_graph(launches, monkeypatch):
    plain = qwen.Qwen3MoeTopKRouter.forward

    def forward(self, hidden_states):
        logits, scores, ids = plain(self, hidden_states)
        return logits, 0.5 * scores, ids

    monkeypatch.setattr(qwen.Qwen3MoeTopKRouter, "forward", forward)
    assert difference("Qwen3MoeForCausalLM") < 0.04
    assert "experts" in launches and "experts, router and norm" not in launches


@pytest.mark.full
def test_a_norm_of_another_kind_stays_in_the_graph(launches, monkeypatch):
    def forward(self, states):
        wide = states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (1.0 + self.weight) * wide.to(states.dtype)

    monkeypatch.setattr(qwen.Qwen3MoeRMSNorm, "forward", forward)
    assert difference("Qwen3MoeForCausalLM") < 0.04
    assert launches == 2 * ["experts and router"]


def test_a_merged_product_joins_its_norm_and_the_next_weight_is_prefetched(launches, monkeypatch):
    following = []
    run = normed_linear.normed_linear().run

    def noting(self, *args):
        following.append(args[5])
        return run(*args)

    monkeypatch.setattr(type(normed_linear.normed_linear()), "run", noting)
    model = tiny_class_model("Qwen3MoeForCausalLM").to(torch.bfloat16).eval()
    layer = model.model.layers[-1]
    states, turns = torch.randn(1, 5, model.config.hidden_size).bfloat16(), torch.randn(2, 1, 5, 16).bfloat16()
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        expected = layer(states, position_embeddings=turns, attention_mask=None)
        with merging(model, [layer]):
            model(torch.arange(5)[None])
        model.config._experts_implementation = OPERATORS
        found = compiled(layer)(states, position_embeddings=turns, attention_mask=None)
    assert launches == ["norm and product", "experts, router and norm"]
    assert following[0].data_ptr() == layer.self_attn.o_proj.weight.data_ptr()
    assert float((found - expected).float().norm() / (expected - states).float().norm()) < 0.04


def test_a_product_with_a_sum_keeps_it(launches):
    graphs = []

    def backend(module, inputs):
        join_norms(module)
        graphs.append(module)
        return lambda states, *_: (states,)

    def call(states, norm, weight, residual):
        wide = states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return torch.ops.nanovllm.linear_and_add(norm * wide.to(torch.bfloat16), weight, residual)

    assert find_kernel("skinny_linear", "linear_and_add")
    states = torch.randn(4, 64).bfloat16()
    torch.compile(own_code(call), fullgraph=True, backend=backend)(states, states[0], states, states[:, :4])
    assert any("linear_and_add" in str(node.target) for node in graphs[0].graph.nodes)
