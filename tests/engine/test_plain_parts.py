"""The parts that an engine has where nobody hands over others: attention, one pool, a loaded model, plain logits."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from nanovllm import defaults as plain
from nanovllm import device as own_device
from nanovllm.attention import AttentionLayer, SdpaAttention
from nanovllm.batch import Copy
from nanovllm.config import EngineConfig
from nanovllm.defaults import LoadedModel, PlainAttention, device_of, load_plain, memory_share
from nanovllm.errors import UnsupportedModelError
from nanovllm.flex import FlexAttention
from nanovllm.kv_cache import KVCaches
from nanovllm.layout import LayerTraits
from nanovllm.model import ModelBinding
from nanovllm.one_pool import OnePool
from nanovllm.sampling_params import SamplingParams
from tests.engine.models import END, byte_tokenizer, tiny_model

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LAYERS = [AttentionLayer(torch.nn.Identity(), LayerTraits(4, 2, 16, 16), torch.float32, 0.25)] * 2


def chosen(device: torch.device = CPU, **options: object) -> PlainAttention:
    return PlainAttention.for_model(LAYERS, device, EngineConfig(**options))


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain.shutil, "which", lambda name: None)


# ----------------------------------------------------------------------------------------------------------- attention


def test_attention_is_compiled_on_a_cpu_with_a_compiler_and_else_it_is_sdpa(monkeypatch, caplog):
    monkeypatch.setattr(plain.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert chosen().backend == chosen(attention_backend="flex").backend == "flex"
    assert chosen(attention_backend="sdpa").backend == chosen(enforce_eager=True).backend == "sdpa"
    assert chosen(GPU).backend == "sdpa" and chosen(GPU, attention_backend="flex").backend == "flex"
    monkeypatch.setenv("CC", "my-cc")
    assert chosen(GPU, attention_backend="flex").backend == "flex"
    no_compiler(monkeypatch)
    with caplog.at_level(logging.WARNING, "nanovllm"):
        assert chosen().backend == "sdpa"
    assert "a C++ compiler was not found: nothing is compiled" in caplog.text
    for device, missing in ((CPU, r"a C\+\+ compiler"), (GPU, "a C compiler")):
        with pytest.raises(ValueError, match=f"needs {missing}, and none was found"):
            chosen(device, attention_backend="flex")


def test_what_the_installation_lacks_is_refused_by_name():
    with pytest.raises(ValueError, match="'cpp', which this installation lacks"):
        chosen(attention_backend="cpp")
    sdpa = PlainAttention("sdpa")
    with pytest.raises(ValueError, match="cuda_graphs is True, which this installation lacks"):
        sdpa.captures(EngineConfig(cuda_graphs=True), CPU)
    assert sdpa.captures(EngineConfig(), CPU) is False


def test_scores_that_sdpa_does_not_compute_are_refused():
    layers = [AttentionLayer(torch.nn.Identity(), LayerTraits(4, 2, 16, 16, softcap=5.0), torch.float32, 0.25)]
    with pytest.raises(ValueError, match="soft-cap or sinks, which 'sdpa' of this installation does not compute"):
        PlainAttention.for_model(layers, CPU, EngineConfig(attention_backend="sdpa"))


def test_a_tensor_of_the_host_is_not_copied_there():
    tensor = torch.zeros(3)
    assert own_device.to_host(tensor) is tensor


def test_half_of_a_gpus_free_memory_is_for_the_cache(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 4000))
    config = EngineConfig(gpu_memory_utilization=0.8)
    assert memory_share(SimpleNamespace(device=GPU), config, None) == 400


def test_a_kernel_of_a_folder_or_a_compiler_that_is_missing_is_none_and_another_error_is_raised(monkeypatch):
    missing = iter(["nanovllm.fast.kernels", "triton.language", "another"])

    def fails(module: str) -> None:
        raise ModuleNotFoundError(name=next(missing))

    monkeypatch.setattr(own_device, "import_module", fails)
    assert own_device.find_kernel("rotary", "rotate") is own_device.find_kernel("rotary", "rotate") is None
    with pytest.raises(ModuleNotFoundError):
        own_device.find_kernel("rotary", "rotate")


def test_a_choice_builds_its_backend():
    config = EngineConfig(block_size=16, num_kv_blocks=8, max_num_seqs=4, max_num_batched_tokens=64)
    assert isinstance(PlainAttention("sdpa").build(LAYERS, CPU, config), SdpaAttention)
    assert isinstance(PlainAttention("flex").build(LAYERS, CPU, config), FlexAttention)


# ---------------------------------------------------------------------------------------------------------------- cache


def test_one_pool_serves_all_layers():
    pool, caches = OnePool(9, 1000), KVCaches(LAYERS, CPU)
    pool.allocate(caches, 16)
    assert [cache[0].shape for cache in caches.of_layers] == [(9 * 16, 2, 16)] * 2
    assert (pool.num_bytes, pool.num_longest(33, 16), pool.kind_groups(LAYERS)) == (9000, 2, ())
    assert pool.lay_out("a layout", 16) == "a layout"


def test_keys_and_values_of_other_widths_have_a_tensor_each_and_groups_have_their_own_slots():
    wide = AttentionLayer(torch.nn.Identity(), LayerTraits(4, 2, 16, 8), torch.float32, 0.25)
    caches = KVCaches([LAYERS[0], wide], CPU)
    caches.allocate(4, 6, groups=[0, 1])
    assert caches.of_layers[0].shape == (2, 4, 2, 16)
    assert [cache.shape for cache in caches.of_layers[1]] == [(6, 2, 16), (6, 2, 8)]
    assert [[part.shape[1] for part in caches.blocks_of(group, 2)] for group in (0, 1)] == [[2], [3, 3]]


def test_copies_read_all_their_blocks_before_any_is_written():
    caches = KVCaches(LAYERS, CPU)
    OnePool(4, 1).allocate(caches, 2)
    for block in range(4):
        caches.of_layers[0][0][2 * block : 2 * block + 2] = block
    caches.copy_blocks([Copy(0, 1, 2), Copy(0, 2, 3)], 2)
    assert caches.of_layers[0][0][::2, 0, 0].tolist() == [0, 1, 1, 2]
    caches.clear_blocks(torch.tensor([1]), 2)
    assert caches.of_layers[0][0][::2, 0, 0].tolist() == [0, 0, 1, 2]
    caches.release()
    assert caches.of_layers == []


# ---------------------------------------------------------------------------------------------------------------- model


def test_the_end_tokens_of_a_model_are_those_that_its_configs_and_its_tokenizer_name():
    model = tiny_model()
    model.generation_config.eos_token_id = [3, 4]
    assert LoadedModel(model, None, is_live=True, identity="m").eos_token_ids == (3, 4, END)
    assert LoadedModel(model, byte_tokenizer(), is_live=True, identity="m").eos_token_ids == (3, 4, END)
    model.config.eos_token_id = 7  # the default of a class, which is the id of plain text here
    assert LoadedModel(model, byte_tokenizer(), is_live=True, identity="m").eos_token_ids == (3, 4, END)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert LoadedModel(model, None, is_live=True, identity="m").eos_token_ids == ()


def test_a_model_without_a_number_of_positions_is_refused():
    loaded = load_plain(tiny_model(), None, EngineConfig())
    assert (loaded.max_position_embeddings, loaded.vocab_size, loaded.name) == (512, 258, "LlamaForCausalLM")
    assert (loaded.num_positions(None), loaded.has_head, loaded.sampling_defaults(SamplingParams)) == (512, True, {})
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace())
    without = LoadedModel(SimpleNamespace(config=config), None, is_live=True, identity="m")
    with pytest.raises(UnsupportedModelError, match="has no max_position_embeddings"):
        assert without.max_position_embeddings
    assert without.num_positions(99) == 99


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(EngineConfig()) == device_of(EngineConfig(device="cpu")) == CPU
    with pytest.raises(ValueError, match="device is 'cuda:1', but PyTorch sees no GPU"):
        device_of(EngineConfig(device="cuda:1"))


def test_a_binding_knows_the_models_vocabulary_and_dtype():
    model = tiny_model()
    binding = ModelBinding(model, is_live=True)
    assert binding.vocab_size == 258 and binding.dtype is torch.float32
