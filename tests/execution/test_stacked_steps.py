"""Steps of few plain decodes in one launch: used for no other step, and only if the model computes nothing else.

The kernel is stood in for by its reference in PyTorch; tests/gpu/test_layer_stack.py has the kernel itself.
"""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm.attention import AttentionStep
from nanovllm.batch import ScheduledBatch, ScheduledSequence
from nanovllm.fast.attention.flex_gpu import GpuFlexPlan
from nanovllm.fast.attention.step_tables import StepTables
from nanovllm.fast.attention.tiles import Tiles
from nanovllm.fast.gpu.compared_steps import few_decodes, run_few_decodes
from nanovllm.fast.gpu.stacked_steps import PackedLaunch, build_stacked_steps, reads_own_rows
from nanovllm.fast.replaced_layers import FastLayers
from nanovllm.features.composition.binding import build_binding
from nanovllm.features.costs.buckets import Buckets
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.forward_passes import head_step
from nanovllm.layout import build_layout
from nanovllm.sampler import DrawInputs
from tests.support.gpu_steps import packing_of
from tests.support.other_models import small
from tests.support.public_options import make_sequence
from tests.support.reference_stack import DenseDecodes, ReferenceStack, ReferenceStep, stand_in
from tests.support.shared_decodes import decode_entries
from tests.support.tiny_models import LLAMAS_KIND, tiny_model

CONFIG = EngineConfig(max_num_seqs=8, max_num_batched_tokens=256, block_size=16, max_model_len=100, num_kv_blocks=30)


@pytest.fixture(autouse=True)
def reference_stack(monkeypatch):
    stand_in(monkeypatch)


class Harness:
    """The parts of an executor around `build_stacked_steps`, on a CPU."""

    def __init__(self, model, config=CONFIG):
        self.binding, self.config = build_binding(model, is_live=False), config
        FastLayers(self.binding).merge_linears()
        self.binding.caches.allocate(self.config.num_kv_blocks * self.config.block_size)
        self.sampled = torch.zeros(8, dtype=torch.int64)
        self.begun = []
        FastLayers(self.binding).stack_layers(
            self.config.block_size, partial(run_few_decodes, self.binding, self.config, self.run_layers)
        )

    def run_layers(self, layout):
        shape = Buckets(self.config).shape(layout, 0)
        inputs = packed(packing_of(shape, self.config.block_size, 8), layout)
        decodes = DenseDecodes(self.config.block_size)
        decodes.step = tables = StepTables.from_inputs(inputs)
        plan = GpuFlexPlan([SimpleNamespace(decodes=decodes)], [tables])  # type: ignore[list-item]
        step = AttentionStep(plan, shape.num_rows)
        rows = inputs.token_ids, inputs.positions, inputs.slot_mapping
        states = self.binding.compute_step(self.binding.passes.hidden_states, step, *rows)
        return states[inputs.sample_rows]

    def build(self):
        parts = self.binding, self.config, self.run_layers
        return build_stacked_steps(*parts, sampled=self.sampled, begin=self.begun.append)


@pytest.fixture
def harness():
    return Harness(tiny_model(dtype=torch.bfloat16))


@pytest.mark.costly
@LLAMAS_KIND
def test_a_model_of_llamas_kind_runs_its_steps_in_one_launch(family):
    assert Harness(tiny_model(family, dtype=torch.bfloat16)).build() is not None


@pytest.mark.parametrize("max_num_seqs", [5, 6, 7])
def test_an_engine_of_five_to_seven_requests_pads_its_steps_to_rows_that_the_kernel_serves(max_num_seqs):
    assert max(map(len, few_decodes(replace(CONFIG, max_num_seqs=max_num_seqs)))) > 4, "both sizes are compared"
    harness = Harness(tiny_model("llama", dtype=torch.bfloat16), replace(CONFIG, max_num_seqs=max_num_seqs))
    assert harness.binding.stacked is not None and harness.build() is not None
    for count in range(1, max_num_seqs + 1):
        batch = batch_of(count, count)
        ReferenceStack.launches.clear()
        harness.run_layers(layout_of(batch.entries))
        assert ReferenceStack.launches == [2], count


