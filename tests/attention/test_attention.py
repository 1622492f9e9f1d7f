"""Paged attention of every backend against a dense float32 reference, over caches where a wrong read shows."""

import random

import pytest
import torch

from nanovllm.attention import AttentionStep, paged_attention, step_in_force
from nanovllm.flex import FlexAttention
from nanovllm.layout import build_layout
from tests.support.paged_cases import (
    DEVICE,
    MIXED_STEPS,
    NUM_BLOCKS,
    PagedCase,
    assert_dense,
    cpp,
    flex,
    random_spans,
    sdpa,
)

# The C++ kernel is the CPU's own.
BACKENDS = pytest.mark.parametrize("backend", [sdpa, flex, cpp] if DEVICE.type == "cpu" else [sdpa, flex])


@pytest.mark.costly
@BACKENDS
@pytest.mark.parametrize("spans", MIXED_STEPS.values(), ids=MIXED_STEPS.keys())
def test_a_step_over_shuffled_poisoned_blocks_equals_dense_attention(backend, spans):
    assert_dense(backend, spans)


@pytest.mark.full
@BACKENDS
def test_any_split_of_any_sequences_equals_dense_attention(backend):
    for seed in range(12):
        assert_dense(backend, random_spans(seed), seed=seed)


SHAPES = {  # KV heads, groups, head size, block size, dtype
    "one head a group": (4, 1, 80, 32, torch.float32),
    "large heads": (2, 4, 128, 64, torch.float32),
    "small blocks": (1, 6, 64, 16, torch.bfloat16),
    "large groups": (1, 8, 80, 64, torch.bfloat16),
}
SLOW_FOR_FLEX = ("large heads", "small blocks")  # twelve seconds of a compiler each


@pytest.mark.full
@pytest.mark.parametrize(
    "backend, shape",
    [
        pytest.param(backend, shape, marks=[pytest.mark.slow] if backend is flex and shape in SLOW_FOR_FLEX else [])
        for backend in BACKENDS.args[1]
        for shape in SHAPES
    ],
)
def test_every_group_size_head_size_block_size_and_dtype_is_right(backend, shape):
    num_kv_heads, groups, head_dim, block_size, dtype = SHAPES[shape]
    spans = [(33, 1), (0, block_size + 3), (2 * block_size, 21), (70, 1)]
    heads = {"num_kv_heads": num_kv_heads, "groups": groups, "head_dim": head_dim}
    assert_dense(backend, spans, dtype=dtype, block_size=block_size, **heads)


@BACKENDS
def test_keys_and_values_are_written_to_the_slots_of_their_own_rows_only(backend):
    case = PagedCase([(33, 1), (0, 17)])
    before = [cache.clone() for cache in case.caches]
    case.run(backend(case))
    written = torch.zeros(len(before[0]), dtype=torch.bool)
    for number, entry in enumerate(case.entries):
        for position in range(entry.start, entry.start + entry.num_new_tokens):
            slot = case.slot(entry.block_table, position)
            written[slot] = True
            for cache, dense in zip(case.caches, case.dense[number], strict=True):
                assert torch.equal(cache[slot].cpu(), dense[position])
    cleared = {block * case.block_size + i for block in case.layout.blocks_to_clear for i in range(case.block_size)}
    untouched = ~written & torch.tensor([slot not in cleared for slot in range(len(written))])
    for cache, old in zip(case.caches, before, strict=True):
        torch.testing.assert_close(cache[untouched], old[untouched], equal_nan=True, atol=0, rtol=0)


@BACKENDS
def test_padding_rows_write_to_the_null_block_only_and_come_back_as_zero(backend):
    case, unpadded = PagedCase([(33, 1)]), PagedCase([(33, 1)])
    output = case.run(backend(case), num_padding=3)
    unpadded.run(backend(unpadded))
    case.check(output)
    assert not output[1:].any()
    for cache, other in zip(case.caches, unpadded.caches, strict=True):
        torch.testing.assert_close(cache[case.block_size :], other[case.block_size :], equal_nan=True, atol=0, rtol=0)


@BACKENDS
def test_a_later_token_never_changes_an_earlier_row(backend):
    case = PagedCase([(16, 40)])
    before = case.run(backend(case)).clone()
    again = PagedCase([(16, 40)])
    for states in again.dense[0]:
        states[50:] += 3.0
    after = again.run(backend(again))
    assert torch.equal(before[: 50 - 16], after[: 50 - 16])
    assert not torch.allclose(before[50 - 16 :], after[50 - 16 :])


@BACKENDS
def test_requests_of_one_step_share_blocks_that_this_very_step_fills(backend):
    """The second sequence's first two blocks are the first one's, written in this step."""
    case = PagedCase([(0, 40), (32, 5)], seed=3)
    writer, reader = case.entries
    reader.block_table[:2] = writer.block_table[:2]
    for own, shared in zip(case.dense[1], case.dense[0], strict=True):
        own[:32] = shared[:32]
    case.layout = build_layout(case.entries, case.block_size)
    case.check(case.run(backend(case)))


def test_the_operator_computes_what_the_backend_does():
    direct, opaque = PagedCase([(33, 1), (0, 17)]), PagedCase([(33, 1), (0, 17)])
    expected = direct.run(sdpa(direct), num_padding=1)
    actual = opaque.run(sdpa(opaque), num_padding=1, through_operator=True)
    assert torch.equal(actual, expected)


def test_the_operator_declares_what_it_does():
    case = PagedCase([(33, 1), (0, 17)])
    for cache in case.caches:
        cache.nan_to_num_(0.0)  # the check compares caches, and NaN equals nothing
    with step_in_force(-2, AttentionStep(sdpa(case).plan(case.layout), case.layout.num_tokens)):
        arguments = (case.inputs()[0], *case.caches, torch.tensor([-2]), case.scaling)
        torch.library.opcheck(paged_attention, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.full
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU's tables have at least four tiles")
@pytest.mark.parametrize("traits", [{}, pytest.param({"window": 20}, marks=pytest.mark.slow)], ids=["plain", "window"])
@pytest.mark.parametrize("max_num_seqs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_flex_compiles_for_steps_of_one_or_two_sequences(max_num_seqs, traits):
    backend = None
    for span in [(37, 1), (0, 15)]:
        case = PagedCase([span] * max_num_seqs, **traits)
        backend = backend or FlexAttention(
            num_blocks=NUM_BLOCKS,
            block_size=case.block_size,
            kinds=[case.traits],
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=15,
            device=DEVICE,
        )
        case.check(case.run(backend))


def test_flex_compiles_a_bounded_number_of_graphs_over_many_shapes():
    case = PagedCase([(33, 1)])
    flex_backend = flex(case)
    torch._dynamo.utils.counters.clear()
    for seed in range(25):
        choice = random.Random(100 + seed)
        spans = [(choice.randint(0, 60), 1) for _ in range(choice.randint(0, 5))]
        spans += [(choice.randint(0, 30), choice.randint(2, 40)) for _ in range(choice.randint(0, 3))]
        case = PagedCase(spans or [(3, 1)], seed=seed)
        case.check(case.run(flex_backend))
    # One for decodes and one for chunks, or none when earlier tests compiled them.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_new_schema_of_the_operator_has_a_new_name():
    """Code that an older version compiled calls the operator of its name with the older arguments."""
    known = {
        "nanovllm::paged_attention_2": "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor handle, "
        "float scaling, SymInt kind=0, Tensor? sinks=None) -> Tensor",
    }
    schema = paged_attention._opoverload._schema
    assert str(schema) == schema.name + known[schema.name]
