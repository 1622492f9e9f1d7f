"""Engines of int8 and int4 weights: float32 answers are those of `transformers` on the dequantised weights."""

import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.errors import UnsupportedModelError
from nanovllm.features.engine_config import EngineConfig
from nanovllm.models import loader
from nanovllm.models.quantised import on_load
from nanovllm.models.quantised.blocks import QuantisedEmbedding, QuantisedLinear, quantise
from nanovllm.models.quantised.on_load import quantise_model
from tests.support.cpu_answers import ON_A_CPU, OPTIONS, PROMPTS, by_transformers, tokens
from tests.support.llms import generate, greedy
from tests.support.replicas import completions
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model

pytestmark = ON_A_CPU
KINDS = ("int8", "int4")


def dequantised(folder, option, dtype=torch.float32):
    """A plain module whose weights are those that the engine computes with."""
    plain, model = (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval() for _ in range(2))
    quantise_model(model, option)
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear | QuantisedEmbedding):
            plain.get_submodule(name).weight.data = module.dequantise().to(dtype)
    return plain


def num_fused(llm):
    return len(llm._engine.model_runner.binding.fused_layers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("quantised") / "llama", "llama"))


@pytest.fixture(scope="module", params=KINDS)
def llm(request, folder):
    with LLM(folder, quantization=request.param, **OPTIONS) as llm:
        yield llm


@pytest.mark.costly
@pytest.mark.parametrize("option", KINDS)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "olmo2"])
def test_answers_are_those_of_the_dequantised_weights(family, option, tmp_path):
    """Biases, norms of q and k, and layers that are not fused."""
    folder = str(save_tiny(tmp_path / family, family))
    with LLM(folder, quantization=option, **OPTIONS) as llm:
        assert num_fused(llm) == (0 if family == "olmo2" else 2)
        assert tokens(llm) == by_transformers(dequantised(folder, option))


@pytest.mark.costly
def test_the_weights_are_those_that_were_asked_for(llm, folder):
    model, option = llm._engine.model_runner.binding.model, llm.config.quantization
    assert tokens(llm) == by_transformers(dequantised(folder, option))
    if option == "int4":  # of this model int8 changes no answer
        assert tokens(llm) != by_transformers(AutoModelForCausalLM.from_pretrained(folder))
    linears = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert len(linears) == 15 and not any(linear.blocks.numel() for linear in linears)  # in the kernels' layout alone
    assert num_fused(llm) == 2 and isinstance(model.get_input_embeddings(), QuantisedEmbedding)


def log_probabilities(llm):
    """Of each prompt's tokens but the first."""
    params = greedy(1, prompt_logprobs=0)
    outputs = generate(llm, PROMPTS, params)
    return [
        torch.tensor([next(iter(found.values())).logprob for found in output.prompt_logprobs or () if found])
        for output in outputs
    ]


def log_probabilities_of(model):
    with torch.no_grad():
        return [
            model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
            for prompt in PROMPTS
        ]


@pytest.mark.parametrize("option", KINDS)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.01)], ids=str)
def test_a_tied_head_and_its_embedding_are_one_quantised_weight(option, dtype, bound, tmp_path):
    folder = str(save_tiny(tmp_path, dtype=dtype, tie_word_embeddings=True))
    with LLM(folder, quantization=option, exact_activations=True, **OPTIONS) as llm:
        model = llm._engine.model_runner.binding.model
        assert isinstance(model.get_input_embeddings(), QuantisedEmbedding)
        assert isinstance(model.get_output_embeddings(), QuantisedLinear) and num_fused(llm) == 2
        own = log_probabilities(llm)
    expected = log_probabilities_of(dequantised(folder, option, dtype).float())
    for left, right in zip(own, expected, strict=True):
        assert len(left) == 0 or ((left - right) / right).abs().mean() < bound


