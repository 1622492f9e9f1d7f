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
from transformers import GraniteConfig, GraniteForCausalLM

from nanovllm.attention import AttentionStep
from nanovllm.batch import ScheduledBatch, ScheduledSequence
from nanovllm.fast.attention.flex_gpu import GpuFlexPlan
from nanovllm.fast.attention.step_tables import StepTables, TableInputs
from nanovllm.fast.attention.tiles import Tiles
from nanovllm.fast.gpu.compared_steps import few_decodes, run_few_decodes
from nanovllm.fast.gpu.stacked_steps import PackedLaunch, build_stacked_steps, reads_own_rows
from nanovllm.fast.gpu.step_inputs import RowInputs, SampleInputs, StepPacking
from nanovllm.fast.kernels import layer_stack
from nanovllm.fast.replaced_layers import FastLayers
from nanovllm.features.composition.binding import build_binding
from nanovllm.features.costs.buckets import Buckets
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.forward_passes import head_step
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.layout import build_layout
from nanovllm.sampler import DrawInputs
from nanovllm.sequence import NewRequest, Sequence
from tests.support.reference_stack import DenseDecodes, ReferenceStack, ReferenceStep
from tests.support.tiny_models import VOCAB_SIZE, tiny_model

CONFIG = EngineConfig(max_num_seqs=8, max_num_batched_tokens=256, block_size=16, max_model_len=100, num_kv_blocks=30)


@pytest.fixture(autouse=True)
def reference_stack(monkeypatch):
    monkeypatch.setattr(layer_stack, "LayerStack", ReferenceStack)
    monkeypatch.setattr(layer_stack, "why_not", lambda *_: None)


class Harness:
    """The parts of an executor around `build_stacked_steps`, on a CPU."""

    def __init__(self, model, config=CONFIG):
        self.binding, self.config = build_binding(model, is_live=False), config
        FastLayers(self.binding).merge_linears()
        self.binding.caches.allocate(self.config.num_kv_blocks * self.config.block_size)
        self.features = SampleInputs(), RowInputs(), TableInputs(self.config.block_size)
        self.sampled = torch.zeros(8, dtype=torch.int64)
        self.begun = []
        FastLayers(self.binding).stack_layers(
            self.config.block_size, partial(run_few_decodes, self.binding, self.config, self.run_layers)
        )

    def run_layers(self, layout):
        shape = Buckets(self.config).shape(layout, 0)
        packing = StepPacking(shape, 8, self.features)
        packed = torch.zeros(packing.num_words_for(layout), dtype=torch.int32)
        packing.pack(layout, Tiles.from_layout(layout, self.config.block_size), None, packed.numpy())
        inputs, decodes = packing.views(packed), DenseDecodes(self.config.block_size)
        decodes.step = tables = StepTables.from_inputs(inputs)
        plan = GpuFlexPlan([SimpleNamespace(decodes=decodes)], [tables])  # type: ignore[list-item]
        step = AttentionStep(plan, shape.num_rows)
        rows = inputs.token_ids, inputs.positions, inputs.slot_mapping
        states = self.binding.compute_step(self.binding.passes.hidden_states, step, *rows)
        return states[inputs.sample_rows]

    def build(self):
        parts = self.binding, self.config, self.run_layers
        return build_stacked_steps(*parts, sampled=self.sampled, begin=self.begun.append)


def small(**fields):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 256}  # fmt: skip
    return GraniteForCausalLM(GraniteConfig(**(sizes | fields))).bfloat16().eval()


@pytest.mark.costly
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
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
        harness.run_layers(build_layout(batch.entries, CONFIG.block_size, {}, longest_first=True))
        assert ReferenceStack.launches == [2], count


NEUTRAL = {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 0.25}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"embedding_multiplier": 1.005}, "before its layers"),
        ({"logits_scaling": 1.005}, "with its logits"),
    ],
    ids=str,
)
def test_a_factor_of_half_a_percent_around_the_layers_keeps_the_graphs(fields, reason, caplog):
    harness = Harness(small(**(NEUTRAL | fields)))
    assert harness.binding.stacked is not None
    with caplog.at_level("INFO", logger="nanovllm"):
        assert (harness.build() is None) == (reason is not None)
    assert reason is None or reason in caplog.text


