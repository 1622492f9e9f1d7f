"""Paged attention against a dense float32 reference, over caches in which every wrong read shows."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm.attention.cpp import CppAttention
from nanovllm.attention.flex_cpu import FlexAttention
from nanovllm.attention.operator import AttentionStep, enter_step, leave_step, paged_attention, write_states
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.batch import ScheduledSequence
from nanovllm.batch_layout import build_layout
from nanovllm.kernels.cpp import load_kernels
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import NewRequest, Sequence

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BLOCKS = 40
HUGE = 1e4  # what stands in the slots of a sequence's own blocks that it has not filled: finite, but never to be seen


class PagedCase:
    """Random keys and values of several sequences, laid out in a poisoned cache, and the step that extends them."""

    def __init__(
        self, spans, *, block_size=16, num_kv_heads=2, groups=3, head_dim=64, dtype=torch.float32, seed=0, shared=0
    ):
        """spans: (start, num_new_tokens) of each sequence; the first `shared` blocks are the same for all."""
        generator = torch.Generator().manual_seed(seed)
        self.block_size, self.num_kv_heads, self.dtype = block_size, num_kv_heads, dtype
        blocks = list(range(1, NUM_BLOCKS))
        random.Random(seed).shuffle(blocks)
        shape = (NUM_BLOCKS * block_size, num_kv_heads, head_dim)
        self.caches = torch.full((2, *shape), torch.nan, dtype=dtype)  # foreign and free blocks
        for cache in self.caches:
            cache[:block_size] = 0  # the null block
        self.dense, self.queries, self.entries = [], [], []
        for number, (start, count) in enumerate(spans):
            end = start + count
            common = self.entries[0].block_table[:shared] if number else []
            table = common + [blocks.pop() for _ in range(-(-end // block_size) - len(common))]
            keys, values = torch.randn(2, end, num_kv_heads, head_dim, generator=generator).to(dtype)
            if common:
                assert min(start, spans[0][0]) >= shared * block_size
                for own, first in zip((keys, values), self.dense[0], strict=True):
                    own[: shared * block_size] = first[: shared * block_size]
            self.dense.append((keys, values))
            self.queries.append(torch.randn(count, num_kv_heads * groups, head_dim, generator=generator).to(dtype))
            for position in range(start):
                slot = self.slot(table, position)
                self.caches[0][slot], self.caches[1][slot] = keys[position], values[position]
            for position in range(start, len(table) * block_size):
                if position // block_size < -(-start // block_size):  # begun earlier: its rest is old, finite content
                    for cache in self.caches:
                        cache[self.slot(table, position)] = HUGE
            sequence = Sequence(
                NewRequest(str(number), [0] * end, SamplingParams()), arrival=number, max_model_len=10_000
            )
            self.entries.append(ScheduledSequence(sequence, start, count, True, table, start))
        self.caches = self.caches.to(DEVICE)
        self.layout = build_layout(self.entries, block_size)
        self.scaling = head_dim**-0.5

    def slot(self, table, position):
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def inputs(self, num_padding=0):
        """query, key, value as a transformers layer hands them over, in the layout's row order."""
        order = [int(entry.sequence.request_id) for entry in self.layout.entries]
        new = [[states[self.entries[i].start :] for i in order for states in [self.dense[i][k]]] for k in range(2)]
        rows = [torch.cat([self.queries[i] for i in order]), *(torch.cat(states) for states in new)]
        padded = [torch.cat([r, torch.full((num_padding, *r.shape[1:]), torch.nan, dtype=r.dtype)]) for r in rows]
        return [r.transpose(0, 1)[None].to(DEVICE) for r in padded]

    def run(self, form, num_padding=0, through_operator=False):
        step = AttentionStep(form.plan(self.layout), self.layout.num_tokens)
        query, key, value = self.inputs(num_padding)
        if form.reads_whole_pages:
            blocks = torch.from_numpy(self.layout.blocks_to_clear).to(DEVICE)
            for cache in self.caches:
                cache.view(NUM_BLOCKS, -1).index_fill_(0, blocks, 0)
        slots = np.append(self.layout.slots, np.zeros(num_padding, np.int64))
        write_states(key, value, self.caches, torch.from_numpy(slots).to(DEVICE))
        if not through_operator:
            return step.attend(query, *self.caches, self.scaling)[0]
        enter_step(-1, step)
        try:
            return paged_attention(query, *self.caches, torch.tensor([-1]), self.scaling)[0]
        finally:
            leave_step(-1)

    def expected(self) -> Tensor:
        """[num_tokens, num_heads, head_dim] in row order, computed densely in float32."""
        outputs = []
        for entry in self.layout.entries:
            number = int(entry.sequence.request_id)
            query = self.queries[number].float()
            keys, values = (states.float() for states in self.dense[number])
            groups = query.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
            scores = torch.einsum("qhd,khd->hqk", query, keys) * self.scaling
            positions = entry.start + torch.arange(entry.num_new_tokens)
            scores.masked_fill_(torch.arange(len(keys))[None] > positions[:, None], float("-inf"))
            outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        return torch.cat(outputs)

    def check(self, output: Tensor):
        tolerance = 2e-5 if self.dtype == torch.float32 else 2e-2
        expected = self.expected()
        assert output.shape[0] >= len(expected)
        torch.testing.assert_close(output[: len(expected)].float().cpu(), expected, atol=tolerance, rtol=tolerance)


