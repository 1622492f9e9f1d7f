"""Where recurrent states are kept, who goes on from them, and where a failed step returns to; blocks of four tokens."""

import numpy as np
import pytest

from nanovllm.features.groups.block_checks import check_blocks
from nanovllm.features.groups.cache_groups import CacheGroups, group_stats
from nanovllm.features.groups.group_layouts import with_groups
from nanovllm.features.groups.state_kinds import FULL, StateKind
from nanovllm.features.policies.mock_model import tables_of
from nanovllm.layout import build_layout
from tests.engine.loops import chunks
from tests.support.public_options import make_sequence
from tests.support.scheduler_loops import hits, tokens
from tests.support.scheduling import Loop, make_group_scheduler

STATE = StateKind.record(5000)


def make_loop(*, num_slots=64, num_blocks=1024, **limits):
    return Loop(
        make_group_scheduler([FULL, STATE], [1 + num_blocks, 1 + num_slots], **({"max_model_len": 400} | limits))
    )


def states_of(sequence):
    """Its slots, by the block after which they are."""
    return {index: block for index, block in enumerate(tables_of(sequence)[1]) if block}


def findable_states(loop, sequence):
    """The numbers of computed blocks after which a state is found."""
    group, entries = loop.manager.groups[1], loop.manager.entries
    hashes = sequence.block_hashes[: sequence.num_computed_tokens // 4]
    return [number for number, block_hash in enumerate(hashes, 1) if group.find(entries[block_hash])]


def lose_step(loop):
    loop.launch()
    loop.fail()


def after_steps(count, prompt, **limits):
    """A loop whose only request has run for so many steps."""
    loop = make_loop(**limits)
    sequence = loop.add(prompt, max_tokens=20)
    loop.steps(count)
    return loop, sequence


def chunks_until_end(loop):
    placed = []
    while loop.unfinished:
        placed += chunks(loop.step()).values()
    return placed


# ------------------------------------------------------------------------------------------------- slots and tables


def test_a_chunk_of_many_blocks_takes_one_slot():
    loop = make_loop()
    sequence = loop.add(tokens(41), max_tokens=9)
    loop.launch()
    assert list(states_of(sequence)) == [9]
    assert len(loop.manager.groups[1].pool.free_blocks) == 63


def test_a_state_is_overwritten_in_its_block_and_not_at_a_boundary():
    loop, sequence = after_steps(2, tokens(5))
    (first, second) = states_of(sequence).values()
    for _ in range(3):  # positions 5, 6, 7
        loop.step()
        assert states_of(sequence) in ({0: first, 1: second}, {1: second})
    loop.launch()
    assert list(states_of(sequence)) == [1, 2] and states_of(sequence)[1] == second


@pytest.mark.parametrize("depth", [1, 2])
def test_a_running_sequence_pins_two_slots_once_its_steps_are_read(depth):
    loop = make_loop()
    sequence = loop.add(tokens(30), max_tokens=60)
    most = 0
    while not sequence.is_finished:
        is_launched = loop.launch() is not None
        most = max(most, len(states_of(sequence)))
        if len(loop.in_flight) == depth or not is_launched:
            loop.read()
    assert most == 1 + depth


def test_a_chunk_with_one_free_slot_may_take_many_blocks():
    loop = make_loop(num_slots=2)
    loop.add(tokens(100), max_tokens=1)
    assert chunks_until_end(loop) == [(0, 96), (96, 100)]


def test_requests_start_while_each_can_have_two_slots():
    """They are enough with overlap too: at a boundary the older state goes, not a third slot for the step in flight."""
    loop = make_loop(num_slots=8)
    for number in range(6):
        loop.add([number, *tokens(21)], max_tokens=40)
    loop.step()
    assert len(loop.scheduler.running) == 4
    loop.finish(2)
    assert loop.scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize("num_slots, kept", [(2, [3]), (3, [2, 3])])
def test_only_a_lack_of_slots_makes_a_sequence_give_up_a_state(num_slots, kept):
    loop, sequence = after_steps(1, tokens(14), num_slots=num_slots)
    loop.manager.trim(sequence)
    loop.step()
    assert list(states_of(sequence)) == [2, 3]
    loop.manager.trim(sequence)
    assert list(states_of(sequence)) == kept


def test_a_chunk_that_begins_in_a_block_ends_with_it():
    """Where its state is overwritten; what follows could not be computed again from what is kept."""
    loop = make_loop()
    sequence = loop.add(tokens(30), max_tokens=9)
    assert loop.manager.cut(sequence, 6, 30) == 8
    assert loop.manager.cut(sequence, 6, 7) == 7


# ------------------------------------------------------------------------------------------------------ checkpoints


def test_a_prompt_is_cut_at_its_last_boundary_and_found_there():
    loop = make_loop()
    loop.add(tokens(41), max_tokens=1)
    assert chunks_until_end(loop) == [(0, 40), (40, 41)]
    assert hits(loop, tokens(41)) == 40
    assert hits(loop, [*tokens(41), 5, 5]) == 40


def test_a_prompt_that_ends_on_a_boundary_is_found_there_and_one_block_before():
    loop = make_loop()
    loop.add(tokens(40), max_tokens=1)
    assert chunks_until_end(loop) == [(0, 36), (36, 40)]
    assert hits(loop, tokens(40)) == 36
    assert hits(loop, [*tokens(40), 5]) == 40


def test_without_a_prefix_cache_no_prompt_is_cut():
    loop = make_loop(enable_prefix_caching=False)
    loop.add(tokens(41), max_tokens=1)
    assert chunks_until_end(loop) == [(0, 41)]


def test_prompts_cut_at_their_end_are_not_partial_prefills():
    loop = make_loop(max_num_partial_prefills=1, max_long_partial_prefills=1)
    for number in range(5):
        loop.add([number, *tokens(20)], max_tokens=1)
    assert [chunks(loop.step()) for _ in range(2)] == [
        {str(n): (0, 20) for n in range(5)}, {str(n): (20, 21) for n in range(5)}
    ]  # fmt: skip


def test_prompts_cut_at_a_junction_are():
    loop = make_loop(max_num_partial_prefills=1, max_long_partial_prefills=1)
    for first in (1, 2):
        for own in (3, 4):
            loop.add([first, *tokens(7), own, *tokens(20)], max_tokens=1)
    assert chunks(loop.step()) == {"0": (0, 8)}


def test_a_conversation_hits_its_last_boundary_in_every_turn():
    loop = make_loop()
    conversation, num_computed = tokens(30), 0
    for turn in range(8):
        before = loop.scheduler.stats.prefix_cache_hits
        sequence = loop.add(conversation, max_tokens=11)
        loop.drain(2)
        found = loop.scheduler.stats.prefix_cache_hits - before
        assert found == num_computed // 4 * 4
        num_computed = len(sequence.token_ids) - 1  # the last token was drawn, not computed
        conversation = [*sequence.token_ids, *tokens(9, turn)]


def test_a_state_before_the_last_boundary_stays_findable_and_is_evicted_first():
    loop = make_loop(num_slots=6)
    sequence = loop.add(tokens(5), max_tokens=60)
    loop.steps(26)
    assert sequence.num_computed_tokens == 29
    assert findable_states(loop, sequence) == [1, 4, 5, 6, 7]  # the prompt's end ages like others


def test_a_state_that_was_found_ages_like_others():
    loop = make_loop(num_slots=8)
    sequence = loop.add(tokens(5), max_tokens=60)
    loop.steps(14)
    loop.add([*sequence.token_ids[:12], 6], max_tokens=1)
    loop.steps(24)
    assert sequence.num_computed_tokens == 41
    assert findable_states(loop, sequence) == [1, 3, 6, 7, 8, 9, 10]


def test_a_hit_counts_among_the_two_slots_of_a_sequence():
    loop = make_loop()
    hits(loop, tokens(41))
    manager, sequence = loop.manager, make_sequence([*tokens(41), 5, 5], max_model_len=400)
    lacking = manager.num_blocks_lacking(sequence, 43, manager.lookup(sequence))
    assert lacking.by_group == [11, 2]  # all are free: one is claimed, one taken


def test_evicted_states_shorten_hits_to_those_that_are_left():
    loop = make_loop(num_slots=4)
    loop.add(tokens(41), max_tokens=1)
    loop.drain()
    for number in range(4):
        hits(loop, [number, *tokens(10, 3)])
    assert hits(loop, tokens(41)) == 0
    assert hits(loop, tokens(41)) == 40


# ------------------------------------------------------------------------------------------ junctions and the queue


def test_a_common_prefix_of_requests_that_arrive_together_is_computed_once():
    loop = make_loop(num_slots=200, num_blocks=2000, max_model_len=600)
    system = tokens(512)
    for number in range(64):
        loop.add([*system, *(divmod(number, 8) * 16)], max_tokens=2)
    loop.finish()
    assert [s.num_cached_tokens for s in loop.sequences] == [0] + [512] * 63


def test_a_request_waits_for_the_state_that_the_step_writes_and_others_start():
    loop = make_loop()
    for own in (1, 2):
        loop.add([*tokens(20), own], max_tokens=1)
    loop.add([6, *tokens(20)], max_tokens=1)
    assert chunks(loop.launch()) == {"0": (0, 20), "2": (0, 20)}
    assert chunks(loop.launch()) == {"0": (20, 21), "2": (20, 21), "1": (20, 21)}


def test_a_request_waits_for_each_chunk_of_the_one_that_computes_its_prefix():
    loop = make_loop(long_prefill_token_threshold=8, max_num_batched_tokens=16, max_num_seqs=8)
    for own in (1, 2):
        loop.add([*tokens(24), own], max_tokens=1)
    placed = [chunks(loop.step()) for _ in range(3)]
    assert placed == [{"0": (0, 16)}, {"0": (16, 24)}, {"0": (24, 25), "1": (24, 25)}]


def test_a_request_does_not_wait_for_a_state_that_is_lost():
    loop = make_loop()
    for own in (1, 2):
        loop.add([*tokens(20), own], max_tokens=1)
    loop.launch()
    loop.abort(loop.sequences[0])
    loop.fail()
    assert chunks(loop.launch()) == {"1": (0, 20)}


def test_a_state_is_kept_where_waiting_requests_part():
    loop = make_loop()
    for own in (1, 2, 3):
        loop.add([*tokens(12), own, *tokens(20, 3)], max_tokens=1)
    loop.add([*tokens(8), 5, 5, *tokens(20)], max_tokens=1)
    loop.drain()
    assert [s.num_cached_tokens for s in loop.sequences] == [0, 12, 12, 8]


def test_a_boundary_that_one_request_alone_wants_cuts_no_chunk():
    loop = make_loop()
    for own in (tokens(20), tokens(20, 1), tokens(20, 2)):
        loop.add(own, max_tokens=1)
    assert set(chunks(loop.step()).values()) == {(0, 16)}


def test_a_chunk_cut_for_a_state_is_not_made_longer_by_budget_that_is_left():
    loop = make_loop(long_prefill_token_threshold=16, max_num_batched_tokens=64, max_num_seqs=8)
    loop.add([*tokens(24), 1, *tokens(30)], max_tokens=1)
    loop.add([*tokens(24), 2, *tokens(30)], max_tokens=1)
    assert chunks(loop.step()) == {"0": (0, 24)}  # longer than the threshold, and no longer than both go together


def test_the_slot_of_a_chunk_that_becomes_longer_moves_to_its_end():
    loop = make_loop(long_prefill_token_threshold=8, max_num_batched_tokens=40, max_num_seqs=8)
    sequence = loop.add(tokens(60), max_tokens=1)
    loop.launch()
    assert (sequence.num_computed_tokens, list(states_of(sequence))) == (40, [9])
    assert loop.manager.groups[1].pool.num_findable_blocks == 1
    loop.read()
    loop.drain()


def test_the_second_request_behind_a_prefix_keeps_a_state_where_it_leaves_it():
    loop = make_loop()
    system = tokens(20)
    assert hits(loop, [*system, *tokens(9, 1)]) == 0
    assert hits(loop, [*system, *tokens(9, 2)]) == 0  # nobody could know of it before
    assert hits(loop, [*system, *tokens(9, 3)]) == 20


def test_what_waits_is_counted_and_what_runs_or_ended_is_not():
    loop = make_loop(max_num_seqs=1)
    counts = loop.manager.wanted
    sequences = [loop.add([*tokens(8), own], max_tokens=20) for own in (1, 2, 3)]
    assert sorted(counts.values()) == [3, 3]
    loop.step()
    assert sorted(counts.values()) == [2, 2]
    loop.abort(sequences[1])
    assert sorted(counts.values()) == [1, 1]
    loop.scheduler.preempt_all()
    assert sorted(counts.values()) == [2, 2]
    loop.drain()
    assert counts == {}


def test_a_request_is_not_among_the_others_that_want_its_blocks():
    loop = make_loop(max_num_seqs=1)
    one, other, third = (loop.add([*tokens(8), own], max_tokens=20) for own in (1, 2, 3))
    wanted = loop.manager.wanted
    for _ in range(2):  # while it waits, and while it runs
        assert [wanted.by_others(one, index, one.block_hashes[index]) for index in (0, 1)] == [2, 2]
        loop.step()
    loop.abort(other)
    assert wanted.by_others(third, 0, third.block_hashes[0]) == 0


def test_a_state_that_a_waiting_request_wants_is_evicted_last():
    loop = make_loop(num_slots=4, max_num_seqs=1)
    loop.add(tokens(9), max_tokens=1)
    loop.drain()
    for number in range(3, 7):  # each leaves a state, and four find room
        loop.add([number, *tokens(9)], max_tokens=1)
    wants = loop.add([*tokens(9), 3], max_tokens=1)
    loop.drain()
    assert wants.num_cached_tokens == 8


# -------------------------------------------------------------------------------------- failed steps and preemption


@pytest.mark.parametrize("num_steps, length, computed", [(5, 14, 17), (3, 15, 16)])
def test_a_failed_step_returns_a_sequence_to_its_last_boundary(num_steps, length, computed):
    loop, sequence = after_steps(num_steps, tokens(length))
    assert sequence.num_computed_tokens == computed
    lose_step(loop)
    assert (sequence.num_computed_tokens, sequence.is_running, list(states_of(sequence))) == (16, True, [3])
    loop.finish()


def test_a_sequence_without_a_state_at_a_boundary_starts_again():
    loop = make_loop()
    sequence = loop.add(tokens(2), max_tokens=8)
    loop.step()
    lose_step(loop)
    assert (sequence.num_computed_tokens, sequence.is_running) == (0, False)
    loop.finish()


def test_a_sequence_that_gave_its_boundary_up_starts_again():
    loop, sequence = after_steps(3, tokens(14), num_slots=2)
    assert sequence.num_computed_tokens == 15
    loop.launch()
    loop.launch()  # from 16 on; the pool has no third slot
    assert list(states_of(sequence)) == [3, 4]
    loop.fail()
    assert (sequence.num_computed_tokens, sequence.is_running) == (0, False)
    loop.finish(2)


def test_a_failed_chunk_returns_to_the_chunk_before():
    loop = make_loop(long_prefill_token_threshold=16, max_num_batched_tokens=16, max_num_seqs=4)
    sequence = loop.add(tokens(60), max_tokens=8)
    loop.step()
    lose_step(loop)
    assert sequence.num_computed_tokens == 16
    loop.finish()


def test_a_preempted_sequence_goes_on_from_its_last_boundary():
    loop, sequence = after_steps(5, tokens(14))
    loop.scheduler.preempt_all()
    assert chunks(loop.launch()) == {"0": (16, 18)}
    loop.read()
    loop.drain()
    assert sequence.num_preemptions == 1
    loop.check_outputs()


def test_an_aborted_sequence_leaves_its_last_boundary_to_others():
    loop, sequence = after_steps(5, tokens(14))
    known = list(sequence.token_ids)
    loop.abort(sequence)
    assert hits(loop, known) == 16


# ------------------------------------------------------------------------------------------- layouts, checks, figures


def test_a_layout_names_the_slots_that_each_entry_reads_and_writes():
    loop = make_loop()
    old = loop.add(tokens(6), max_tokens=9)
    loop.steps(4)
    assert old.num_computed_tokens == 8
    (kept,), new = states_of(old).values(), loop.add(tokens(22, 1), max_tokens=1)
    layout = with_groups(build_layout(loop.launch().entries, 4), [False, True], 4)
    (first,), working = layout.others, states_of(old)[2]
    loop.read()
    (second,) = with_groups(build_layout(loop.launch().entries, 4), [False, True], 4).others
    (boundary, end) = states_of(new).values()
    assert (first.state_reads.tolist(), first.state_writes.tolist()) == ([kept, 0], [working, boundary])
    assert (second.state_reads.tolist(), second.state_writes.tolist()) == ([working, boundary], [working, end])
    assert len({0, kept, working, boundary, end}) == 5
    assert first.state_reads.dtype == first.state_writes.dtype == np.int64
    assert (len(first.slot_mapping), len(first.blocks_to_clear)) == (0, 0)
    assert layout.state_reads is None and layout.state_writes is None


def test_a_missing_state_is_named():
    loop = make_loop()
    sequence = loop.add(tokens(20), max_tokens=9)
    loop.step()
    tables_of(sequence)[1][-1] = 0
    with pytest.raises(RuntimeError, match="lacks what it sees"):
        check_blocks(loop.manager, [sequence])


def test_figures_tell_states_from_k_and_v():
    loop = make_loop(num_slots=10)
    loop.add(tokens(21), max_tokens=9)
    loop.step()
    full, states = group_stats(loop.manager)
    assert (full.name, full.record_bytes) == ("full attention", None)
    assert (states.name, states.record_bytes) == ("recurrent states", 5000)
    assert (states.num_blocks, states.num_used_blocks, states.num_findable_blocks) == (10, 1, 1)


def test_a_pool_that_cannot_hold_one_sequence_is_refused():
    with pytest.raises(ValueError, match="recurrent states cannot hold the 2 blocks that one sequence of 200 tokens"):
        make_group_scheduler([FULL, STATE], [51, 2], max_model_len=200)


def test_records_alone_are_refused_since_blocks_of_tokens_name_prefixes():
    with pytest.raises(ValueError, match="the first cache group has records"):
        CacheGroups([STATE], [9], 4, max_model_len=8, max_chunk_tokens=8)


def test_nobody_hears_of_states():
    """Events name contents of the first group: a prefix has K and V, whether or not its state is kept."""
    loop, heard = make_loop(num_slots=2), []

    class Observer:
        def findable(self, entry, parent_hash):
            heard.append(entry.block_hash)

        def forgotten(self, block_hash):
            heard.remove(block_hash)

        def all_forgotten(self):
            heard.clear()

    loop.manager.observer = Observer()
    for number in range(4):
        hits(loop, [number, *tokens(20)])
    assert loop.manager.groups[1].pool.num_evictions > 0
    assert len(heard) == len(set(heard)) == 4 * 5
