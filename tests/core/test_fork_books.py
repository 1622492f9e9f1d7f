"""Forks in the books of scheduler and block manager: blocks in sight alone, and KV of read steps alone."""

import pytest

from nanovllm.features.forks.forking import go_on_from
from nanovllm.features.groups.state_kinds import FULL, StateKind
from tests.support.scheduling import Loop, make_group_scheduler, make_scheduler

WINDOW = StateKind(window=8)
MAX_MODEL_LEN = 40


def windows_alone():
    """The smallest pool that one sequence of max_model_len needs."""
    return make_group_scheduler([WINDOW], [1 + WINDOW.max_blocks(MAX_MODEL_LEN, 4)], max_model_len=MAX_MODEL_LEN)


def two_groups():
    counts = [1 + MAX_MODEL_LEN // 4, 1 + WINDOW.max_blocks(MAX_MODEL_LEN, 4)]
    return make_group_scheduler([FULL, WINDOW], counts, max_model_len=MAX_MODEL_LEN)


def one_full_group():
    return make_scheduler(num_kv_blocks=1 + MAX_MODEL_LEN // 4, max_model_len=MAX_MODEL_LEN)


MANAGERS = pytest.mark.parametrize("make", [one_full_group, windows_alone, two_groups])


@MANAGERS
@pytest.mark.parametrize("length", range(5, 24))
def test_a_sample_goes_on_alone_once_the_one_that_computed_its_prompt_ends(make, length):
    """In a pool with room for one sequence."""
    loop = Loop(make())
    first, second = loop.add_samples(2, [n % 7 for n in range(length)])
    first.max_num_tokens = length + 1
    loop.finish()
    assert first.num_output_tokens == 1 and second.num_output_tokens == MAX_MODEL_LEN - length


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_fork_goes_on_from_read_steps_alone(has_failed):
    """Those in flight may be undone."""
    loop = Loop(make_scheduler())
    source = loop.add(range(8), max_tokens=20)
    loop.launch()
    assert not loop.fork(source, 8, max_tokens=3).is_running
    if has_failed:
        loop.fail()
        loop.launch()
    loop.read()
    assert loop.fork(source, 8, max_tokens=3).is_running
    loop.finish()


@pytest.mark.parametrize("is_undone", [False, True])
def test_a_fork_of_a_fork_copies_the_block_that_holds_its_tokens_or_computes_them_if_the_copy_is_undone(is_undone):
    """The block of the first fork is filled by its own copy alone, which no step has made yet."""
    loop = Loop(make_scheduler())
    source = loop.add([n % 7 for n in range(6)], max_tokens=20)
    loop.step()
    first = loop.fork(source, 7, max_tokens=5)
    if is_undone:
        loop.launch()
    second = loop.fork(first, 7, max_tokens=6)
    assert first.is_running and second.is_running
    if is_undone:
        loop.fail()
    loop.finish()
    assert is_undone or first.num_cached_tokens == second.num_cached_tokens == 6


def test_a_fork_waits_where_it_cannot_go_on_from_its_source():
    cases = {
        "nothing": ({}, {}),
        "other tokens": ({}, {}),
        "another salt": ({}, {"cache_salt": "other"}),
        "rows that it reports": ({}, {"prompt_logprobs": 0}),
        "another client's request": ({}, {"client": "b"}),
        "no slot": ({"max_num_seqs": 1}, {}),
        "no block for its copy": ({"num_kv_blocks": 1 + 2, "max_model_len": 8}, {}),
    }
    for hindrance, (limits, options) in cases.items():
        loop = Loop(make_scheduler(**limits))
        source = loop.add([n % 7 for n in range(6)], max_tokens=2)
        loop.step()
        if "client" in options:
            loop.add([5] * 9)
        fork = loop.add(source.token_ids, max_tokens=1, **options)
        if hindrance == "other tokens":
            fork.token_ids[4] += 1
        go_on_from(loop.scheduler, source, fork)
        num_shared = 6 if hindrance == "nothing" else 0
        assert (fork.num_cached_tokens, fork.num_counted_tokens) == (num_shared, num_shared), hindrance
        assert fork.is_running == bool(num_shared)
