"""Steps of decodes through a binding, on a CPU, as a GPU's backend lays them out."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from nanovllm.attention import AttentionStep
from nanovllm.fast.attention.flex_gpu import GpuFlexPlan
from nanovllm.fast.attention.step_tables import StepTables
from nanovllm.fast.replaced_layers import FastLayers
from nanovllm.features.composition.binding import build_binding
from tests.support.dense_rotary import dense_rotate
from tests.support.reference_stack import DenseDecodes
from tests.support.tiny_models import VOCAB_SIZE, tiny_model

BLOCK_SIZE, NUM_BLOCKS = 16, 8


def binding_of(model, *, rotary=False):
    binding = build_binding(model, is_live=False)
    FastLayers(binding).merge_linears()
    if rotary:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("nanovllm.fast.replaced_layers.find_kernel", lambda file, name: dense_rotate)
            FastLayers(binding).fuse_rotary()
    binding.caches.allocate(NUM_BLOCKS * BLOCK_SIZE)
    torch.manual_seed(1)
    for cache in binding.caches.of_layers:
        cache.normal_()
    return binding


def tiny_binding(family="llama", *, dtype=torch.bfloat16, rotary=True, **fields):
    return binding_of(tiny_model(family, dtype=dtype, **fields), rotary=rotary)


@contextmanager
def answering_alike(binding, positions, num_rows=4):
    """A step after what is changed within gives the states, K and V of one before, within rounding."""
    caches = [cache.clone() for cache in binding.caches.of_layers]
    expected = hidden_step(binding, positions, num_rows)
    written = [cache.clone() for cache in binding.caches.of_layers]
    yield
    for cache, before in zip(binding.caches.of_layers, caches, strict=True):
        cache.copy_(before)
    torch.testing.assert_close(hidden_step(binding, positions, num_rows), expected, atol=0.06, rtol=0.06)
    for cache, right in zip(binding.caches.of_layers, written, strict=True):
        own, right = cache[:, 2 * BLOCK_SIZE :], right[:, 2 * BLOCK_SIZE :]
        assert (own - right).norm() < 0.02 * right.norm()


def stack_layers(binding, *positions):
    """Let the layers run as one where they compute the same in steps at these positions."""
    steps = positions or ([0, 5, 20], [30, 31])
    FastLayers(binding).stack_layers(BLOCK_SIZE, lambda: [hidden_step(binding, each) for each in steps])


def hidden_step(binding, positions, num_rows=4):
    """Hidden states of decodes at these positions, each in blocks 1 and one of its own."""
    backend, count = DenseDecodes(BLOCK_SIZE), len(positions)
    padding = [0] * (num_rows - count)
    tables = [[1] * (position // BLOCK_SIZE) + [2 + row] for row, position in enumerate(positions)]
    lengths = [len(table) for table in tables]
    starts = [sum(lengths[:row]) for row in range(count)]
    slots = [(2 + row) * BLOCK_SIZE + position % BLOCK_SIZE for row, position in enumerate(positions)]
    none = torch.zeros(0, dtype=torch.int32)
    parts = dict.fromkeys(StepTables.__dataclass_fields__, none) | {
        "tables": torch.tensor([block for table in tables for block in table]).int(),
        "decode_tables": torch.tensor(starts + padding).int(),
        "decode_blocks": torch.tensor(lengths + padding).int(),
        "decode_positions": torch.tensor(positions + padding),
    }
    backend.step = StepTables(**parts)
    plan = GpuFlexPlan([SimpleNamespace(decodes=backend)], [backend.step])  # type: ignore[list-item]
    step = AttentionStep(plan, num_rows)
    tokens = (torch.arange(num_rows) * 7 + 3) % VOCAB_SIZE
    inputs = tokens, torch.tensor(positions + padding), torch.tensor(slots + padding)
    states = binding.compute_step(binding.passes.hidden_states, step, *inputs)
    return states[:count].clone()
