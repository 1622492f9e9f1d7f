"""Folders of adapters: read as PEFT writes them, or refused by name before anything changes."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.features.adapters import loading
from tests.support.adapter_files import merged, save_adapter, tensors_of
from tests.support.layer_kinds import own_answer
from tests.support.llms import generate, greedy, token_ids
from tests.support.tiny_models import random_prompts, tiny_model

SIZES = {"num_kv_blocks": 65, "max_num_seqs": 4, "max_model_len": 128, "max_lora_rank": 16}
(PROMPT,) = random_prompts(1, low=30, high=30, seed=1)
GREEDY = greedy(8, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=1)


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, **SIZES) as engine:
        yield engine


@pytest.mark.parametrize(
    "config, error",
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'; only LORA"),
        ({"use_dora": True}, "use_dora True, which is not served"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\], which is not served"),
        ({"bias": "all"}, "bias 'all'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out True"),
        ({"lora_bias": True}, "lora_bias True"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"something_of_a_later_version": 1}, "something_of_a_later_version 1, which is not served"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model's weights"),
        ({"r": "8"}, "r '8'; it must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan"),
        ({"lora_alpha": None}, "lora_alpha None"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
        ({"alpha_pattern": {"(": 2}}, "no regular expression"),
    ],
)
def test_configs_that_change_more_than_linear_layers_are_refused_by_name(config, error, model, llm, tmp_path):
    with pytest.raises(ValueError, match=error):
        llm.load_adapter("x", save_adapter(tmp_path / "a", model, **config))
    assert not llm.adapters


def changed(tensors, find, change):
    key = next(key for key in tensors if find in key)
    return tensors | {key: change(tensors[key])}


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda t: changed(t, "q_proj.lora_A", lambda x: x[:, :-2].contiguous()), r"lora_A of shape \(8, 382\)"),
        (lambda t: changed(t, "q_proj.lora_B", lambda x: x[:-1].contiguous()), r"lora_B of shape \(383, 8\)"),
        (lambda t: changed(t, "q_proj.lora_A", lambda x: x.flatten()), "lora_A of shape"),
        (lambda t: changed(t, "v_proj.lora_A", lambda x: x * float("nan")), "lora_A that are not finite"),
        (lambda t: changed(t, "v_proj.lora_B", lambda x: x + float("inf")), "lora_B that are not finite"),
        (lambda t: changed(t, "v_proj.lora_B", lambda x: x.int()), "lora_B in torch.int32"),
        (lambda t: {key: value for key, value in t.items() if "q_proj.lora_A" not in key}, "has lora_B alone"),
        (lambda t: t | {"base_model.model.lm_head.lora_A.weight": torch.zeros(8, 2)}, "lm_head is no linear layer"),
        (lambda t: t | {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(8, 2)},
         "layers.7.mlp.up_proj is no linear layer .* named like model.layers.0.mlp.up_proj"),
        (lambda t: t | {"base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight": torch.zeros(8, 2)},
         "adapters of experts are not served"),
        (lambda t: t | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(8, 2)},
         "lora_embedding_A, which is no LoRA factor"),
        (lambda t: t | {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight":
                        torch.zeros(8)}, "lora_magnitude_vector"),
    ],
)  # fmt: skip
def test_tensors_of_another_model_or_kind_are_refused_by_name(change, error, model, llm, tmp_path):
    path = save_adapter(tmp_path / "a", model, tensors=change(tensors_of(model, ("q_proj", "v_proj"), 8, 0)))
    with pytest.raises(ValueError, match=error):
        llm.load_adapter("x", path)
    assert not llm.adapters


def test_a_rank_above_the_limit_is_refused_with_the_option_to_raise(model, llm, tmp_path):
    with pytest.raises(ValueError, match=r"rank 17, and max_lora_rank is 16\. Raise max_lora_rank"):
        llm.load_adapter("x", save_adapter(tmp_path / "a", model, rank=17))


def test_broken_files_are_refused_by_path(model, llm, tmp_path):
    whole = save_adapter(tmp_path / "a", model)
    weights = tmp_path / "a" / "adapter_model.safetensors"
    stored = weights.read_bytes()
    for length in (0, 7, 100, len(stored) - 1):
        weights.write_bytes(stored[:length])
        with pytest.raises(ValueError, match="truncated or no safetensors file"):
            llm.load_adapter("x", whole)
    weights.write_bytes(stored)
    config = tmp_path / "a" / "adapter_config.json"
    for text, error in (("{", "no JSON"), ("[]", "holds list")):
        config.write_text(text)
        with pytest.raises(ValueError, match=error):
            llm.load_adapter("x", whole)
    weights.rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(ValueError, match="safe_serialization=True"):
        llm.load_adapter("x", whole)
    for path in (tmp_path / "nowhere", config):
        with pytest.raises(ValueError, match=r"cannot be read: .* Give a folder that PEFT has saved"):
            llm.load_adapter("x", path)
    assert not llm.adapters


def test_a_file_beyond_the_limit_is_not_read(model, llm, tmp_path, monkeypatch):
    path = save_adapter(tmp_path / "a", model)
    monkeypatch.setattr(loading, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="more than an adapter may have"):
        llm.load_adapter("x", path)


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "\ud800", 7, None])
def test_names_that_no_request_could_give_are_refused(name, model, llm, tmp_path):
    with pytest.raises((TypeError, ValueError), match="adapter's name"):
        llm.load_adapter(name, save_adapter(tmp_path / "a", model))


def test_factors_are_parsed_from_the_bytes_of_the_digest(model, llm, tmp_path, monkeypatch):
    """A file that changes between two reads would give a digest of other bytes than the factors."""
    path = save_adapter(tmp_path / "a", model, seed=1)
    first = llm.load_adapter("x", path)
    llm.unload_adapter("x")
    load = loading.safetensors.torch.load

    def load_after_a_change(data):
        monkeypatch.undo()
        save_adapter(tmp_path / "a", model, seed=2)
        return load(data)

    monkeypatch.setattr(loading.safetensors.torch, "load", load_after_a_change)
    again = llm.load_adapter("x", path)
    assert again.digest == first.digest
    for name, pair in again.factors.items():
        assert all(torch.equal(*parts) for parts in zip(pair, first.factors[name], strict=True))
    llm.unload_adapter("x")


def test_the_digest_is_of_the_bytes_that_are_installed(model, llm, tmp_path):
    first = llm.load_adapter("x", save_adapter(tmp_path / "a", model, seed=1))
    again = llm.load_adapter("x", save_adapter(tmp_path / "b", model, seed=1))
    assert again.digest == first.digest and again.factors is first.factors
    for options in ({"seed": 2}, {"seed": 1, "alpha": 9}):  # other weights; another config
        assert llm.load_adapter("x", save_adapter(tmp_path / "a", model, **options)).digest != first.digest
    llm.unload_adapter("x")
    with pytest.raises(ValueError, match="no adapter is named 'x'; loaded are: none"):
        llm.unload_adapter("x")


@pytest.mark.parametrize("kind", ["alpha_pattern", "rslora", "ranks", "dtype", "home"])
def test_scales_ranks_and_dtypes_are_those_of_the_file(kind, model, llm, tmp_path, monkeypatch):
    options = {"alpha": 24, "rank": 8}
    path = save_adapter(tmp_path / "a", model, **options)
    weights = tmp_path / "a" / "adapter_model.safetensors"
    if kind == "alpha_pattern":
        scaled = {key: 3 * value if "q_proj.lora_B" in key else value for key, value in load_file(weights).items()}
        reference = save_adapter(tmp_path / "b", model, tensors=scaled, **options)
        path = save_adapter(tmp_path / "a", model, alpha_pattern={"self_attn.q_proj": 72}, **options)
    elif kind == "rslora":
        path = save_adapter(tmp_path / "a", model, use_rslora=True, **options)
        reference = path
    elif kind == "ranks":
        tensors = load_file(weights)
        wide = tensors_of(model, ("q_proj",), 16, 5)
        path = save_adapter(tmp_path / "a", model, tensors=tensors | wide, rank_pattern={"q_proj": 16}, **options)
        reference = path
    elif kind == "dtype":
        halves = {key: value.half() for key, value in load_file(weights).items()}
        save_file(halves, weights)
        reference = save_adapter(
            tmp_path / "b", model, tensors={key: value.float() for key, value in halves.items()}, **options
        )
    else:
        monkeypatch.setenv("HOME", str(tmp_path))
        path, reference = os.path.join("~", "a"), path
    llm.load_adapter("x", path)
    right = own_answer(merged(model, reference), PROMPT, 8)
    assert token_ids(generate(llm, [PROMPT], GREEDY, adapter="x")) == [right]
    llm.unload_adapter("x")


def test_entries_without_effect_are_accepted(model, llm, tmp_path):
    config = {"lora_dropout": 0.1, "inference_mode": True, "task_type": "CAUSAL_LM", "target_modules": "all-linear"}
    config |= {"modules_to_save": None, "use_dora": False, "rank_pattern": {}, "megatron_config": None}
    assert llm.load_adapter("x", save_adapter(tmp_path / "a", model, **config)).rank == 8
    llm.unload_adapter("x")


def test_recurrent_layers_refuse_adapters_by_name(model, tmp_path, monkeypatch):
    path = save_adapter(tmp_path / "a", model)
    with LLM(model, **SIZES) as llm:
        binding = llm._engine.model_runner.binding
        monkeypatch.setattr(type(binding.mixers), "__bool__", lambda _: True)
        with pytest.raises(ValueError, match="recurrent layers"):
            llm.load_adapter("a", path)
        monkeypatch.undo()
        assert llm.load_adapter("a", path).name == "a"
        assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["r"] == 8
        assert generate(llm, [PROMPT], SamplingParams(max_tokens=2), adapter="a")[0].finished
