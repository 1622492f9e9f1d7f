"""Shares between clients: who starts next, who yields, what is counted, and the bound between two that wait."""

import random

import pytest

from nanovllm.block_manager import BlockManager
from nanovllm.features.groups.cache_groups import CacheGroups
from nanovllm.features.groups.state_kinds import FULL, StateKind
from nanovllm.features.shares import client_queue
from nanovllm.features.shares.client_queue import DECODE_COST, ClientQueue
from nanovllm.scheduler import Scheduler
from tests.engine.loops import chunks, prompt, run_until_preemption, running
from tests.support.public_options import make_config, make_sequence
from tests.support.scheduler_loops import make_loop
from tests.support.scheduling import Loop, make_scheduler
from tests.support.step_costs import RandomCosts, make_budget


def served(loop, priority=0):
    """Counters by client."""
    queue = loop.scheduler.waiting
    idle = {client: account for (level, client), account in queue._idle.items() if level == priority}
    return {client: account.served for client, account in (idle | queue._levels.get(priority, {})).items()}


def started(loop, num_steps):
    """The clients of requests in the order in which they start, of requests of one token each."""
    names = [entry.sequence.client for _ in range(num_steps) for entry in loop.step().entries]
    return "".join(names)


def one_slot(**options):
    return make_loop(max_num_seqs=1, enable_prefix_caching=False, **options)


def add_many(loop, client, count, **options):
    for number in range(count):
        loop.add(prompt(4, number % 7), client=client, **({"max_tokens": 1} | options))


# ----------------------------------------------------------------------------------------------------------- who starts


def test_one_client_keeps_the_order_of_arrival_and_nothing_is_shared():
    loop = make_loop(max_num_seqs=1)
    add_many(loop, "a", 3)
    queue = loop.scheduler.waiting
    assert not queue.is_shared and [*queue.in_order()] == loop.sequences
    assert [chunks(loop.step()).popitem()[0] for _ in range(3)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    "max_num_seqs, counts, num_steps, order",
    [(1, (6, 3), 9, "abababaaa"), (4, (6, 6), 1, "abab")],
    ids=["however many requests one has", "within a step too"],
)
def test_clients_take_turns(max_num_seqs, counts, num_steps, order):
    loop = make_loop(max_num_seqs=max_num_seqs, enable_prefix_caching=False)
    for client, count in zip("ab", counts, strict=True):
        add_many(loop, client, count)
    assert started(loop, num_steps) == order


def test_a_client_with_twice_the_weight_gets_twice_the_service():
    loop = one_slot(client_weights={"b": 2.0})
    add_many(loop, "a", 20)
    add_many(loop, "b", 20)
    assert started(loop, 18).count("b") == 12


def test_an_urgent_request_goes_before_the_least_served_client():
    loop = one_slot()
    add_many(loop, "a", 1, priority=-1)
    add_many(loop, "b", 1)
    add_many(loop, "a", 1, priority=-1)
    assert started(loop, 3) == "aab"


def test_with_ageing_the_level_of_the_oldest_request_goes_first():
    loop = make_loop(max_num_seqs=1, priority_ageing_s=1.0, enable_prefix_caching=False)
    add_many(loop, "a", 2, priority=1)
    loop.now = 8.0
    add_many(loop, "b", 1)
    add_many(loop, "b", 1, priority=1)
    assert [s.priority for s in loop.scheduler.waiting.in_order()] == [1, 1, 0, 1]
    assert [loop.step().entries[0].sequence.request_id for _ in range(4)] == ["0", "3", "1", "2"]


def test_a_client_that_comes_back_has_saved_up_nothing():
    loop = one_slot()
    add_many(loop, "a", 12)
    add_many(loop, "b", 1)
    started(loop, 8)
    assert set(served(loop)) == {"a"}  # which had caught up
    add_many(loop, "b", 3)
    assert served(loop)["b"] == served(loop)["a"]
    assert started(loop, 6) == "ababab"