def sdpa(case):
    page_bytes = 2 * case.caches[0][: case.block_size].nbytes
    return SdpaAttention(case.block_size, page_bytes, case.dtype, DEVICE)


_flex_forms = {}


def flex(case):
    """One form per shape: it keeps its compiled kernels over many steps, as in an engine."""
    num_heads = case.queries[0].shape[1]
    key = (case.block_size, num_heads, case.num_kv_heads, case.queries[0].shape[2], case.dtype)
    if key not in _flex_forms:
        _flex_forms[key] = FlexAttention(
            num_blocks=NUM_BLOCKS,
            block_size=case.block_size,
            num_groups=num_heads // case.num_kv_heads,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            device=DEVICE,
        )
    return _flex_forms[key]


def cpp(case):
    head_dim, groups = case.queries[0].shape[2], case.queries[0].shape[1] // case.num_kv_heads
    kernels = load_kernels(case.dtype, head_dim, groups)
    page_bytes = 2 * case.caches[0][: case.block_size].nbytes
    return CppAttention(kernels, num_blocks=NUM_BLOCKS, block_size=case.block_size, page_bytes=page_bytes)


# The C++ kernel is the CPU's own.
FORMS = pytest.mark.parametrize("form", [sdpa, flex, cpp] if DEVICE.type == "cpu" else [sdpa, flex])

MIXED_STEPS = {
    "one decode": [(37, 1)],
    "one prompt of one token": [(0, 1)],
    "decodes of all lengths": [(0, 1), (15, 1), (16, 1), (17, 1), (100, 1)],
    "a whole prompt": [(0, 45)],
    "a prompt that fills its blocks": [(0, 48)],
    "a chunk behind computed blocks": [(32, 40)],
    "a chunk that starts within a block": [(21, 30)],
    "chunks and decodes": [(33, 1), (0, 17), (48, 50), (7, 1), (16, 16), (0, 2)],
}


@FORMS
@pytest.mark.parametrize("spans", MIXED_STEPS.values(), ids=MIXED_STEPS.keys())
def test_a_step_over_shuffled_poisoned_blocks_equals_dense_attention(form, spans):
    case = PagedCase(spans)
    case.check(case.run(form(case)))


@FORMS
def test_any_split_of_any_sequences_equals_dense_attention(form):
    for seed in range(12):
        choice = random.Random(seed)
        spans = []
        for _ in range(choice.randint(1, 5)):
            start = choice.choice([0, choice.randint(0, 60)])
            spans.append((start, choice.choice([1, choice.randint(1, 40)])))
        case = PagedCase(spans, seed=seed)
        case.check(case.run(form(case)))


@FORMS
@pytest.mark.parametrize(
    ("num_kv_heads", "groups", "head_dim", "block_size", "dtype"),
    [
        (4, 1, 80, 32, torch.float32),
        (2, 4, 128, 64, torch.float32),
        (1, 6, 64, 16, torch.bfloat16),
        (1, 8, 80, 64, torch.bfloat16),
    ],
)
def test_every_group_size_head_size_block_size_and_dtype_is_right(
    form, num_kv_heads, groups, head_dim, block_size, dtype
):
    spans = [(33, 1), (0, block_size + 3), (2 * block_size, 21), (70, 1)]
    shape = {"num_kv_heads": num_kv_heads, "groups": groups, "head_dim": head_dim, "block_size": block_size}
    case = PagedCase(spans, dtype=dtype, **shape)
    case.check(case.run(form(case)))


def test_the_two_forms_agree():
    spans = [(33, 1), (5, 1), (0, 17), (48, 50)]
    first, second = PagedCase(spans), PagedCase(spans)
    torch.testing.assert_close(first.run(sdpa(first)), second.run(flex(second)), atol=2e-5, rtol=2e-5)


