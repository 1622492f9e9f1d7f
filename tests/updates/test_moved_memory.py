"""Memory that is given back as on a GPU, by storages without bytes: caches, weights and graphs, on a CPU here."""

import pytest
import torch

from nanovllm import LLM
from nanovllm.fast.host.memory import LazyMemory
from nanovllm.features.updates import sleeping
from nanovllm.kv_cache import CacheMemory
from tests.support.gpu_steps import run_graphs_on_a_cpu
from tests.support.layer_kinds import model as model_of_kinds
from tests.support.layer_kinds import own_answer
from tests.support.llms import assert_idle_and_whole, generate, greedy, token_ids
from tests.support.tiny_classes import tiny_class_model
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model

NUM_TOKENS = 10
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)
SIZES = {"dtype": "float32", "num_kv_blocks": 65, "max_num_seqs": 6, "max_model_len": 160, "max_num_batched_tokens": 64}
OF_MODULE = {name: value for name, value in SIZES.items() if name != "dtype"}
PROMPTS = [[token % 60 for token in prompt] for prompt in random_prompts(5, low=3, high=70, seed=8)]
FORMS = {"eager": {"enforce_eager": True}, "compiled": {"attention_backend": "sdpa"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"))


def answers_of(model):
    return [own_answer(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def answers():
    return answers_of(tiny_model())


def answered(llm):
    return token_ids(generate(llm, PROMPTS, GREEDY))


def caches_of(llm):
    return [caches for _, caches in llm._engine.model_runner.binding.caches._together]


@pytest.fixture
def storages(monkeypatch):
    """Memory is given back as on a GPU, by storages without bytes."""
    monkeypatch.setattr(sleeping, "_keeps_addresses", lambda device: False)
    monkeypatch.setattr(LazyMemory, "zeros", CacheMemory.zeros)


def weights_of(llm):
    """The engine's weights, in storages that can be resized, unlike those of a mapped file."""
    weights = [part for part in llm._engine.model_runner.binding.model.parameters() if part.numel()]
    for part in weights:
        part.data = part.data.clone()
    return weights


@pytest.mark.parametrize("form", ["eager", pytest.param("compiled", marks=pytest.mark.full)])
def test_storages_without_bytes_get_them_back_and_weights_their_values(form, storages, folder, answers):
    with LLM(folder, **SIZES | FORMS[form]) as llm:
        assert answered(llm) == answers
        weights = weights_of(llm)
        for level in (1, 2, 2):
            llm.sleep(level)
            assert not any(caches.untyped_storage().nbytes() for caches in caches_of(llm))
            assert all(bool(part.untyped_storage().nbytes()) == (level == 1) for part in weights)
            llm.wake()
            assert answered(llm) == answers


def test_graphs_are_dropped_and_captured_again_while_idle(storages, folder, answers, monkeypatch):
    run_graphs_on_a_cpu(monkeypatch, left_out=["use_kernel_layers", "stack_layers", "compile_layers"])
    with LLM(folder, **SIZES) as llm:
        graphs = llm._engine.model_runner.executor._forwards
        before = set(graphs.graphs)
        weights_of(llm)
        llm.sleep()
        llm.sleep(2)
        llm.sleep(1)  # it sleeps deeper already
        assert before and not graphs.graphs and not llm._engine.use_idle_time(captures=True)
        llm.wake()
        assert answered(llm) == answers and not graphs.graphs  # no request waits for captures
        while llm._engine.model_runner.executor.capture_ahead():
            pass
        assert before <= set(graphs.graphs)
        assert answered(llm) == answers


def test_an_engine_without_memory_to_take_sleeps_on(storages, folder, answers, monkeypatch):
    with LLM(folder, **SIZES | FORMS["eager"]) as llm:
        weights_of(llm)
        llm.sleep(2)
        monkeypatch.setattr(sleeping, "_bytes_of", lambda storage: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
        with pytest.raises(torch.OutOfMemoryError):
            llm.wake()
        assert llm.is_asleep
        monkeypatch.undo()
        llm.wake()
        assert answered(llm) == answers


def test_an_update_brings_the_weights_of_level_2_back(storages, folder):
    other = tiny_model(seed=1)
    with LLM(folder, **SIZES | FORMS["eager"]) as llm:
        weights_of(llm)
        llm.sleep(2)
        llm.update_weights({"model.norm.weight": other.get_parameter("model.norm.weight")})
        llm.update_weights(other.state_dict())
        assert llm.is_asleep and not any(caches.untyped_storage().nbytes() for caches in caches_of(llm))
        llm.wake()
        assert answered(llm) == answers_of(other)


@pytest.mark.parametrize("kind", ["Gemma3Text", "Gemma4Text", "DeepseekV2", "Qwen3NextForCausalLM"])
@pytest.mark.parametrize("way", ["pages", "storages"])
def test_other_caches_and_recurrent_states_come_back(kind, way, request):
    source = tiny_class_model(kind) if kind == "Qwen3NextForCausalLM" else model_of_kinds(kind)
    if way == "storages":
        request.getfixturevalue("storages")
    with LLM(source, **OF_MODULE | {"enforce_eager": True, "max_num_batched_tokens": 80}) as llm:
        first = answered(llm)
        llm.sleep()
        llm.wake()
        assert answered(llm) == first
        if way == "storages":
            with pytest.raises(ValueError, match="leaves the weights of a loaded module to its owner"):
                llm.sleep(2)
        assert_idle_and_whole(llm)
