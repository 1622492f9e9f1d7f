"""Attention modules in whose place one kernel norms and turns q and k and writes K and V, here a dense form of it."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F

from nanovllm.attention import AttentionStep
from nanovllm.fast.gpu.capturable import splits_head
from nanovllm.fast.layers.rotary_attention import RotaryAttention
from nanovllm.fast.replaced_layers import FastLayers
from nanovllm.features.composition.binding import build_binding
from nanovllm.features.ranks.sharding import shard_model
from tests.support.dense_rotary import dense_rotate
from tests.support.other_models import small
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import DTYPES, LLAMAS_KIND, tiny_model

NUM_TOKENS = 24


class DenseCausal:
    """Attention of one sequence whose token i is in slot `slots[i]`."""

    def __init__(self, slots):
        self.slots = slots

    def attend(self, query, key_cache, value_cache, scaling, kind=0, sinks=None):
        keys, values = (cache[self.slots].transpose(0, 1)[None] for cache in (key_cache, value_cache))
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys, values, is_causal=True, scale=scaling, enable_gqa=True
        )
        return attended[0].transpose(0, 1)


@pytest.fixture
def fuse(monkeypatch):
    kernels = threading.local()  # of each rank, which is a thread
    monkeypatch.setattr("nanovllm.fast.replaced_layers.find_kernel", lambda file, name: kernels.own)

    def fused(model, *, kernel=dense_rotate, **sharded):
        kernels.own = kernel
        binding = build_binding(model, is_live=False, **sharded)
        FastLayers(binding).merge_linears()
        FastLayers(binding).fuse_rotary()
        binding.caches.allocate(2 * NUM_TOKENS)
        return binding

    return fused


def is_fused(binding):
    with binding.installed():
        return isinstance(binding.model.model.layers[0].self_attn, RotaryAttention)


def logits_of(binding, tokens):
    """Of a sequence alone, through the caches."""
    slots = torch.randperm(2 * NUM_TOKENS)[: len(tokens)]
    step = AttentionStep(DenseCausal(slots), len(tokens))
    positions = torch.arange(len(tokens))
    return binding.forward_step(step, tokens, positions, slots, positions)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.03)], ids=str)
@LLAMAS_KIND
def test_a_fused_model_computes_what_its_own_modules_do(fuse, family, dtype, tolerance):
    model, tokens = tiny_model(family, dtype=dtype), torch.randint(512, (NUM_TOKENS,))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0].float()
    binding = fuse(model)
    assert is_fused(binding)
    difference = logits_of(binding, tokens).float() - expected
    assert difference.norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ranks_fuse_their_own_heads(fuse, family):
    model, tokens = tiny_model(family), torch.randint(512, (NUM_TOKENS,))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]

    def run(ranks):
        own = copy.deepcopy(model)
        binding = fuse(own, ranks=ranks, head=shard_model(own, ranks))
        logits = logits_of(binding, tokens)
        return is_fused(binding), binding.layers[0].traits.num_heads, binding.head_shards.whole(logits)

    num_heads = model.config.num_attention_heads // 2
    for has_fused, own_heads, logits in run_on_ranks(2, run):
        assert has_fused
        assert own_heads == num_heads
        assert (logits - expected).norm() <= 1e-4 * expected.norm()


def test_what_differs_on_one_rank_is_fused_on_none(fuse):
    """And none waits for another: all go through the trial to its end."""
    model = tiny_model("qwen3")

    def run(ranks):
        own = copy.deepcopy(model)
        head = shard_model(own, ranks)

        def rotate(*args):
            return dense_rotate(*args) * (1.5 if ranks.rank == 1 else 1.0)

        return is_fused(fuse(own, kernel=rotate, ranks=ranks, head=head))

    assert run_on_ranks(2, run) == [False, False]


def test_the_modules_are_replaced_only_while_the_model_is_installed(fuse):
    model = tiny_model("qwen3")
    own = [layer.self_attn for layer in model.model.layers]
    binding = fuse(model)
    assert [layer.self_attn for layer in model.model.layers] == own
    assert is_fused(binding)
    binding.uninstall()
    assert [layer.self_attn for layer in model.model.layers] == own


def test_without_the_kernel_the_modules_run_as_they_are(fuse):
    assert not is_fused(fuse(tiny_model("qwen3"), kernel=None))


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: tiny_model("olmo2"), "no RMS norm q_norm over"),
        (lambda: small("Nemotron", head_dim=32, partial_rotary_factor=0.5), "only a part of each head"),
        (lambda: small("Helium", head_dim=32), "computes with 'stack'"),
        (lambda: small("SmolLM3", num_hidden_layers=4), "its query differs"),
        (lambda: small("Gemma3Text", head_dim=32, sliding_window=64), "its query differs"),
        (lambda: small("Olmo", clip_qkv=1e6), "computes with 'clamp_'"),
        (lambda: small("Phi3"), "has no linear layer q_proj"),
    ],
)
def test_modules_of_another_kind_run_as_they_are(fuse, info_log, make, reason):
    binding = fuse(make())
    assert not is_fused(binding)
    [message] = [record.getMessage() for record in info_log.records if "run as they are" in record.getMessage()]
    assert reason in message


@DTYPES
@pytest.mark.parametrize("factor", [1.1, 0.98, 0.995])
def test_a_module_that_changes_the_output_of_attention_runs_as_it_is(fuse, info_log, factor, dtype):
    model = tiny_model("qwen3", dtype=dtype)
    attention = model.model.layers[1].self_attn

    class Scaled(type(attention)):
        def forward(self, *args, **kwargs):
            output, weights = super().forward(*args, **kwargs)
            return factor * output, weights

    attention.__class__ = Scaled
    assert not is_fused(fuse(model))
    assert "its output differs" in info_log.text


def test_a_module_with_other_norms_for_q_and_k_runs_as_it_is(fuse):
    model = tiny_model("qwen3")
    model.model.layers[0].self_attn.k_norm.variance_epsilon = 0.5
    assert not is_fused(fuse(model))


def test_a_head_is_found_apart_behind_a_step_too(fuse):
    """The probe runs the modules as they are, though a model that is not live stays hooked between steps."""
    binding = fuse(tiny_model("llama"))
    with binding.installed():
        pass
    assert splits_head(binding)
