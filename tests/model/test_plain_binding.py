"""A binding without further parts serves a plain model, and refuses one that needs a part by name."""

import pytest

from nanovllm import LLM, UnsupportedModelError
from nanovllm.model import ModelBinding
from nanovllm.observability.step_records import bytes_of
from tests.support.class_cases import own_answers
from tests.support.llms import GREEDY, generate, token_ids
from tests.support.tiny_classes import tiny_class_model


@pytest.mark.parametrize(
    "class_name, reason",
    [
        ("Qwen3NextForCausalLM", "layer 0 .* recurrent state"),
        ("MambaForCausalLM", "layer 0 .* recurrent state"),
        ("FalconH1ForCausalLM", "layer 0 .* recurrent state"),
        ("MistralForCausalLM", "layer 0 .* sliding window"),
    ],
)
def test_a_model_that_needs_a_part_is_refused_by_name(class_name, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        ModelBinding(tiny_class_model(class_name), is_live=False)


@pytest.mark.costly
@pytest.mark.parametrize("class_name", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_a_plain_model_answers_as_it_does_itself(class_name, monkeypatch):
    monkeypatch.setattr("nanovllm.features.composition.binding.build_binding", ModelBinding)
    model = tiny_class_model(class_name)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    with LLM(model, attention_backend="sdpa", enforce_eager=True, max_model_len=64, num_kv_blocks=16) as llm:
        found = token_ids(generate(llm, prompts, GREEDY))
        assert llm.stats().kv_touched_bytes == bytes_of(llm._engine.model_runner.binding.caches, [1.0])
    assert found == own_answers(model, prompts, 12)