def test_a_head_that_gives_other_logits_keeps_the_graphs(monkeypatch, caplog):
    harness = Harness(tiny_model("llama", dtype=torch.bfloat16))
    monkeypatch.setattr(ReferenceStack, "logits_factor", 0.99)
    with caplog.at_level("INFO", logger="nanovllm"):
        assert harness.build() is None
    assert "logits" in caplog.text


def test_a_launch_that_writes_k_and_v_elsewhere_keeps_the_graphs(monkeypatch, caplog):
    harness = Harness(tiny_model("llama", dtype=torch.bfloat16))
    read = ReferenceStep._input
    monkeypatch.setattr(
        ReferenceStep, "_input", lambda step, name, *of: read(step, name, *of) * (name != "slot_mapping")
    )
    with caplog.at_level("INFO", logger="nanovllm"):
        assert harness.build() is None
    assert "the launch computes something else: its keys differ by up to 2.0e+00" in caplog.text


WRONG = {
    "noise_keys": lambda keys: keys + 1,
    "inverse_temperatures": lambda inverses: inverses * 2,
    "noise_scales": lambda scales: scales * 0,
    "token_ids": lambda tokens: torch.where(tokens < 0, -1, tokens),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_launch_that_reads_noise_or_earlier_tokens_wrongly_keeps_the_graphs(name, monkeypatch, caplog):
    harness = Harness(tiny_model("llama", dtype=torch.bfloat16))
    read = ReferenceStep._input

    def misread(step, given, *of):
        values = read(step, given, *of)
        return WRONG[name](values) if given == name else values

    monkeypatch.setattr(ReferenceStep, "_input", misread)
    with caplog.at_level("INFO", logger="nanovllm"):
        assert harness.build() is None
    assert re.search("the launch computes something else|its tokens are others", caplog.text)


def batch_of(num_decodes, num_samples, **options):
    entries = []
    for number in range(num_decodes):
        params = SamplingParams(temperature=0.0, **options)
        sequence = Sequence(NewRequest(str(number), [5 + number] * 8, params), arrival=number, max_model_len=50)
        entries.append(ScheduledSequence(sequence, 7, 1, int(number < num_samples), [1 + number], 0))
    return ScheduledBatch(0, tuple(entries))


def launch_of(harness, batch):
    steps = harness.build()
    assert steps is not None
    layout = build_layout(batch.entries, CONFIG.block_size, {}, longest_first=True)
    return steps.launch(batch, layout), layout


def test_a_step_draws_what_its_model_finds_most_probable(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _: None, synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    harness = Harness(tiny_model("llama", dtype=torch.bfloat16))
    draw, layout = launch_of(harness, batch_of(3, 3))
    assert harness.begun == []
    logits = head_step(harness.binding, harness.run_layers(layout)[:3]).float()
    drawn = draw().result()
    assert harness.begun == [layout] and len(drawn) == 3
    for token, row in zip(drawn, logits, strict=True):
        assert row[token] > row.max() - 0.02  # bfloat16 rounds
    assert harness.sampled[:3].tolist() == drawn


@pytest.mark.parametrize(
    ("num_decodes", "num_samples", "options"),
    [(9, 9, {}), (3, 2, {})],
    ids=["too many rows", "a row without a sample"],
)
def test_other_steps_keep_their_graphs(num_decodes, num_samples, options):
    harness = Harness(tiny_model("llama", dtype=torch.bfloat16))
    assert launch_of(harness, batch_of(num_decodes, num_samples, **options))[0] is None


def test_a_step_with_a_filter_keeps_its_graphs():
    harness, batch = Harness(tiny_model("llama", dtype=torch.bfloat16)), batch_of(3, 3)
    params = SamplingParams(temperature=0.5, top_p=0.9)
    sequence = Sequence(NewRequest("filtered", [4] * 8, params), arrival=3, max_model_len=50)
    entries = *batch.entries[:2], batch.entries[2]._replace(sequence=sequence)
    assert launch_of(harness, ScheduledBatch(0, entries))[0] is None


def test_a_step_with_more_blocks_than_its_arguments_hold_keeps_its_graphs():
    harness, batch = Harness(tiny_model("llama", dtype=torch.bfloat16)), batch_of(3, 3)
    steps = harness.build()
    assert steps is not None
    layout = build_layout(batch.entries, CONFIG.block_size, {}, longest_first=True)
    assert steps.launch(batch, layout) is not None
    for launch in steps._launches.values():
        launch._to.tables = launch._to.tables[:2]
    assert steps.launch(batch, layout) is None


def test_rows_are_packed_as_for_graphs():
    """Token ids, blocks and noise of a step are those that `StepPacking` writes."""
    harness = Harness(tiny_model("llama", dtype=torch.bfloat16))
    batch = batch_of(3, 3)
    params = [SamplingParams(temperature=t, seed=5 + n) for n, t in enumerate((0.0, 0.7, 1.3))]
    entries = []
    for number, own in enumerate(params):
        request = NewRequest(str(number), [3 + number] * (20 + 9 * number), own)
        sequence = Sequence(request, arrival=number, max_model_len=90, seed=2**63 + number)
        entries.append(ScheduledSequence(sequence, 19 + 9 * number, 1, 1, [3 + number, 8, 9 - number], 0))
    batch = ScheduledBatch(0, tuple(entries), num_decodes=3)
    launch, layout = launch_of(harness, batch)
    assert launch is not None
    draws = DrawInputs.from_sequences(batch.sampling, layout.sampled_positions.tolist())
    packing = StepPacking(Buckets(CONFIG).shape(layout, 0), 4, harness.features)
    packed = np.zeros(packing.num_words_for(layout), np.int32)
    packing.pack(layout, Tiles.from_layout(layout, CONFIG.block_size), draws, packed)
    expected = packing.views(packed)
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
    entries = []
    for number, (position, table) in enumerate(places):
        params = SamplingParams(temperature=0.0, max_tokens=1)
        sequence = Sequence(NewRequest(str(number), [5] * 60, params), arrival=number, max_model_len=90)
        entries.append(ScheduledSequence(sequence, position, 1, 1, table, 0))
    return build_layout(tuple(entries), CONFIG.block_size, {}, longest_first=True)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(31, [1, 2])], False),
        ([(31, [1, 2]), (31, [1, 3]), (5, [4])], False),
        ([(33, [1, 2, 3]), (32, [1, 2, 3])], True),
        ([(31, [1, 2, 3]), (32, [1, 2, 3])], True),
        ([(31, [1, 2]), (7, [5]), (32, [1, 2, 4])], True),
        ([(30, [1, 2]), (32, [1, 6, 4])], False),
    ],
    ids=[
        "one",
        "a common prefix",
        "drafts in a block",
        "drafts in two blocks",
        "a block that this step fills",
        "others",
    ],
)
def test_steps_with_rows_that_read_one_another_run_layer_by_layer(places, expected):
    layout = decodes_at(*places)
    assert reads_own_rows(layout, CONFIG.block_size) == expected
    shape = Buckets(CONFIG).shape(layout, int(expected))
    assert bool(shape.num_tiles) == bool(shape.num_chunk_rows) == expected  # a stack takes no step with tiles
    packing = StepPacking(shape, 8, (SampleInputs(), RowInputs(), TableInputs(CONFIG.block_size)))
    packed = torch.zeros(packing.num_words_for(layout), dtype=torch.int32)
    packing.pack(layout, Tiles.from_layout(layout, CONFIG.block_size), None, packed.numpy())
    inputs = packing.views(packed)
    longest_first = sorted((position // 16 + 1 for position, _ in places), reverse=True)
    assert inputs.decode_blocks[: len(places)].tolist() == longest_first
    assert not inputs.tile_is_used.any() and not inputs.decode_blocks[len(places) :].any()
