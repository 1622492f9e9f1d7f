"""A packed step carries what features name, and knows none of them."""

import numpy as np
import pytest
import torch

from nanovllm.batch import ScheduledSequence
from nanovllm.fast.attention.step_tables import TableInputs
from nanovllm.fast.attention.tiles import Tiles
from nanovllm.fast.gpu.step_inputs import DRAW_INPUTS, Packing, RowInputs, SampleInputs, StepPacking, draw_tensors
from nanovllm.features.costs.buckets import GraphShape
from nanovllm.features.groups.cache_groups import GroupTables
from nanovllm.features.groups.group_layouts import with_groups
from nanovllm.features.packed_steps import StepFeature, StepInput
from nanovllm.layout import build_layout
from nanovllm.sampler import DrawInputs
from tests.support.public_options import make_sequence
from tests.support.shared_decodes import changing_steps

SHAPE = GraphShape(8, 8, 0)


class States(StepFeature):
    """An example: where each decode's state is read, by two of the layers, and a number a sample."""

    inputs = (
        StepInput("reads", np.int32, (2, "decodes")),
        StepInput("weights", np.float32, ("samples",)),
        StepInput("totals", np.int64, ("rows",)),
    )

    def fill(self, to, step):
        count = step.layout.num_decodes
        to.reads[:, :count] = np.arange(count) + np.array([[10], [20]])
        to.weights[: len(step.layout.sample_rows)] = 0.5
        to.totals[:count] = step.layout.positions[:count] + 2**40


def decodes(*starts):
    sequences = [make_sequence([1] * (start + 1), arrival=start, top_p=0.9) for start in starts]
    entries = [ScheduledSequence(s, len(s.token_ids) - 1, 1, 1, [3, 4, 5], 0) for s in sequences]
    return build_layout(entries, 16), sequences


def packed(*features):
    """Views on the device of a step that is packed into a dirty buffer."""
    layout, sequences = decodes(5, 20, 33)
    packing = StepPacking(SHAPE, 8, features)
    draws = DrawInputs.from_sequences(sequences, layout.sampled_positions.tolist())
    buffer = np.full(packing.num_words_for(layout), 12345, np.int32)
    packing.pack(layout, Tiles.from_layout(layout, 16), draws, buffer)
    return packing.views(torch.from_numpy(buffer)), draws


def test_a_step_brings_the_arrays_of_a_feature_beside_all_others():
    own = SampleInputs(), RowInputs()
    alone, _ = packed(*own, TableInputs(16))
    beside, _ = packed(*own, States(), TableInputs(16))
    assert beside.reads.tolist() == [[10, 11, 12, 0, 0, 0, 0, 0], [20, 21, 22, 0, 0, 0, 0, 0]]
    assert beside.weights.tolist() == [0.5] * 3 + [0.0] * 5
    assert beside.totals.tolist() == [2**40 + start for start in (5, 20, 33)] + [0] * 5
    for name, values in vars(alone).items():
        assert torch.equal(getattr(beside, name), values) and getattr(beside, name).dtype == values.dtype


def test_what_the_draw_reads_is_as_it_was_on_the_host():
    inputs, draws = packed(SampleInputs(), RowInputs(), TableInputs(16))
    for named, values, on_host in zip(DRAW_INPUTS, draw_tensors(inputs, 3), draws, strict=True):
        np.testing.assert_array_equal(values.numpy(), on_host, err_msg=named.name)
        assert on_host.dtype == named.dtype
    assert not any(values[3:].any() for values in draw_tensors(inputs))


@pytest.mark.parametrize("num_groups", [1, 2])
def test_tables_kept_from_step_to_step_are_those_of_the_entries(num_groups):
    """The second group's have the null block where no row sees one any more."""
    kept = TableInputs(16, num_groups if num_groups > 1 else 0)
    for entries in changing_steps(num_groups):
        layout, held = build_layout(entries, 16), [entry.start // 32 for entry in entries]
        if num_groups > 1:
            for entry, count in zip(entries, held, strict=True):
                entry.block_table[:count] = [0] * count
                entry.sequence.group_tables = GroupTables([entry.block_table], [count, count])
            layout = with_groups(layout, [False] * num_groups, 16)
        shape = GraphShape(16, 16 + layout.num_tokens, 64)
        packing = StepPacking(shape, 16, (SampleInputs(), RowInputs(), kept))
        buffer = np.full(packing.num_words_for(layout), 12345, np.int32)
        packing.pack(layout, Tiles.from_layout(layout, 16), None, buffer)
        seen = [entry.block_table[: -(-(entry.start + entry.num_new_tokens) // 16)] for entry in layout.entries]
        assert packing.views(buffer).tables.tolist() == [block for table in seen for block in table] * num_groups


def test_wide_numbers_are_aligned_and_the_last_array_takes_what_is_left():
    inputs = (
        StepInput("flags", np.int32, ("samples",)),
        StepInput("wide", np.int64, (2,)),
        StepInput("rest", np.int32, None),
    )
    packing = Packing(inputs, {"samples": 3})
    assert packing.num_words == 8
    views = packing.views(torch.arange(11, dtype=torch.int32))
    assert views.flags.tolist() == [0, 1, 2] and views.rest.tolist() == [8, 9, 10]
    assert views.wide.dtype == torch.int64 and views.wide.tolist() == [4 + (5 << 32), 6 + (7 << 32)]


def test_a_size_that_no_step_has_is_refused():
    with pytest.raises(KeyError, match="pages"):
        Packing((StepInput("pages", np.int32, ("pages",)),), {"samples": 3})