@FORMS
def test_keys_and_values_are_written_to_the_slots_of_their_own_rows_only(form):
    case = PagedCase([(33, 1), (0, 17)])
    before = [cache.clone() for cache in case.caches]
    case.run(form(case))
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


@FORMS
def test_padding_rows_write_to_the_null_block_only_and_come_back_as_zero(form):
    case, unpadded = PagedCase([(33, 1)]), PagedCase([(33, 1)])
    output = case.run(form(case), num_padding=3)
    unpadded.run(form(unpadded))
    case.check(output)
    assert not output[1:].any()
    for cache, other in zip(case.caches, unpadded.caches, strict=True):
        torch.testing.assert_close(cache[case.block_size :], other[case.block_size :], equal_nan=True, atol=0, rtol=0)


@FORMS
def test_a_later_token_never_changes_an_earlier_row(form):
    case = PagedCase([(16, 40)])
    before = case.run(form(case)).clone()
    again = PagedCase([(16, 40)])
    for states in again.dense[0]:
        states[50:] += 3.0
    after = again.run(form(again))
    assert torch.equal(before[: 50 - 16], after[: 50 - 16])
    assert not torch.allclose(before[50 - 16 :], after[50 - 16 :])


@FORMS
def test_nan_left_in_a_block_does_not_reach_its_next_owner(form):
    """Every free block holds NaN here; a fresh block that the step only begins is cleared first."""
    case = PagedCase([(0, 5), (0, 1), (16, 3)])
    assert len(case.layout.blocks_to_clear) == 3
    output = case.run(form(case))
    assert output.isfinite().all()
    case.check(output)


@FORMS
def test_requests_of_one_step_share_blocks_that_this_very_step_fills(form):
    """The second sequence's first two blocks are the first one's, written in this step."""
    case = PagedCase([(0, 40), (32, 5)], seed=3)
    writer, reader = case.entries
    reader.block_table[:2] = writer.block_table[:2]
    for own, shared in zip(case.dense[1], case.dense[0], strict=True):
        own[:32] = shared[:32]
    case.layout = build_layout(case.entries, case.block_size)
    case.check(case.run(form(case)))


def test_the_operator_computes_what_the_form_does():
    direct, opaque = PagedCase([(33, 1), (0, 17)]), PagedCase([(33, 1), (0, 17)])
    expected = direct.run(sdpa(direct), num_padding=1)
    actual = opaque.run(sdpa(opaque), num_padding=1, through_operator=True)
    assert torch.equal(actual, expected)


def test_the_operator_declares_what_it_does():
    case = PagedCase([(33, 1), (0, 17)])
    for cache in case.caches:
        cache.nan_to_num_(0.0)  # the check compares caches, and NaN equals nothing
    enter_step(-2, AttentionStep(sdpa(case).plan(case.layout), case.layout.num_tokens))
    try:
        arguments = (case.inputs()[0], *case.caches, torch.tensor([-2]), case.scaling)
        torch.library.opcheck(paged_attention, arguments, test_utils=("test_schema", "test_faketensor"))
    finally:
        leave_step(-2)


def test_flex_compiles_a_bounded_number_of_graphs_over_many_shapes():
    case = PagedCase([(33, 1)])
    flex_form = flex(case)
    torch._dynamo.utils.counters.clear()
    for seed in range(25):
        choice = random.Random(100 + seed)
        spans = [(choice.randint(0, 60), 1) for _ in range(choice.randint(0, 5))]
        spans += [(choice.randint(0, 30), choice.randint(2, 40)) for _ in range(choice.randint(0, 3))]
        case = PagedCase(spans or [(3, 1)], seed=seed)
        case.check(case.run(flex_form))
    # One for decodes and one for chunks, or none when earlier tests compiled them.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_layout_lists_decodes_first_and_maps_samples_back_to_batch_order():
    case = PagedCase([(0, 5), (33, 1), (16, 3)])
    layout = case.layout
    assert [entry.sequence.request_id for entry in layout.entries] == ["1", "0", "2"]
    assert layout.num_decodes == 1
    assert layout.positions.tolist() == [33, *range(5), 16, 17, 18]
    assert layout.sample_rows.tolist() == [5, 0, 8]
    slots = [case.slot(e.block_table, p) for e in layout.entries for p in range(e.start, e.start + e.num_new_tokens)]
    assert layout.slots.tolist() == slots
    assert isinstance(layout.slots, np.ndarray)