NEUTRAL = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "embedding_multiplier": 1.0,
    "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 0.25,
}  # fmt: skip


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({}, None),
        ({"embedding_multiplier": 1.005}, "before its layers"),
        ({"logits_scaling": 1.005}, "with its logits"),
    ],
    ids=str,
)
def test_a_factor_of_half_a_percent_around_the_layers_keeps_the_graphs(fields, reason, info_log):
    torch.manual_seed(0)
    harness = Harness(small("Granite", **(NEUTRAL | fields)).bfloat16())
    assert harness.binding.stacked is not None
    assert (harness.build() is None) == (reason is not None)
    assert reason is None or reason in info_log.text


def test_a_head_that_gives_other_logits_keeps_the_graphs(harness, monkeypatch, info_log):
    monkeypatch.setattr(ReferenceStack, "logits_factor", 0.99)
    assert harness.build() is None
    assert "logits" in info_log.text


def test_a_launch_that_writes_k_and_v_elsewhere_keeps_the_graphs(harness, monkeypatch, info_log):
    read = ReferenceStep._input
    monkeypatch.setattr(
        ReferenceStep, "_input", lambda step, name, *of: read(step, name, *of) * (name != "slot_mapping")
    )
    assert harness.build() is None
    assert "the launch computes something else: its keys differ by up to 2.0e+00" in info_log.text


