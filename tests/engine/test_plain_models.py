"""Which modules are served, each without a change to it, and which are refused by the layer and the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel

from nanovllm.errors import StepError, UnsupportedModelError
from nanovllm.model import ModelBinding
from tests.engine.models import GREEDY, generate, open_llm, own_answer, tiny_model, token_ids

PROMPTS = [[1, 2, 3], [*range(50)], [7] * 20]


def assert_served(model) -> None:
    with open_llm(model) as llm:
        found = [token_ids(generate(llm, PROMPTS)) for _ in range(2)]
    assert found == [[own_answer(model, prompt) for prompt in PROMPTS]] * 2


class WithoutKeywords(LlamaForCausalLM):
    """Hands no keyword arguments of its caller down to attention."""

    def forward(self, input_ids=None, position_ids=None, use_cache=None, logits_to_keep=0, return_dict=None):
        return super().forward(
            input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, logits_to_keep=logits_to_keep
        )


def test_a_model_that_hands_no_keywords_down_finds_its_step_by_its_engine():
    model = tiny_model()
    model.__class__ = WithoutKeywords
    expected = [own_answer(tiny_model(), prompt) for prompt in PROMPTS]
    with open_llm(model) as first, open_llm(model) as second:
        assert token_ids(generate(first, PROMPTS)) == token_ids(generate(second, PROMPTS)) == expected


def test_a_config_may_name_the_types_of_its_layers():
    model = tiny_model()
    model.config.layer_types = ["full_attention", "full_attention"]
    assert_served(model)


def test_tokens_without_an_embedding_are_not_drawn():
    model = tiny_model()
    model.lm_head = nn.Linear(64, 300, bias=False)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.1)
        model.lm_head.weight[258:] = 5 * model.lm_head.weight[:42]  # the most probable ones, in every other row
    with open_llm(model) as llm:
        assert llm._engine.model_runner.binding.vocab_size == 258
        assert max(map(max, token_ids(generate(llm, PROMPTS)))) < 258


def test_an_owner_who_makes_the_vocabulary_smaller_is_told_to_build_a_new_engine():
    model = tiny_model()
    with open_llm(model) as llm:
        model.lm_head = nn.Linear(64, 200, bias=False)
        with pytest.raises(StepError, match=r"logits of 200 tokens, and 258 when this engine was built"):
            llm.generate([[1]], GREEDY, use_tqdm=False)


class OwnAttention(nn.Module):
    def forward(self, hidden_states, **_):
        return hidden_states, None


def without_head():
    return LlamaModel(tiny_model().config)


def on_two_devices():
    model = tiny_model()
    model.lm_head = model.lm_head.to("meta")
    return model


def repeated():
    model = tiny_model()
    model.model.layers[1] = model.model.layers[0]
    return model


def with_(change):
    def build():
        model = tiny_model()
        change(model)
        return model

    return build


def raising(*_, **__):
    raise ValueError("an image is missing")


@pytest.mark.parametrize(("build", "reason"), [
    (without_head, "no language model head"),
    (on_two_devices, r"on several devices \(cpu, meta\)"),
    (repeated, "layer 1 "),
    (with_(lambda model: setattr(model.model.layers[0].self_attn, "is_causal", False)), "layer 0 .*both directions"),
    (with_(lambda model: setattr(model.model.layers[1], "self_attn", OwnAttention())), "1 of 2 layers"),
    (with_(lambda model: setattr(model.model.norm, "forward", raising)), "an image is missing"),
    (with_(lambda model: setattr(model.model.layers[0], "forward", raising)), r"0 of 2 layers .*an image is missing"),
    (with_(lambda model: setattr(model.config, "layer_types", ["full_attention", "strange"])), "layer 1 .*'strange'"),
], ids=["head", "devices", "repeated", "both directions", "own attention", "inputs", "failing", "type"])  # fmt: skip
def test_a_model_that_cannot_be_served_is_refused_and_left_as_it_was(build, reason):
    model = build()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(UnsupportedModelError, match=reason):
        ModelBinding(model, is_live=True)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
