"""A model of which ranks together compute something else than the whole is refused; others are not, in any dtype."""

import copy

import pytest
import torch
from torch import nn
from transformers import Gemma3nForCausalLM, Gemma4ForCausalLM, MixtralForCausalLM

from nanovllm.errors import UnsupportedModelError
from nanovllm.features.ranks.sharding import plan_shards, shard_model
from nanovllm.models.rank_guard import RankGuard
from tests.support.ranks import run_on_ranks
from tests.support.tiny_classes import tiny_class_model, tiny_config
from tests.support.tiny_models import tiny_model


def gemma3n(*sparsity):
    """Gate values below a quantile are cut, by their mean and deviation in each row."""
    config = tiny_config(Gemma3nForCausalLM)
    config.activation_sparsity_pattern = list(sparsity)
    config.intermediate_size = [1024] * len(sparsity)
    torch.manual_seed(0)
    return Gemma3nForCausalLM(config).eval()


class OwnMlp(nn.Module):
    """Llama's, with a change of what is between the products or behind them."""

    def __init__(self, mlp, change):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.change = change

    def forward(self, states):
        return self.change(self, nn.functional.silu(self.gate_proj(states)) * self.up_proj(states))


CHANGES = {
    "a norm over the width": lambda mlp, x: mlp.down_proj(x * x.pow(2).mean(-1, keepdim=True).rsqrt()),
    "a factor of the width": lambda mlp, x: mlp.down_proj(x) * x.shape[-1] ** -0.5,
    "a bias by the largest value": lambda mlp, x: mlp.down_proj(x + 0.002 * x.abs().amax(-1, keepdim=True)),
    "the sum of all": lambda mlp, x: mlp.down_proj(x) + 0.01 * x.sum(-1, keepdim=True),
}


def with_mlp(change, layer=1):
    model = tiny_model("llama")
    mlp = OwnMlp(model.model.layers[layer].mlp, change)
    model.model.layers[layer].mlp = mlp
    return model


def refusals(model, size=2):
    """What each rank raises, or None."""

    def run(ranks):
        own = copy.deepcopy(model)
        guard = RankGuard(own, ranks)
        shard_model(own, ranks)
        try:
            guard.check()
        except UnsupportedModelError as error:
            return error
        return None

    return run_on_ranks(size, run)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sparse", [0, 1, 3])
def test_statistics_over_a_shared_width_are_refused_by_the_name_of_the_layer(sparse, dtype):
    """Half of 1,024 channels has nearly the mean and deviation of all, in half precision within its rounding."""
    first, other = refusals(
        gemma3n(*(0.95 if layer == sparse else 0.0 for layer in range(4))).to(getattr(torch, dtype))
    )
    assert first.reason == other.reason == "other results on ranks"
    assert "Gemma3nForCausalLM computes something else when ranks share its weights" in str(first)
    assert f"outputs of model.layers.{sparse}.mlp (Gemma3nTextMLP) differ by up to" in str(first)
    assert "Set tensor_parallel_size to 1." in str(first)


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_part_of_the_width_does_not_give_is_refused(change):
    for error in refusals(with_mlp(CHANGES[change])):
        assert error.reason == "other results on ranks"


def test_parts_that_cannot_run_are_refused():
    whole_width = with_mlp(lambda mlp, states: mlp.down_proj(states * torch.ones(mlp.ones)))
    for layer in whole_width.model.layers:
        layer.mlp.ones = layer.mlp.gate_proj.out_features
    for error in refusals(whole_width):
        assert "model.layers.1 could not run: The size of tensor a" in str(error)


RIGHT = {
    "llama": lambda: tiny_model("llama"),
    "llama, own MLP": lambda: with_mlp(lambda mlp, states: mlp.down_proj(states)),
    "olmo2, norms of all heads": lambda: tiny_model("olmo2"),
    "gemma3n without sparsity": lambda: gemma3n(0.0, 0.0, 0.0, 0.0),
    "gemma4, shared K and V": lambda: tiny_class_model(Gemma4ForCausalLM.__name__),
    "mixtral, experts": lambda: tiny_class_model(MixtralForCausalLM.__name__),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", RIGHT)
def test_parts_that_compute_what_the_whole_does_are_accepted_in_any_dtype(name, dtype):
    assert refusals(RIGHT[name]().to(getattr(torch, dtype))) == [None, None]


def test_ranks_that_share_a_head_of_keys_and_values_are_accepted():
    assert refusals(tiny_model("mistral"), size=4) == [None] * 4


def test_one_layer_of_each_kind_is_run():
    model, seen = tiny_model("llama"), []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: seen.append(index))

    def run(ranks):
        RankGuard(model, ranks)

    run_on_ranks(1, run)
    assert seen == [0]


def test_the_model_is_as_before():
    model = tiny_model("llama")
    names, attention = model.state_dict().keys(), model.config._attn_implementation
    assert refusals(model) == [None, None]
    run_on_ranks(1, lambda ranks: RankGuard(model, ranks))
    assert model.state_dict().keys() == names
    assert model.config._attn_implementation == attention
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


STYLES = {"model.norm": "rowwise", "lm_head": "colwise"}


@pytest.mark.costly
@pytest.mark.parametrize("name", STYLES)
def test_what_no_layer_holds_and_a_head_that_would_stay_a_part_are_refused(name):
    model = tiny_model("llama")
    model._tp_plan = dict(model._tp_plan) | {name: STYLES[name]}
    with pytest.raises(UnsupportedModelError, match=rf"{name} sharded as '{STYLES[name]}'") as raised:
        plan_shards(model, 2)
    assert raised.value.reason == "part of the plan"