def test_a_client_with_a_running_request_has_saved_up_nothing_either():
    loop = make_loop(max_num_seqs=2, max_model_len=64, enable_prefix_caching=False)
    add_many(loop, "b", 1, max_tokens=50)
    add_many(loop, "a", 40)
    loop.steps(20)
    assert served(loop)["b"] < served(loop)["a"]
    add_many(loop, "b", 3)
    assert served(loop)["b"] == served(loop)["a"]
    loop.steps(30)
    loop.add(prompt(4), client="b", max_tokens=1)  # where none waits
    assert served(loop)["b"] >= served(loop).get("a", 0.0)


def test_requests_that_cannot_start_hide_those_of_other_clients_for_some_turns_only():
    """One long prompt at a time: the others of its client wait, and are skipped."""
    limits = {"max_num_seqs": 70, "max_num_batched_tokens": 80, "num_kv_blocks": 2000} | ONE_LONG
    loop = make_loop(client_weights={"b": 0.001}, **limits)
    for number in range(70):
        loop.add(prompt(60, number % 7), client="a", cache_salt=str(number))
    add_many(loop, "b", 2)  # after the first of which it is the most-served one by far
    assert list(chunks(loop.step())) == ["0", "70", "71"]


# --------------------------------------------------------------------------------------------------------- what counts


def test_computed_prompt_tokens_and_generated_ones_count_and_hits_are_free():
    loop = make_loop(max_num_seqs=2)
    add_many(loop, "a", 1, max_tokens=40)
    loop.add(prompt(9, 6), client="b", max_tokens=1)
    loop.step()
    assert served(loop) == {"a": 4 + DECODE_COST, "b": 9 + DECODE_COST}
    loop.add(prompt(9, 6), client="b", max_tokens=3)
    loop.step()
    assert served(loop)["b"] == 9 + DECODE_COST + 1 + DECODE_COST  # two blocks of 4 were found


def test_a_failed_step_is_paid_back():
    loop = make_loop()
    add_many(loop, "a", 2, max_tokens=9)
    add_many(loop, "b", 2, max_tokens=9)
    loop.launch()
    assert served(loop) == {"a": 8, "b": 8}
    loop.fail()
    assert served(loop) == {"a": 0, "b": 0}
    loop.finish()


def test_tokens_that_no_client_gets_are_not_counted():
    loop = make_loop()
    aborted, failed, ended = (loop.add(prompt(4, first), client="a", max_tokens=9) for first in range(3))
    loop.add(prompt(4, 5), client="b", max_tokens=9)
    loop.step()
    assert served(loop) == {"a": 3 * (4 + DECODE_COST), "b": 4 + DECODE_COST}
    loop.launch(non_finite={failed.request_id})
    loop.abort(aborted)
    loop.read()
    assert (failed.finish_reason, ended.num_output_tokens) == ("error", 2)
    assert served(loop) == {"a": 3 * (4 + DECODE_COST) + DECODE_COST, "b": 4 + 2 * DECODE_COST}


def test_the_last_token_of_a_client_is_counted_too():
    loop = make_loop()
    add_many(loop, "a", 1, max_tokens=1)
    add_many(loop, "b", 1, max_tokens=9)
    loop.step()
    loop.add(prompt(4, 3), client="a", max_tokens=9)
    assert served(loop) == {"a": 4 + DECODE_COST, "b": 4 + DECODE_COST}


def test_the_costs_are_those_of_construction():
    plain = make_scheduler()
    queue = ClientQueue(plain.config, plain.block_manager, prefill_cost=0.25, decode_cost=2.0)
    scheduler = Scheduler(plain.config, plain.block_manager, queue=queue)
    loop = Loop(scheduler)
    add_many(loop, "a", 1)
    add_many(loop, "b", 1, max_tokens=2)
    loop.step()
    assert served(loop)["b"] == 4 * 0.25 + 2.0
    assert scheduler.waiting.bound == max(0.25 * 64, 2.0 * min(1024 * 4, 64 * 64))


