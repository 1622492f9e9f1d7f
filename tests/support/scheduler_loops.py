"""Loops of scheduler and mock model in the start states of the scheduler's tests."""

from nanovllm.core.sequence import Sequence
from tests.support.scheduling import Loop, chunks, make_scheduler


def make_loop(**limits: int) -> Loop:
    return Loop(make_scheduler(**limits))


def prompt(length: int, first: int = 0) -> list[int]:
    """Tokens of a prefix that no prompt with another `first` shares."""
    return [first, *(position % 7 for position in range(length - 1))]


def running(loop: Loop) -> list[str]:
    return [sequence.request_id for sequence in loop.scheduler.running]


def waiting(loop: Loop) -> list[str]:
    return [sequence.request_id for sequence in loop.scheduler.waiting]


def two_that_outgrow_the_pool(**options: int) -> Loop:
    """Two running sequences of two and a half blocks each, in a pool of six; one needs a fourth block first."""
    loop = make_loop(num_kv_blocks=1 + 6, max_model_len=24)
    loop.add(prompt(10), max_tokens=14)
    loop.add(prompt(9, 1), max_tokens=15, **options)
    return loop


def run_until_preemption(loop: Loop) -> None:
    while not loop.scheduler.stats.num_preemptions:
        loop.step()


def prefill_between_decodes_that_need_blocks() -> Loop:
    """Request 4 has a chunk of 8 of its 13 tokens in flight. Four decodes, two older and two younger than it,
    each need a new block; two blocks are free."""
    loop = make_loop(num_kv_blocks=1 + 8, max_model_len=32, max_num_batched_tokens=12, max_num_seqs=8)
    for number, priority in enumerate((0, 0, 2, 2)):
        loop.add(prompt(3, number), max_tokens=5, priority=priority)
    loop.step()
    loop.add(prompt(13, 4), max_tokens=2, priority=1)
    assert chunks(loop.launch()) == {"0": (3, 4), "1": (3, 4), "2": (3, 4), "3": (3, 4), "4": (0, 8)}
    assert loop.manager.num_free_blocks == 2
    return loop


def update_with(loop: Loop, *token_ids: int) -> list[Sequence]:
    """Schedule a step and update it with the given tokens."""
    return loop.scheduler.update(loop.scheduler.schedule(), token_ids)


def preempted_with_a_token_in_flight() -> Loop:
    loop = two_that_outgrow_the_pool()
    while not loop.scheduler.stats.num_preemptions:
        if len(loop.in_flight) == 2:
            loop.read()
        loop.launch()
    assert loop.sequences[1].num_in_flight_tokens > 0
    return loop
