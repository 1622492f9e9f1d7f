"""Routing policies, on cases with a known answer."""

from __future__ import annotations

import functools
from itertools import count

import pytest

from nanovllm.block_hashes import PromptHashes
from nanovllm.replicas.routing import (
    OVERLOAD_FACTOR,
    OVERLOAD_MARGIN,
    POLICIES,
    Route,
    least_loaded,
    prefix_aware,
    replica_load,
    round_robin,
)
from nanovllm.tools.simulate.cost_model import CostModel, DeviceCost, HostCost
from nanovllm.tools.simulate.replica import Replica
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.tools.workloads.workloads import TimedRequest, Workload, chat, poisson
from tests.support.scheduling import make_config, make_sequence

COST = CostModel(HostCost(), DeviceCost(knee=4, fixed=1.0, per_token_below=0.01, per_token_above=0.01), HostCost())
CONFIG = make_config(block_size=16, max_model_len=512, max_num_seqs=4, overlap=False)
numbers = count()


def replica(running: int = 0, waiting: int = 0, holds: list[int] | None = None) -> Replica:
    """A replica with that many requests in each queue, and a prompt in its prefix cache."""
    made = Replica(CONFIG, COST, count(10_000))
    if holds is not None:
        made.add(sequence(holds, max_tokens=1))
        while made.has_unfinished:
            made.step()
    for _ in range(running):
        made.add(sequence([1, 2, 3]))
    if running:
        made.step()
    for _ in range(waiting):
        made.add(sequence([1, 2, 3]))
    assert (made.num_running, made.num_waiting) == (running, waiting)
    return made


def sequence(prompt: list[int], max_tokens: int = 50):
    return make_sequence(prompt, arrival=next(numbers), max_model_len=512, max_tokens=max_tokens)


def chosen(route: Route, replicas: list[Replica], prompt: list[int] | None = None, times: int = 1) -> list[int]:
    return [route(PromptHashes(prompt or [5, 6, 7], 16), replicas) for _ in range(times)]


PROMPT = list(range(100, 200))


def test_a_request_that_waits_counts_as_four_that_run():
    assert replica_load(replica(running=4, waiting=2)) == 4 * 2 + 4


def test_round_robin_takes_turns_whatever_the_load():
    assert chosen(round_robin(), [replica(running=4, waiting=9), replica(), replica()], times=4) == [0, 1, 2, 0]


def test_least_loaded_takes_the_replica_with_the_least_load():
    # Loads 3, 5 (one waiting, one of which ran), 2.
    assert chosen(least_loaded(), [replica(running=3), replica(running=4, waiting=1), replica(running=2)]) == [2]


def test_least_loaded_takes_turns_among_equals():
    assert chosen(least_loaded(), [replica(), replica(running=1), replica()], times=3) == [0, 2, 2]


def test_prefix_aware_follows_the_longest_prefix():
    replicas = [replica(), replica(holds=PROMPT[:40]), replica(holds=PROMPT), replica(running=1, holds=PROMPT)]
    assert chosen(prefix_aware(), replicas, PROMPT) == [2]


def test_prefix_aware_prefers_a_longer_prefix_on_a_busier_replica():
    assert chosen(prefix_aware(), [replica(holds=PROMPT[:40]), replica(running=4, holds=PROMPT)], PROMPT) == [1]


def test_prefix_aware_leaves_a_replica_that_is_overloaded():
    # The least load is 0, so the limit is the margin, 16: 4 running and 3 waiting; one more is 20.
    assert OVERLOAD_MARGIN == 16
    assert chosen(prefix_aware(), [replica(), replica(running=4, waiting=3, holds=PROMPT)], PROMPT) == [1]
    assert chosen(prefix_aware(), [replica(), replica(running=4, waiting=4, holds=PROMPT)], PROMPT) == [0]


def test_overload_is_relative_to_the_least_load():
    # With a least load of 4 the limit is 1.5 x 4 + 16 = 22, so 20 is not overloaded.
    assert OVERLOAD_FACTOR == 1.5
    assert chosen(prefix_aware(), [replica(running=4), replica(running=4, waiting=4, holds=PROMPT)], PROMPT) == [1]