# ------------------------------------------------------------------------------------------------------------- memory


def test_an_idle_client_is_remembered_until_the_others_have_caught_up():
    loop = one_slot()
    loop.add(prompt(20), client="b", max_tokens=1)
    add_many(loop, "a", 5)
    loop.step()
    assert served(loop) == {"b": 23.0, "a": 0.0}
    started(loop, 4)
    assert served(loop) == {"a": 28.0} and not loop.scheduler.waiting.is_shared
    started(loop, 1)
    assert served(loop) == {}


def test_memory_of_clients_is_bounded_over_all_priority_levels(monkeypatch):
    monkeypatch.setattr(client_queue, "MAX_IDLE", 5)
    queue = make_scheduler().waiting
    for priority in range(10):
        queue.join(make_sequence([1], arrival=100 * priority, priority=priority, client="one"))
        for number in range(1, 4):
            ended = make_sequence(
                [1], arrival=100 * priority + number, priority=priority, client=f"{priority}.{number}"
            )
            queue.join(ended)
            queue.charge(ended, 10)
            queue.remove(ended)
            queue.leave(ended)
    assert list(queue._idle) == [(8, "8.2"), (8, "8.3"), (9, "9.1"), (9, "9.2"), (9, "9.3")]
    assert queue.num_clients == 1 and queue.is_shared


# ---------------------------------------------------------------------------------------------------------- who yields


def test_when_blocks_run_out_the_most_served_client_yields_before_the_youngest():
    loop = make_loop(num_kv_blocks=1 + 9, max_model_len=36, enable_prefix_caching=False)
    loop.add(prompt(10), client="a", max_tokens=20)
    loop.add(prompt(9, 1), client="a", max_tokens=20)
    loop.add(prompt(9, 2), client="b", max_tokens=20)
    run_until_preemption(loop)
    assert running(loop) == ["0", "2"]
    loop.finish()


def test_many_samples_of_one_client_do_not_hold_all_slots_while_another_waits():
    loop = make_loop(max_num_seqs=8, max_model_len=500, num_kv_blocks=2001)
    add_many(loop, "a", 20, max_tokens=400)
    loop.steps(20)
    patient = loop.add(prompt(30, 6), client="b", max_tokens=5)
    num_steps = 0
    while not patient.num_output_tokens:
        loop.step()
        num_steps += 1
    assert num_steps <= 2 + (4 + 30 + 40) / (8 * DECODE_COST)
    assert loop.scheduler.stats.num_preemptions == 1 and loop.sequences[7].num_preemptions == 1  # the youngest
    while not patient.is_finished:
        loop.step()
    assert patient.num_preemptions == 0


def test_a_client_takes_half_of_the_slots_at_once_and_more_only_beyond_the_bound():
    loop = make_loop(max_num_seqs=4, max_model_len=400, num_kv_blocks=401)
    add_many(loop, "a", 8, max_tokens=300)
    loop.step()
    add_many(loop, "b", 4, max_tokens=300)
    scheduler = loop.scheduler
    scheduler.waiting.bound = 100.0
    loop.steps(6)
    assert running(loop) == ["0", "1", "8", "9"]
    scheduler.waiting.charge(loop.sequences[0], 90)
    loop.steps(20)
    assert 0 < scheduler.waiting.gap <= 100.0 and running(loop) == ["0", "1", "8", "9"]
    scheduler.waiting.charge(loop.sequences[0], 90)
    loop.step()
    assert running(loop) == ["0", "8", "9", "10"]


