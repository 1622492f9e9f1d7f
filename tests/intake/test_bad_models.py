"""Modules that cannot be served exactly: refused by what makes them so, with the remedy."""

import pytest
import torch
from torch import nn

from nanovllm import LLM, UnsupportedModelError
from tests.support.llms import generate, token_ids
from tests.support.other_models import small
from tests.support.refusals import GREEDY, OPTIONS, assert_names
from tests.support.tiny_models import random_prompts, tiny_model


@pytest.mark.parametrize("model", [None, 5, ["a"], b"name"], ids=repr)
def test_a_model_of_a_wrong_type_is_refused(model):
    with pytest.raises(TypeError) as caught:
        LLM(model)
    assert_names(str(caught.value), "name", "folder", "module", repr(model))
    with pytest.raises(TypeError, match=r"causal language model.*Linear"):
        LLM(nn.Linear(2, 2))


@pytest.mark.parametrize("tokenizer", [5, object(), ["a"]], ids=["number", "object", "list"])
def test_a_tokenizer_of_a_wrong_type_is_refused(tokenizer):
    with pytest.raises(TypeError, match="tokenizer must be"):
        LLM(tiny_model(), tokenizer=tokenizer, **OPTIONS)


def refused_model(model, **options):
    """The message that refuses a model, which is left as it was."""
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(UnsupportedModelError) as caught:
        LLM(model, **(OPTIONS | options))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    return str(caught.value)


def test_a_sliding_window_that_no_sequence_can_leave_is_served_exactly():
    models = (tiny_model("mistral", sliding_window=128), tiny_model("mistral"))
    prompts = random_prompts(3, high=110)
    windowed, full = (token_ids(generate(LLM(model, **OPTIONS), prompts, GREEDY)) for model in models)
    assert windowed == full


def passing(model, **extra):
    """The model, whose second layer passes more keyword arguments on to attention."""
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | extra), with_kwargs=True)
    return model


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"position_bias": torch.ones(1)}, ["'position_bias'", "generate()"]),
        (
            {"sliding_window": 8},
            ["sliding window of 8", "mask has none"],
        ),  # the library's attention answers differently
        ({"s_aux": torch.ones(3)}, ["sinks", "(3,)"]),  # not one for each head
    ],
    ids=["a bias", "a window", "sinks"],
)
def test_what_no_attention_backend_computes_is_refused_by_layer_and_name(extra, named):
    assert_names(refused_model(passing(tiny_model(), **extra)), "layer 1 (LlamaAttention)", *named)


def test_a_mask_of_another_kind_is_refused_by_layer(monkeypatch):
    monkeypatch.setattr("transformers.masking_utils.causal_mask_function", lambda batch, head, query, key: key < 7)
    assert_names(refused_model(tiny_model()), "layer 0 (LlamaAttention)", "neither causal nor a sliding window")


def test_rope_that_is_scaled_once_and_for_all_is_served():
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 128}
    model = small("Llama", rope_parameters=rope)
    prompt = random_prompts(1, low=60, high=60)[0]
    ids = torch.tensor([prompt])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    (output,) = LLM(model, **OPTIONS).generate(prompt, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected[0, 60:].tolist()


BERT = {"family": "Bert", "without": ("num_key_value_heads",)}
UNSUPPORTED = {
    "an encoder": (BERT | {"model_class": "BertForMaskedLM"}, ["both directions", "causal"]),
    "an encoder with a head of language models": (BERT | {"model_class": "BertLMHeadModel"}, ["both directions"]),
    "an encoder and a decoder": (
        {"family": "T5", "model_class": "T5ForConditionalGeneration", "d_model": 64, "d_ff": 64, "num_layers": 2}
        | {"num_heads": 2},
        [],
    ),
    "states outside of the cache": (
        {"family": "MiniMax", "layer_types": ["linear_attention", "full_attention"]},
        ["MiniMaxForCausalLM", "'linear_attention'", "update_recurrent_state"],
    ),
    "attention of its own": (BERT | {"family": "Bloom"}, ["BloomForCausalLM", "attention interface"]),
    "a mask of its own": ({"family": "Doge"}, ["mask"]),
    "a classifier": (
        {"family": "Llama", "model_class": "LlamaForSequenceClassification", "pad_token_id": 0},
        ["LlamaForSequenceClassification"],
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_model_of_another_kind_is_refused_by_what_makes_it_so(name):
    options, named = UNSUPPORTED[name]
    assert_names(refused_model(small(**options)), options["family"], *named)
