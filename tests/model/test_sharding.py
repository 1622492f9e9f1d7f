"""A model sharded by transformers' plan computes what the whole one does; what has no plan is refused by name."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from nanovllm.errors import UnsupportedModelError
from nanovllm.features.ranks.sharding import plan_shards, shard_model
from tests.support.other_models import small
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import tiny_model, widen


def wide(family, **options):
    sizes = {"vocab_size": 101, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = small(family, **sizes, **options)
    widen(model)
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and not isinstance(module.gate_up_proj, nn.Module):  # experts
            module.gate_up_proj.data.mul_(4.0)
    return model


MODELS = {
    "llama": lambda: tiny_model("llama"),
    "qwen2, biases": lambda: tiny_model("qwen2"),
    "qwen3, norms of heads": lambda: tiny_model("qwen3"),
    "olmo2, norms of all heads": lambda: tiny_model("olmo2"),
    "mistral, one KV head": lambda: tiny_model("mistral"),
    "llama, tied embeddings, odd vocabulary": lambda: tiny_model("llama", tie_word_embeddings=True, vocab_size=509),
    "llama, biases everywhere": lambda: tiny_model("llama", attention_bias=True, mlp_bias=True),
    "phi3, one projection for q, k and v": lambda: wide("Phi3"),
    "gemma3, soft caps and scaled embeddings": lambda: wide("Gemma3Text", head_dim=16, final_logit_softcapping=30.0),
    "mixtral, experts": lambda: wide("Mixtral", num_local_experts=4),
}
TOKENS = torch.randint(0, 100, (1, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.costly
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_together_compute_what_the_whole_model_does(name, size):
    model = MODELS[name]()
    if size not in possible_sizes(model):
        with pytest.raises(UnsupportedModelError, match=f"tensor_parallel_size is {size}"):
            plan_shards(model, size)
        return
    with torch.no_grad():
        expected = model(TOKENS).logits

    def run(ranks):
        own = copy.deepcopy(model)
        head = shard_model(own, ranks)
        whole = own(TOKENS).logits
        head.is_split = True
        part = own(TOKENS).logits
        head.is_split = False
        return SimpleNamespace(whole=whole, part=part, head=head, num_values=own.num_parameters())

    results = run_on_ranks(size, run)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result.whole, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(result.whole, results[0].whole), "every rank goes on from the same"
        width = result.head.width
        wanted = expected[..., rank * width : (rank + 1) * width]
        torch.testing.assert_close(result.part[..., : wanted.shape[-1]], wanted, rtol=1e-4, atol=1e-4)
        embedding = model.get_input_embeddings().weight.numel()
        assert result.num_values - embedding < 0.75 * model.num_parameters(), "it holds a part"


def possible_sizes(model):
    try:
        plan_shards(model, 10_000)
    except UnsupportedModelError as error:
        return [int(word) for word in str(error).rpartition("can be ")[2].rstrip(".").split(", ")]
    raise AssertionError


def test_the_sizes_that_would_work_are_named():
    assert possible_sizes(tiny_model("llama")) == [1, 2]  # 6 heads, 2 KV heads: 3 divides one and not the other
    assert possible_sizes(tiny_model("qwen3")) == [1, 2, 4, 8]
    assert possible_sizes(tiny_model("mistral", intermediate_size=100)) == [1, 2, 4]  # 8 do not divide 100


def test_a_model_without_a_plan_is_refused_by_name():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel has no tensor parallel plan"):
        plan_shards(model, 2)


def test_a_style_that_is_not_implemented_is_refused_by_name():
    model = tiny_model("llama")
    model._tp_plan = dict(model._tp_plan) | {"model.layers.*.mlp.down_proj": "mla_kv_a_proj"}
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.mlp\.down_proj sharded as 'mla_kv_a_proj'"):
        plan_shards(model, 2)


def test_a_quantised_model_is_refused():
    model = tiny_model("llama")
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM is quantised"):
        plan_shards(model, 2)


def test_the_plan_is_read_without_weights():
    with torch.device("meta"):
        model = tiny_model("llama").__class__(tiny_model("llama").config)
    assert {shard.style for shard in plan_shards(model, 2)} == {"colwise", "rowwise", "colwise_gather_output"}