@pytest.mark.parametrize("num_kv_blocks, lost", [(400, 0), (16, 24)])
def test_a_slot_is_paid_for_by_what_is_computed_again(num_kv_blocks, lost):
    """All tokens of the sequence that yields, or those of its last block if the cache will keep the others."""
    loop = make_loop(max_num_seqs=2, num_kv_blocks=num_kv_blocks, max_model_len=60)
    for first in (1, 2):
        loop.add(prompt(20, first), client="a", max_tokens=40)
    loop.steps(3)
    loop.add(prompt(13, 3), client="b", max_tokens=40)
    before = served(loop)["b"]
    assert before == served(loop)["a"]
    loop.step()  # after which it is behind
    loop.launch()
    assert running(loop) == ["0", "2"]
    assert served(loop)["b"] - before == lost + 13
    loop.finish()


def test_a_more_urgent_request_keeps_its_slot_and_a_less_urgent_one_loses_it():
    loop = make_loop(max_num_seqs=2)
    add_many(loop, "a", 2, max_tokens=50, priority=-1)
    loop.step()
    add_many(loop, "b", 1, max_tokens=50)
    loop.steps(20)
    assert running(loop) == ["0", "1"]
    add_many(loop, "c", 1, max_tokens=3, priority=-2)
    loop.step()
    assert "3" in running(loop)


def test_with_ageing_an_older_request_keeps_its_slot():
    """The request of the higher priority came so much later that the other would start before it again."""
    loop = make_loop(max_num_seqs=1, priority_ageing_s=1.0)
    add_many(loop, "a", 1, max_tokens=20, priority=1)
    loop.step()
    loop.now = 8.0
    add_many(loop, "b", 1, max_tokens=2)
    loop.steps(10)
    assert running(loop) == ["0"] and loop.scheduler.stats.num_preemptions == 0


def victim_of(queue, sequences):
    """`slot_victim` by its rule alone."""
    running = [s for s in sequences if s.is_running]
    first = next(iter(queue.in_order()))
    num_slots = sum(s.client == first.client for s in running)
    others = [s for s in running if s.client != first.client and s.priority >= first.priority]
    lower = [s for s in others if s.priority > first.priority and not num_slots]
    equal = [s for s in others if s.priority == first.priority]
    if first.num_in_flight_tokens or not (lower or equal):
        return None
    decodes = {s: not lower and s.num_known_tokens - s.num_computed_tokens <= 1 for s in running}
    victim = max(lower or equal, key=lambda s: (s.priority, s.account.served, decodes[s], s.key))
    behind = (victim.account.served - first.account.served) * first.account.weight
    if lower or (behind > 0 and sum(s.account is victim.account for s in running) > num_slots + 1):
        return victim
    due = queue.bound if num_slots else queue.prefill_cost * (victim.num_known_tokens + first.num_known_tokens)
    return victim if behind > due else None


def test_the_sequence_that_yields_its_slot_is_found_without_a_look_at_each():
    rng, num_found = random.Random(1), 0
    for _ in range(400):
        queue, sequences = make_scheduler(client_weights={"a": 3.0, "b": 0.5}).waiting, []
        for arrival in range(rng.randint(2, 12)):
            tokens, priority = [1] * rng.randint(1, 30), rng.choice((0, 0, 0, 1))
            sequence = make_sequence(tokens, arrival=arrival, priority=priority, client=rng.choice("abcd"))
            queue.join(sequence)
            queue.charge(sequence, rng.choice((0, 5, 40, 90)) + rng.random())  # no two are equal
            sequence.num_known_tokens += rng.random() < 0.1  # in flight
            sequence.is_running = rng.random() < 0.6
            sequences.append(sequence)
            if sequence.is_running:
                queue.remove(sequence)
        if queue:
            running, queue.bound = [s for s in sequences if s.is_running], rng.choice((10.0, 50.0))
            victim = queue.slot_victim(running)
            assert victim is victim_of(queue, sequences)
            num_found += victim is not None
    assert num_found > 80


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_slot_taken_with_a_token_in_flight_costs_no_token(depth):
    loop = make_loop(max_num_seqs=2, num_kv_blocks=401)
    add_many(loop, "a", 4, max_tokens=50)
    loop.steps(3)
    add_many(loop, "b", 2, max_tokens=30)
    loop.finish(depth)
    assert loop.seen["slots taken"] > 0


