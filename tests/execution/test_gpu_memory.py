"""Bytes set aside for a GPU's steps, by arithmetic alone; tests/gpu measures what they take."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nanovllm.attention import AttentionLayer
from nanovllm.fast.attention.flex_gpu_options import Gpu, KernelOptions
from nanovllm.fast.gpu import gpu_memory, memory
from nanovllm.fast.gpu.gpu_memory import StepPeaks, split_bytes, workspace_bytes
from nanovllm.fast.kernels import paged_decode
from nanovllm.fast.kernels.paged_decode import PagedDecode
from nanovllm.features.engine_config import EngineConfig
from nanovllm.layout import LayerTraits
from nanovllm.model import StateLayers

H200 = Gpu(132, 232_448)
GIB = 2**30
CONFIG = EngineConfig(
    max_num_seqs=64, max_num_batched_tokens=2048, block_size=64, max_model_len=1000, num_kv_blocks=50,
    attention_backend="flex", cuda_graphs=True,
)  # fmt: skip


def layer_of(dtype):
    return AttentionLayer(nn.Identity(), LayerTraits(16, 8, 128, 128), dtype, scaling=1.0)


@pytest.fixture
def binding(monkeypatch):
    monkeypatch.setattr(Gpu, "from_device", classmethod(lambda *_: H200))
    return SimpleNamespace(
        layers=[layer_of(torch.bfloat16)] * 28, device=torch.device("cpu"), vocab_size=1000, dtype=torch.bfloat16,
        mixers=StateLayers(),
        caches=SimpleNamespace(num_bytes=lambda num_slots: 1000 * num_slots),
    )  # fmt: skip


def test_graphs_and_steps_without_one_have_memory_of_their_own(binding):
    """The graphs' memory pool keeps what a forward pass took, so a step without a graph cannot use it."""
    without = replace(CONFIG, cuda_graphs=False)
    beside = [workspace_bytes(binding, CONFIG, StepPeaks(size, 9 * GIB)) for size in (0, GIB)]
    assert beside[1] - beside[0] == GIB
    alone = [workspace_bytes(binding, without, StepPeaks(size, 9 * GIB)) for size in (0, GIB)]
    assert alone[1] == alone[0] < beside[0]


def test_logits_with_penalties_have_memory_within_the_graphs_and_beside_them(binding):
    def for_tokens(config):
        binding.vocab_size = 1000
        before = workspace_bytes(binding, config, StepPeaks(0, 0))
        binding.vocab_size = 1001
        return workspace_bytes(binding, config, StepPeaks(0, 0)) - before

    assert for_tokens(CONFIG) - for_tokens(replace(CONFIG, cuda_graphs=False)) == 64 * 8  # two in float32


def test_the_cache_takes_what_all_of_a_steps_memory_leaves(binding, monkeypatch):
    monkeypatch.setattr(memory, "measure_peaks", lambda *_: StepPeaks(GIB, 2 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(memory, "free_earlier_engines", lambda _: None)
    binding.device = torch.device("cuda")
    config = replace(CONFIG, num_kv_blocks=None, kv_cache_memory_bytes=None, gpu_memory_utilization=0.9)
    found = memory.memory_for_cache(binding, config, SimpleNamespace(uses_graphs=True))
    taken = 2 * GIB + workspace_bytes(binding, config, StepPeaks(GIB, 2 * GIB)) + memory.GPU_RESERVE_BYTES
    assert 0.95 < found / (0.9 * 80 * GIB - 20 * GIB - taken) <= 1.0


@pytest.mark.parametrize("num_more", [0, GIB])
def test_garbage_is_collected_where_a_device_holds_more_than_the_model(monkeypatch, num_more):
    linear, collected = nn.Linear(1024, 1024), []
    linear.again = nn.Linear(1, 1)
    linear.again.weight = linear.weight  # counted once
    own = sum(parameter.nbytes for parameter in linear.parameters())
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: own + num_more)
    monkeypatch.setattr(gpu_memory.gc, "collect", lambda: collected.append(True))
    gpu_memory.free_earlier_engines(SimpleNamespace(model=linear, device=torch.device("cuda")))  # type: ignore[arg-type]
    assert bool(collected) == bool(num_more)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_split_decodes_have_the_room_that_their_kernel_takes(binding, monkeypatch, dtype):
    monkeypatch.setattr(paged_decode, "_kernels", lambda: [SimpleNamespace(ENTRY=8, BUNDLE_ENTRY=4)])
    options = KernelOptions.for_layer(layer_of(dtype), binding.device, 64)
    heads = options.num_kv_heads, options.num_groups, options.head_bytes
    kernel = PagedDecode(heads, 64, gpu=H200, max_decodes=64, device=torch.device("cpu"))
    taken = sum(tensor.nbytes for tensor in (kernel._outputs, kernel._logarithms, kernel._arrivals))
    assert taken <= split_bytes(options, 64) <= 1.1 * taken


def test_the_peak_of_the_forward_pass_is_noted_before_the_sampler_runs(monkeypatch):
    peaks = iter([5, 9])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: next(peaks))
    sampler = gpu_memory._MeasuredSampler(
        SimpleNamespace(sample=lambda *_: torch.cuda.max_memory_allocated(None)), torch.device("cpu")
    )
    assert sampler.sample() == 9 and sampler.peak_before == 5