@pytest.mark.full
def test_what_else_an_engine_does_changes_no_answer(folder, llm):
    """Cached prefixes, chunks beside decodes, preemption, samples and log-probabilities."""
    params = [
        greedy(40, ignore_eos=True),
        SamplingParams(n=3, temperature=0.9, top_p=0.9, seed=7, max_tokens=40),
        greedy(40, logprobs=2, repetition_penalty=1.2, ignore_eos=True),
    ]
    shared = random_prompts(1, low=60, high=61, seed=3)[0]
    prompts = [shared + prompt for prompt in random_prompts(9, low=20, high=150, seed=9)]
    each = [params[number % 3] for number in range(9)]
    alone = [generate(llm, [prompt], one)[0] for prompt, one in zip(prompts, each, strict=True)]
    limits = {"block_size": 16, "max_model_len": 256, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    with LLM(folder, quantization=llm.config.quantization, num_kv_blocks=22, **limits) as small:
        together = generate(small, prompts, each)
        assert small.stats().num_preemptions > 0 and any(output.num_cached_tokens for output in together)
    assert completions(together) == completions(alone)
    for one, other in zip(together, alone, strict=True):
        for left, right in zip(one.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True):
            assert left.keys() == right.keys()
            assert all(abs(left[token].logprob - right[token].logprob) < 1e-3 for token in left)


@pytest.mark.usefixtures("programs_are_forked")
def test_replicas_answer_as_one_engine_does(folder):
    expected = by_transformers(dequantised(folder, "int8"))
    with LLM(folder, quantization="int8", exact_activations=True, data_parallel_size=2, **OPTIONS) as replicas:
        assert tokens(replicas) == expected


def test_without_kernels_the_weights_are_dequantised_in_each_step(folder, caplog):
    with (
        LLM(folder, quantization="int4", enforce_eager=True, **OPTIONS) as llm,
    ):
        assert tokens(llm) == by_transformers(dequantised(folder, "int4"))
    assert "each step dequantises them" in caplog.text


def test_kv_of_other_weights_is_of_another_prefix(folder):
    """Peers that exchange block hashes must not take one engine's KV for another's."""
    options = (None, *KINDS)
    assert len({loader.load_weights(folder, EngineConfig(quantization=option)).identity for option in options}) == 3


# ------------------------------------------------------------------------------------------------------------- limits


def test_what_cannot_be_quantised_is_refused_by_name(folder, monkeypatch):
    with pytest.raises(ValueError, match="quantization is 'fp4'; it must be one of auto, keep, dequantize, int8, int4"):
        LLM(folder, quantization="fp4")
    with pytest.raises(ValueError, match="a loaded module is its owner's"):
        LLM(tiny_model(), quantization="int8")
    with pytest.raises(ValueError, match="quantization does not work with tensor_parallel_size"):
        LLM(folder, quantization="int8", tensor_parallel_size=2)
    monkeypatch.setattr(loader, "device_of", lambda _: torch.device("cuda"))
    with pytest.raises(ValueError, match=r"for GPUs of capability 9\.0 and later, and for CPUs, but"):
        LLM(folder, quantization="int8")


def test_layers_of_odd_widths_stay_as_they_are_and_one_line_says_so(info_log):
    model = tiny_model(num_layers=1, intermediate_size=144)  # no multiple of 32
    quantise_model(model, "int4")
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear
    assert type(model.model.layers[0].mlp.gate_proj) is nn.Linear
    assert isinstance(model.model.layers[0].self_attn.q_proj, QuantisedLinear)
    assert "stay as they are, model.layers.0.mlp" in info_log.text


@pytest.mark.parametrize("option", KINDS)
def test_an_embedding_tied_to_a_head_that_stays_plain_stays_plain_too(option):
    """Else the weight would be there twice, and head and embedding be of two values."""
    model = tiny_model(num_layers=1, tie_word_embeddings=True, vocab_size=517)
    quantise_model(model, option)
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight is model.get_input_embeddings().weight
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantisedLinear)
    untied = tiny_model(num_layers=1, tie_word_embeddings=False, vocab_size=517)
    quantise_model(untied, option)
    assert isinstance(untied.get_input_embeddings(), QuantisedEmbedding) and type(untied.lm_head) is nn.Linear


def test_plain_weights_are_freed_one_after_another(monkeypatch):
    """So that a load needs the checkpoint's weights once, and no second model's worth of memory."""
    model, alive = tiny_model(tie_word_embeddings=True), []
    weights = [weakref.ref(parameter) for parameter in model.parameters() if parameter.dim() == 2]

    def counting(weight, kind):
        alive.append(sum(reference() is not None for reference in weights))
        return quantise(weight, kind)

    monkeypatch.setattr(on_load, "quantise", counting)
    quantise_model(model, "int4")
    assert alive == list(range(15, 0, -1)) and not any(reference() for reference in weights)


def test_a_model_without_linear_layers_is_refused():
    class Bare(nn.Module):
        def get_input_embeddings(self):
            return None

    with pytest.raises(UnsupportedModelError, match="Bare has no linear layers"):
        quantise_model(Bare(), "int8")