def test_prefix_aware_without_a_prefix_balances():
    assert chosen(prefix_aware(), [replica(running=2), replica(running=1)]) == [1]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_replica_serves_all_whatever_the_policy(policy):
    assert chosen(POLICIES[policy](), [replica(running=4, waiting=30)], times=3) == [0, 0, 0]


def test_prefix_aware_keeps_the_requests_of_a_prefix_together_and_saves_its_computation():
    requests = []
    for number in range(60):
        shared = list(range(1000 * (number % 3), 1000 * (number % 3) + 64))
        requests.append(TimedRequest(10.0 * number, [*shared, 5000 + number], 2))
    workload = Workload("three prefixes", requests)
    figures = {}
    for policy, make in POLICIES.items():
        simulation = simulate(workload, CONFIG, COST, num_replicas=4, route=make())
        figures[policy] = simulation.figures()
        if policy == "prefix-aware":
            assert [len({simulation.replica_of[n] for n in range(prefix, 60, 3)}) for prefix in range(3)] == [1, 1, 1]
    # Each prefix is computed once, instead of once per replica.
    assert figures["prefix-aware"]["cached_tokens"] == (60 - 3) * 64
    assert figures["round-robin"]["cached_tokens"] == (60 - 3 * 4) * 64


# ------------------------------------------------------------------------------------------------------- stale indices


@functools.cache
def hit_rate(num_replicas: int, num_blocks: int, policy: str = "prefix-aware", index_delay: int | None = None) -> float:
    """Of conversations that need more blocks than all replicas have."""
    workload = poisson(chat(conversations=80, turns=5), 10.0)
    config = make_config(block_size=16, max_model_len=4096, max_num_seqs=64, num_kv_blocks=num_blocks + 1)
    device = DeviceCost(knee=4, fixed=2e-2, per_token_below=0.0, per_token_above=1e-5)
    cost_model = CostModel(HostCost(), device, HostCost())
    simulation = simulate(
        workload, config, cost_model, num_replicas=num_replicas, route=POLICIES[policy](), index_delay=index_delay
    )
    figures = simulation.figures()
    assert figures["evictions"] > 0
    return figures["hit_rate"]


@pytest.mark.parametrize("index_delay", [0, 1, 10, 100])
def test_events_that_come_late_cost_few_hits_of_conversations(index_delay: int):
    alone = hit_rate(1, 2 * 2400)
    assert hit_rate(2, 2400, index_delay=index_delay) >= 0.95 * alone
    assert hit_rate(2, 2400, "round-robin") < 0.75 * alone


@pytest.mark.parametrize("index_delay", [0, 10**9])
def test_requests_of_one_burst_stay_together_before_any_event(index_delay: int):
    prompts = [[*range(1000 * (number % 2), 1000 * (number % 2) + 64), number] for number in range(8)]
    workload = Workload("two prefixes at once", [TimedRequest(0.0, prompt, 2) for prompt in prompts])
    route = POLICIES["prefix-aware"]()
    simulation = simulate(workload, CONFIG, COST, num_replicas=2, route=route, index_delay=index_delay)
    assert simulation.replica_of == [0, 1] * 4


def test_without_prefix_caching_an_index_expects_nothing():
    config = make_config(block_size=16, max_model_len=512, max_num_seqs=4, enable_prefix_caching=False)
    workload = Workload("one prompt", [TimedRequest(0.0, PROMPT, 2) for _ in range(4)])
    simulation = simulate(workload, config, COST, num_replicas=2, route=POLICIES["prefix-aware"](), index_delay=0)
    assert simulation.replica_of == [0, 1, 0, 1]


def test_a_delay_below_zero_is_refused():
    with pytest.raises(ValueError, match="index_delay is -1; it must be at least 0 steps"):
        simulate(Workload("one", [TimedRequest(0.0, PROMPT, 2)]), CONFIG, COST, index_delay=-1)
