"""Which modules are served, each without a change to it, and which are refused by the layer and the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel

from nanovllm.errors import StepError, UnsupportedModelError
from nanovllm.model import ModelBinding
from nanovllm.probe import Probe
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


def test_a_module_that_leaves_the_scaling_to_attention_is_scaled_by_its_width():
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.scaling = None
    assert_served(model)


def test_calls_that_the_owner_compiled_are_not_compiled_again_for_steps():
    model, expected = tiny_model(), [own_answer(tiny_model(), prompt) for prompt in PROMPTS]
    vars(model.model.layers[0])["_compiled_call_impl"] = raising
    with open_llm(model) as llm:
        assert token_ids(generate(llm, PROMPTS)) == expected
    assert vars(model.model.layers[0])["_compiled_call_impl"] is raising


def test_rows_beyond_those_of_a_step_change_no_answer():
    model = tiny_model()
    with open_llm(model) as llm:
        llm._engine.model_runner.binding.min_rows = 5
        assert token_ids(generate(llm, PROMPTS)) == [own_answer(model, prompt) for prompt in PROMPTS]


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


def recorded(probe: Probe, value_width=16, num_keys=2, key=None, value=None, **arguments):
    key = torch.zeros(1, 2, num_keys, 16) if key is None else key
    value = torch.zeros(1, value_width, num_keys, 16) if value is None else value
    probe.record(nn.Identity(), torch.zeros(1, 4, 2, 16), key, value, 0.25, None, arguments)
    return key, value


@pytest.mark.parametrize(("given", "reason"), [
    ({"value_width": 1}, "uneven keys"),
    ({"value_width": 2, "num_keys": 3}, "other keys"),
    ({"value_width": 2, "bias": torch.ones(1)}, "unknown argument"),
    ({"value_width": 2, "s_aux": torch.ones(2)}, "unknown argument"),
    ({"value_width": 2, "sliding_window": 4}, "window of the mask"),
], ids=["uneven", "other keys", "argument", "sinks", "window"])  # fmt: skip
def test_a_layer_is_refused_for_what_attention_does_not_compute(given, reason):
    with pytest.raises(UnsupportedModelError, match=r"layer 0 \(Identity\)") as caught:
        recorded(Probe(), **given)
    assert caught.value.reason == reason


def test_a_layer_with_the_keys_and_values_of_an_earlier_one_shares_them():
    probe = Probe()
    key, value = recorded(probe, 2, softcap=5.0, s_aux=torch.ones(4), dropout=0.0)
    recorded(probe, 2)
    recorded(probe, key=key, value=value)
    assert [layer.traits.shares for layer in probe.layers] == [None, None, 0]
    assert (probe.layers[0].traits.softcap, probe.layers[0].traits.has_sinks) == (5.0, True)


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


@pytest.mark.costly
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