def test_a_slot_is_taken_for_the_blocks_that_come_with_it():
    """The prefix that both share stays in use: it is neither freed nor taken again."""
    loop = make_loop(max_num_seqs=2, num_kv_blocks=1 + 10, max_model_len=40)
    loop.add(prompt(13), client="a", max_tokens=20)
    loop.add(prompt(21), client="a", max_tokens=19)  # shares three blocks
    loop.step()
    loop.add(prompt(25), client="b", max_tokens=3)
    while not loop.sequences[2].num_output_tokens:
        loop.step()
    assert loop.scheduler.stats.num_preemptions == 1 and loop.sequences[0].num_preemptions == 0
    loop.finish()


def test_a_slot_is_taken_beside_a_prefill_in_progress_from_a_sequence_that_decodes():
    """The least-served client's request goes before the next chunk, so that budget is left for it."""
    loop = make_loop(max_num_seqs=3, max_num_batched_tokens=12, max_model_len=200, num_kv_blocks=401)
    add_many(loop, "a", 2, max_tokens=100)
    loop.add(prompt(100, 5), client="a", max_tokens=50)
    loop.steps(3)
    add_many(loop, "b", 1, max_tokens=2)
    loop.steps(3)
    assert loop.sequences[3].is_finished and 0 < loop.sequences[2].num_computed_tokens < 100
    assert [s.num_preemptions for s in loop.sequences] == [0, 1, 0, 0]
    loop.finish()
    assert loop.seen["slots taken"] > 0


# ----------------------------------------------------------------------------------------------------------- the bound


def test_a_request_that_waits_for_files_is_passed_by_other_clients(monkeypatch):
    loop = make_loop(max_num_batched_tokens=64, max_num_seqs=7)
    cut = loop.manager.cut
    monkeypatch.setattr(loop.manager, "cut", lambda s, start, end: start if s.client == "a" else cut(s, start, end))
    loop.add(prompt(12), client="a")
    loop.add(prompt(10, 1), client="b")
    assert chunks(loop.step()) == {"1": (0, 10)}


ONE_LONG = {"max_long_partial_prefills": 1, "long_prefill_token_threshold": 8}
LIMITS = {
    "no limits": {},
    "one long prompt": {"max_num_partial_prefills": 3} | ONE_LONG,
    "one prompt": {"max_num_partial_prefills": 1} | ONE_LONG,
}
KINDS = {
    "full attention": [],
    "one window": [StateKind(window=8)],
    "two windows": [StateKind(window=12), StateKind(window=5)],
    "full attention and a window": [FULL, StateKind(window=8)],
    "states": [FULL, StateKind.record(1)],
}


def random_scheduler(rng, kinds, **limits):
    """With costs and a budget by predictions without sense, of tiny pools and few slots."""
    config = make_config(
        max_num_seqs=rng.choice((2, 5, 9)),
        max_num_batched_tokens=rng.choice((16, 64)),
        num_kv_blocks=rng.choice((17, 60)),
        client_weights=rng.choice((None, {"a": 3.0, "b": 0.5})),
        **limits,
    )
    manager = BlockManager(config.num_kv_blocks, 4)
    if kinds:
        least = [1 + kind.max_blocks(config.max_model_len, 4) for kind in kinds]
        counts = [
            config.num_kv_blocks if kind.is_full else n + rng.choice((0, 3, 30))
            for kind, n in zip(kinds, least, strict=True)
        ]
        manager = CacheGroups(kinds, counts, 4, max_model_len=config.max_model_len, max_chunk_tokens=8)
    costs = {"prefill_cost": rng.choice((0.01, 1.0)), "decode_cost": rng.choice((0.01, 3.0, 20.0))}
    budget = make_budget(0.01, RandomCosts(rng), max_num_batched_tokens=config.max_num_batched_tokens)
    return Scheduler(config, manager, rng.choice((None, budget)), ClientQueue(config, manager, **costs))


