"""Modules that cannot be served exactly: refused by what makes them so, with the remedy."""

import pytest
import torch
from torch import nn

from nanovllm import LLM, UnsupportedModelError
from tests.support.other_models import small
from tests.support.refusals import GREEDY, OPTIONS, assert_names
from tests.support.tiny_models import random_prompts, tiny_model


@pytest.mark.parametrize("model", [None, 5, ["a"], b"name"], ids=repr)
def test_a_model_of_a_wrong_type_is_refused(model):
    with pytest.raises(TypeError) as caught:
        LLM(model)
    assert_names(str(caught.value), "name", "folder", "module", repr(model))


def test_a_module_that_is_no_language_model_is_refused():
    with pytest.raises(TypeError) as caught:
        LLM(nn.Linear(2, 2))
    assert_names(str(caught.value), "causal language model", "Linear")


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
    windowed, full = tiny_model("mistral", sliding_window=128), tiny_model("mistral")
    answers = [
        [o.outputs[0].token_ids for o in LLM(model, **OPTIONS).generate(random_prompts(3, high=110), use_tqdm=False,
                                                                       sampling_params=GREEDY)]
        for model in (windowed, full)
    ]  # fmt: skip
    assert answers[0] == answers[1]


def passing(model, **extra):
    """The model, whose second layer passes more keyword arguments on to attention."""
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | extra), with_kwargs=True)
    return model


def test_what_no_attention_backend_computes_is_refused_by_layer_and_name():
    message = refused_model(passing(tiny_model(), position_bias=torch.ones(1)))
    assert_names(message, "layer 1 (LlamaAttention)", "'position_bias'", "generate()")


def test_a_window_that_the_mask_does_not_have_is_refused_with_both():
    """Attention implementations of the library would answer differently."""
    message = refused_model(passing(tiny_model(), sliding_window=8))
    assert_names(message, "layer 1 (LlamaAttention)", "sliding window of 8", "mask has none")


def test_sinks_that_are_not_one_for_each_head_are_refused():
    message = refused_model(passing(tiny_model(), s_aux=torch.ones(3)))
    assert_names(message, "layer 1 (LlamaAttention)", "sinks", "(3,)")


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


def test_an_encoder_is_refused_since_it_attends_in_both_directions():
    model = small("Bert", model_class="BertForMaskedLM", without=("num_key_value_heads",))
    assert_names(refused_model(model), "Bert", "both directions", "causal")


def test_an_encoder_with_a_language_modelling_head_is_refused_too():
    model = small("Bert", model_class="BertLMHeadModel", without=("num_key_value_heads",))
    assert_names(refused_model(model), "Bert", "both directions")


def test_an_encoder_decoder_is_refused():
    model = small("T5", model_class="T5ForConditionalGeneration", d_model=64, d_ff=64, num_layers=2, num_heads=2)
    assert_names(refused_model(model), "T5")


def test_a_hybrid_that_keeps_states_outside_of_its_cache_is_refused_with_what_would_serve_it():
    model = small("MiniMax", layer_types=["linear_attention", "full_attention"])
    assert_names(refused_model(model), "MiniMaxForCausalLM", "'linear_attention'", "update_recurrent_state")


def test_a_model_with_its_own_attention_code_is_refused():
    model = small("Bloom", without=("num_key_value_heads",))
    assert_names(refused_model(model), "BloomForCausalLM", "attention interface")


def test_a_mask_that_the_model_computes_itself_is_refused():
    """It reaches attention as `attention_mask`, which the engine does not read."""
    assert_names(refused_model(small("Doge")), "Doge", "mask")


def test_a_classifier_is_refused():
    model = small("Llama", model_class="LlamaForSequenceClassification", pad_token_id=0)
    assert_names(refused_model(model), "LlamaForSequenceClassification")
