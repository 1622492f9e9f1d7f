"""How a batch becomes rows: drawn by hand, decodes first, each row with its position and its slot.

Blocks have four tokens. A sequence of seven tokens whose table is [5, 2] has its positions in these slots::

    position   0   1   2   3 |  4   5   6
    slot      20  21  22  23 |  8   9  10
"""

from __future__ import annotations

from nanovllm.batch import ScheduledBatch, ScheduledSequence
from nanovllm.layout import build_layout
from nanovllm.model_runner import with_sampled
from nanovllm.sequence import Sequence
from tests.engine.blocks import SIZE, make_sequence


def entry(sequence: Sequence, start: int, count: int, table: list[int], num_samples: int = 1) -> ScheduledSequence:
    return ScheduledSequence(sequence, start, count, num_samples, table, start)


def test_each_row_has_the_slot_of_its_position():
    layout = build_layout([entry(make_sequence(range(10, 17)), 0, 7, [5, 2])], SIZE)
    assert layout.token_ids.tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert layout.slot_mapping.tolist() == [20, 21, 22, 23, 8, 9, 10]
    assert (layout.num_tokens, layout.num_decodes) == (7, 0)
    assert layout.sample_rows.tolist() == [6] and layout.sampled_positions.tolist() == [7]


def test_decodes_come_first_then_chunks_in_the_order_of_the_batch():
    long, short, decode = (make_sequence(range(20), arrival=n) for n in range(3))
    layout = build_layout(
        [entry(long, 4, 6, [1, 2, 3], 0), entry(decode, 9, 1, [7, 8, 9]), entry(short, 0, 2, [4])], SIZE
    )
    #                 decode | long                  | short
    assert layout.positions.tolist() == [9, 4, 5, 6, 7, 8, 9, 0, 1]
    assert layout.slot_mapping.tolist() == [37, 8, 9, 10, 11, 12, 13, 16, 17]
    assert layout.row_starts.tolist() == [0, 1, 7, 9]
    assert [e.sequence for e in layout.decodes] == [decode] and [e.sequence for e in layout.chunks] == [long, short]
    assert layout.sample_rows.tolist() == [0, 8]  # of the decode and of the short prompt; the long one goes on


def test_decodes_may_be_ordered_by_context_and_the_samples_keep_the_order_of_the_batch():
    near, far = make_sequence(range(20)), make_sequence(range(20), arrival=1)
    entries = [entry(near, 2, 1, [1]), entry(far, 11, 1, [2, 3, 4])]
    layout = build_layout(entries, SIZE, longest_first=True)
    assert layout.positions.tolist() == [11, 2]
    assert layout.sample_rows.tolist() == [1, 0] and layout.sampled_positions.tolist() == [3, 12]


def test_a_block_that_a_step_begins_and_does_not_fill_is_cleared():
    sequence = make_sequence(range(20))

    def cleared(start: int, count: int) -> list[int]:
        return build_layout([entry(sequence, start, count, [5, 2, 9])], SIZE).blocks_to_clear.tolist()

    assert cleared(0, 7) == [2]  # begins blocks 5 and 2, and fills the first
    assert cleared(0, 8) == []
    assert cleared(4, 1) == [2]
    assert cleared(5, 1) == []  # begun before: its other slots are finite already
    assert cleared(5, 4) == [9]


def test_a_token_in_flight_is_a_reference_to_the_draw_of_the_step_before():
    first, second = make_sequence([3, 4]), make_sequence([5, 6], arrival=1)
    entries = [entry(first, 2, 1, [1]), entry(second, 1, 1, [2])]
    layout = build_layout(entries, SIZE, {second: 0, first: 1})
    assert layout.token_ids.tolist() == [-1 - 1, 6]


def test_references_to_draws_become_tokens_on_the_device():
    import torch

    drawn = torch.tensor([40, 50, -1])  # the last row was not finite: it goes on with token 0 until that is read
    assert with_sampled(torch.tensor([7, -1, -2, -3]), drawn).tolist() == [7, 40, 50, 0]


def test_a_sample_of_the_same_prompt_draws_from_the_row_before():
    prompt, sample, decode = (make_sequence(range(9), arrival=n) for n in range(3))
    entries = [entry(decode, 8, 1, [1, 2, 3]), entry(prompt, 0, 6, [4, 5]), entry(sample, 6, 0, [4, 6])]
    layout = build_layout(entries, SIZE)
    assert [e.sequence for e in layout.entries] == [decode, prompt]
    assert layout.sample_rows.tolist() == [0, 6, 6] and layout.sampled_positions.tolist() == [9, 6, 6]


def test_a_batch_says_what_it_decodes_samples_and_computes():
    decode, chunk, last = (make_sequence(range(9), arrival=n) for n in range(3))
    entries = (entry(decode, 8, 1, [1, 2, 3]), entry(chunk, 0, 4, [4], 0), entry(last, 4, 5, [5, 6, 7]))
    batch = ScheduledBatch(1, entries, num_decodes=1)
    assert batch.sampling == (decode, last) and batch.prefills == entries[1:] and batch.num_tokens == 10
    assert not batch.draws_runs and not batch.draws_late


def test_rows_of_drafts_follow_the_last_known_token_also_as_decodes():
    sequence = make_sequence([5, 6, 7])
    run = ScheduledSequence(sequence, 2, 3, 3, [1, 2], 2, (8, 9))
    sequence.draft = run.draft
    decodes = [run._replace(start=start, num_new_tokens=1, num_samples=1) for start in (2, 3, 4)]
    for entries in ([run], decodes):
        layout = build_layout(entries, 4)
        assert layout.token_ids.tolist() == [7, 8, 9] and layout.positions.tolist() == [2, 3, 4]
    assert [sequence.history(1, end).tolist() for end in (2, 3, 4, 5, 6)] == [
        [6],
        [6, 7],
        [6, 7, 8],
        *[[6, 7, 8, 9]] * 2,
    ]
    assert sequence.token_ids.tolist() == [5, 6, 7] and ScheduledBatch(1, (run,)).drafted == (run,)