WRONG = {
    "noise_keys": lambda keys: keys + 1,
    "inverse_temperatures": lambda inverses: inverses * 2,
    "noise_scales": lambda scales: scales * 0,
    "token_ids": lambda tokens: torch.where(tokens < 0, -1, tokens),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_launch_that_reads_noise_or_earlier_tokens_wrongly_keeps_the_graphs(name, harness, monkeypatch, info_log):
    read = ReferenceStep._input

    def misread(step, given, *of):
        values = read(step, given, *of)
        return WRONG[name](values) if given == name else values

    monkeypatch.setattr(ReferenceStep, "_input", misread)
    assert harness.build() is None
    assert re.search("the launch computes something else|its tokens are others", info_log.text)


def batch_of(num_decodes, num_samples):
    entries = []
    for number in range(num_decodes):
        sequence = make_sequence([5 + number] * 8, arrival=number, temperature=0.0)
        entries.append(ScheduledSequence(sequence, 7, 1, int(number < num_samples), [1 + number], 0))
    return ScheduledBatch(0, tuple(entries))


def layout_of(entries):
    return build_layout(entries, CONFIG.block_size, {}, longest_first=True)


def packed(packing, layout, draws=None):
    """What a packed step of this layout brings."""
    words = np.zeros(packing.num_words_for(layout), np.int32)
    packing.pack(layout, Tiles.from_layout(layout, CONFIG.block_size), draws, words)
    return packing.views(torch.from_numpy(words))


def launch_of(harness, batch):
    steps = harness.build()
    assert steps is not None
    layout = layout_of(batch.entries)
    return steps.launch(batch, layout), layout


def test_a_step_draws_what_its_model_finds_most_probable(harness, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _: None, synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    draw, layout = launch_of(harness, batch_of(3, 3))
    assert harness.begun == []
    logits = head_step(harness.binding, harness.run_layers(layout)[:3]).float()
    drawn = draw().result()
    assert harness.begun == [layout] and len(drawn) == 3
    for token, row in zip(drawn, logits, strict=True):
        assert row[token] > row.max() - 0.02  # bfloat16 rounds
    assert harness.sampled[:3].tolist() == drawn


@pytest.mark.parametrize("sizes", [(9, 9), (3, 2)], ids=["too many rows", "a row without a sample"])
def test_other_steps_keep_their_graphs(sizes, harness):
    assert launch_of(harness, batch_of(*sizes))[0] is None


def test_a_step_with_a_filter_keeps_its_graphs(harness):
    batch, sequence = batch_of(3, 3), make_sequence([4] * 8, arrival=3, temperature=0.5, top_p=0.9)
    entries = *batch.entries[:2], batch.entries[2]._replace(sequence=sequence)
    assert launch_of(harness, ScheduledBatch(0, entries))[0] is None


def test_a_step_with_more_blocks_than_its_arguments_hold_keeps_its_graphs(harness):
    batch, steps = batch_of(3, 3), harness.build()
    assert steps is not None
    layout = layout_of(batch.entries)
    assert steps.launch(batch, layout) is not None
    for launch in steps._launches.values():
        launch._to.tables = launch._to.tables[:2]
    assert steps.launch(batch, layout) is None


def test_rows_are_packed_as_for_graphs(harness):
    """Token ids, blocks and noise of a step are those that `StepPacking` writes."""
    entries = []
    for number, temperature in enumerate((0.0, 0.7, 1.3)):
        prompt = [3 + number] * (20 + 9 * number)
        sequence = make_sequence(prompt, arrival=number, seed=2**63 + number, temperature=temperature)
        entries.append(ScheduledSequence(sequence, 19 + 9 * number, 1, 1, [3 + number, 8, 9 - number], 0))
    batch = ScheduledBatch(0, tuple(entries), num_decodes=3)
    launch, layout = launch_of(harness, batch)
    assert launch is not None
    draws = DrawInputs.from_sequences(batch.sampling, layout.sampled_positions.tolist())
    expected = packed(packing_of(Buckets(CONFIG).shape(layout, 0), CONFIG.block_size, 4), layout, draws)
    own = next(cell.cell_contents for cell in launch.__closure__ if isinstance(cell.cell_contents, PackedLaunch))._to
    for name in ("token_ids", "positions", "slot_mapping", "sample_rows", "decode_tables", "decode_blocks"):
        assert getattr(own, name).tolist() == getattr(expected, name).tolist(), name
    assert own.tables[: len(expected.tables)].tolist() == expected.tables.tolist()
    has_noise = expected.noise_scales > 0
    assert has_noise.tolist() == [False, True, True, False] and own.noise_scales.tolist() == [0, 1, 1, 0]
    for name in ("noise_keys", "inverse_temperatures"):
        assert getattr(own, name)[has_noise].tolist() == getattr(expected, name)[has_noise].tolist(), name


def decodes_at(*places):
    """Decodes, each at a position and with a block table."""
    return layout_of(decode_entries([table for _, table in places], [position + 1 for position, _ in places]))


@pytest.mark.costly
@pytest.mark.parametrize(
    "places, expected",
    [
        ([(31, [1, 2])], False),
        ([(31, [1, 2]), (31, [1, 3]), (5, [4])], False),  # a common prefix
        ([(33, [1, 2, 3]), (32, [1, 2, 3])], True),  # drafts in a block
        ([(31, [1, 2, 3]), (32, [1, 2, 3])], True),  # drafts in two blocks
        ([(31, [1, 2]), (7, [5]), (32, [1, 2, 4])], True),  # a block that this step fills
        ([(30, [1, 2]), (32, [1, 6, 4])], False),
    ],
    ids=str,
)
def test_steps_with_rows_that_read_one_another_run_layer_by_layer(places, expected):
    layout = decodes_at(*places)
    assert reads_own_rows(layout, CONFIG.block_size) == expected
    shape = Buckets(CONFIG).shape(layout, int(expected))
    assert bool(shape.num_tiles) == bool(shape.num_chunk_rows) == expected  # a stack takes no step with tiles
    inputs = packed(packing_of(shape, CONFIG.block_size, 8), layout)
    longest_first = sorted((position // 16 + 1 for position, _ in places), reverse=True)
    assert inputs.decode_blocks[: len(places)].tolist() == longest_first
    assert not inputs.tile_is_used.any() and not inputs.decode_blocks[len(places) :].any()