def run_backlogged(seed, num_steps, kinds, **limits):
    """Clients with requests of their own sizes, always several waiting; the largest gap over its bound after any step.

    Raises AssertionError for a step of nothing, or a prefill that gets no chunk in the steps that all others may take.
    """
    rng = random.Random(seed)
    scheduler = random_scheduler(rng, kinds, **limits)
    sizes = {client: (rng.randint(1, 50), rng.randint(1, 60)) for client in "abc"}
    smallest = min([1.0, *(scheduler.config.client_weights or {}).values()])
    most_steps = scheduler.config.max_model_len // scheduler.block_size * scheduler.config.max_num_seqs
    arrival, largest = 0, 0.0
    for _ in range(num_steps):
        for client, (longest, most) in sizes.items():
            while sum(s.client == client for s in scheduler.waiting) < 3:
                tokens = [rng.randrange(8) for _ in range(rng.randint(1, longest))]
                scheduler.add(make_sequence(tokens, arrival=arrival, client=client, max_tokens=rng.randint(1, most)))
                arrival += 1
        batch = scheduler.schedule()
        assert batch is not None
        for sequence in scheduler.running:
            is_prefill = sequence.num_known_tokens - sequence.num_computed_tokens > 1
            assert not is_prefill or batch.step_id - sequence.placed_in_step < most_steps, "starvation"
        scheduler.update(batch, [1] * len(batch.sampling))
        largest = max(largest, scheduler.waiting.gap)
    return largest / (2 * scheduler.waiting.bound / smallest)


@pytest.mark.costly
@pytest.mark.parametrize("seed", [*range(12), 197])
def test_the_counters_of_clients_that_always_wait_stay_within_the_bound(seed):
    assert 0 < run_backlogged(seed, 1900, []) <= 1.0


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_so_they_do_with_every_kind_of_cache_and_limit(kinds, limits):
    assert 0 < max(run_backlogged(seed, 300, kinds, **limits) for seed in range(5, 13)) <= 1.0


def test_a_client_whose_only_sequence_ran_undisturbed_has_saved_up_no_service_once_it_is_preempted():
    loop = make_loop(max_num_seqs=2, max_model_len=40, num_kv_blocks=41, enable_prefix_caching=False)
    loop.add(prompt(4), client="b", max_tokens=36)
    for number in range(60):
        loop.add(prompt(36, number % 7), client="a", max_tokens=1)
    loop.steps(35)
    assert served(loop)["a"] - served(loop)["b"] > 2 * loop.scheduler.waiting.bound
    loop.scheduler.preempt_all()
    assert loop.scheduler.waiting.gap == loop.scheduler.waiting.bound
    loop.finish()


def test_a_request_that_limits_hold_back_is_passed_by_other_clients_up_to_the_bound():
    """One long prompt runs: short ones pass another, but not for as long as it takes."""
    loop = make_loop(
        max_num_seqs=9, max_model_len=64, num_kv_blocks=200, max_num_batched_tokens=24, max_num_partial_prefills=2,
        max_long_partial_prefills=1, long_prefill_token_threshold=4, enable_prefix_caching=False,
    )  # fmt: skip
    loop.add(prompt(60), client="a", max_tokens=1)
    loop.add(prompt(60, 1), client="b", max_tokens=1)
    add_many(loop, "c", 40)
    loop.scheduler.waiting.bound = 30.0
    gaps = []
    while not loop.sequences[1].is_running:
        loop.step()
        gaps.append(loop.scheduler.waiting.gap)
    assert 30.0 < max(gaps) <= 60.0
    loop.finish()
