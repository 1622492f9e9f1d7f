"""What a client's queue asks of running sequences: whose blocks and slots, how many, and at whose cost."""

from tests.engine.loops import prompt
from tests.support.scheduler_loops import make_loop

MUCH = 1e9  # service beyond any bound


def first_victim(loop, **served):
    """The first running sequence that gives up its blocks, with so much service of each client."""
    queue = loop.scheduler.waiting
    for sequence in loop.unfinished:
        sequence.account.served = served.get(sequence.client, 0.0)
    return next(queue.block_victims(loop.scheduler.running), None)


def test_a_slot_costs_what_its_victim_loses_unless_its_client_has_no_other():
    for num_free, num_victims, cost in ((0, 2, 6), (2, 2, 2), (0, 1, 0)):  # with free blocks, full ones stay findable
        loop = make_loop(num_kv_blocks=1 + 2 * num_victims + num_free, max_model_len=8)
        victim, *_ = [loop.add(prompt(5, number), client="a", max_tokens=3) for number in range(num_victims)]
        loop.step()  # it knows six tokens
        successor = loop.add(prompt(5, 6), client="b")
        before = successor.account.served
        loop.scheduler.waiting.charge(successor, 0, victim)
        assert successor.account.served - before == cost


def test_blocks_for_a_less_served_client_are_beyond_those_that_running_sequences_need_next():
    for num_free, gives_up in ((2, False), (1, True)):
        loop = make_loop(num_kv_blocks=1 + 2 + num_free, max_model_len=12)
        growing = loop.add(prompt(8), client="a", max_tokens=4)
        loop.step()
        loop.add(prompt(3, 1), client="b")
        assert first_victim(loop, a=MUCH) is (growing if gives_up else None)


def test_blocks_for_a_less_served_client_are_beyond_those_that_started_prompts_still_need():
    for num_free, gives_up in ((5, False), (4, True)):
        loop = make_loop(num_kv_blocks=1 + 3 + num_free, max_model_len=24, max_num_batched_tokens=10)
        loop.add(prompt(2), client="a", max_tokens=9)
        loop.add(prompt(16, 1), client="a")  # holds two blocks, lacks three, and needs one of them now
        loop.step()
        loop.add(prompt(3, 2), client="b")
        assert (first_victim(loop, a=MUCH) is not None) == gives_up


def test_the_weight_of_the_client_that_lags_divides_the_bound_of_blocks():
    for weight, gives_up in ((1.0, False), (4.0, True)):
        loop = make_loop(num_kv_blocks=1 + 3, max_model_len=12, client_weights={"b": weight})
        loop.add(prompt(8), client="a", max_tokens=4)
        loop.step()
        loop.add(prompt(6, 1), client="b")
        assert (first_victim(loop, a=loop.scheduler.waiting.bound / 2) is not None) == gives_up


def test_sequences_of_another_priority_give_up_no_blocks_for_a_client():
    loop = make_loop(num_kv_blocks=1 + 6, max_model_len=12)
    same = loop.add(prompt(8), client="a", max_tokens=4)
    loop.add(prompt(8, 1), client="c", max_tokens=4, priority=1)
    loop.step()
    loop.add(prompt(11, 2), client="b")
    assert first_victim(loop, a=MUCH, c=MUCH) is same


def test_no_slot_is_yielded_while_a_prompt_in_progress_goes_before_its_successor():
    loop = make_loop(max_num_seqs=2, max_num_batched_tokens=10)
    decoding = loop.add(prompt(2), client="a", max_tokens=9)
    loop.add(prompt(16, 1), client="c")
    loop.step()
    loop.add(prompt(3, 2), client="b")
    for served, victim in ((0.0, None), (1.0, decoding)):
        first_victim(loop, a=MUCH, c=served)
        assert loop.scheduler.waiting.make_way(loop.scheduler.running, loop.scheduler.preempt) is victim
