"""Routing policies, on cases with a known answer."""

import functools
from itertools import count
from types import SimpleNamespace

import pytest

from nanovllm.features.costs.cost_model import CostModel, DeviceCost, HostCost
from nanovllm.features.kv_events.block_events import Findable
from nanovllm.features.prompt_hashes import PromptHashes
from nanovllm.serving.replicas.prefix_index import PrefixIndex
from nanovllm.serving.replicas.routing import (
    BALANCE,
    LOAD_COST,
    MAX_IMBALANCE,
    OVERLOAD_FACTOR,
    OVERLOAD_MARGIN,
    POLICIES,
    least_loaded,
    prefix_aware,
    replica_load,
    round_robin,
)
from nanovllm.tools.simulate.indexed_replica import _Late
from nanovllm.tools.simulate.replica import Replica
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.tools.workloads.workloads import TimedRequest, Workload, chat, poisson
from tests.support.public_options import make_config, make_sequence

COST = CostModel(HostCost(), DeviceCost(knee=4, fixed=1.0, per_token_below=0.01, per_token_above=0.01), HostCost())
CONFIG = make_config(block_size=16, max_model_len=512, max_num_seqs=4, overlap=False)
numbers = count()


def replica(running=0, waiting=0, holds=None):
    """A replica with that many requests in each queue, and a prompt in its prefix cache."""
    made = Replica(CONFIG, COST, count(10_000))
    if holds is not None:
        serve(made, holds)
    for _ in range(running):
        made.add(sequence([1, 2, 3]), 0.0)
    if running:
        made.step()
    for _ in range(waiting):
        made.add(sequence([1, 2, 3]), 0.0)
    assert made.num_running == running and made.num_waiting == waiting
    return made


def serve(replica, prompt):
    """Let a replica compute a prompt, which its prefix cache holds then."""
    replica.add(sequence(prompt, max_tokens=1), 0.0)
    while replica.has_unfinished:
        replica.step()


def sequence(prompt, max_tokens=50):
    return make_sequence(prompt, arrival=next(numbers), max_model_len=512, max_tokens=max_tokens)


def chosen(route, replicas, prompt=None, times=1):
    return [route(PromptHashes(prompt or [5, 6, 7], 16), replicas) for _ in range(times)]


PROMPT = list(range(100, 200))
LONG = list(range(100, 500))  # 25 blocks: worth 20 of load


def test_a_request_that_waits_counts_as_four_that_run():
    assert replica_load(replica(running=4, waiting=2)) == 4 * 2 + 4


def test_round_robin_takes_turns_whatever_the_load():
    assert chosen(round_robin(), [replica(running=4, waiting=9), replica(), replica()], times=4) == [0, 1, 2, 0]


def test_least_loaded_takes_the_replica_with_the_least_load():
    # Loads 3, 5 (one waiting, one of which ran), 2.
    assert chosen(least_loaded(), [replica(running=3), replica(running=4, waiting=1), replica(running=2)]) == [2]


def test_least_loaded_takes_turns_among_equals():
    assert chosen(least_loaded(), [replica(), replica(running=1), replica()], times=3) == [0, 2, 2]


def test_prefix_aware_takes_turns_among_equals():
    route = prefix_aware()
    replicas = [replica() for _ in range(3)]
    assert [route([], replicas) for _ in range(6)] == [0, 1, 2] * 2


def test_prefix_aware_follows_the_longest_prefix():
    replicas = [replica(), replica(holds=PROMPT[:40]), replica(holds=PROMPT), replica(running=1, holds=PROMPT)]
    assert chosen(prefix_aware(), replicas, PROMPT) == [2]


def test_prefix_aware_prefers_a_longer_prefix_on_a_busier_replica():
    # Four blocks more, where three requests run.
    assert LOAD_COST == 1.0
    assert chosen(prefix_aware(), [replica(holds=PROMPT[:40]), replica(running=3, holds=PROMPT)], PROMPT) == [1]


def test_prefix_aware_computes_again_what_is_less_work_than_that_which_runs():
    replicas = [replica(holds=PROMPT[:64]), replica(running=4, holds=PROMPT)]
    assert chosen(prefix_aware(), replicas, PROMPT) == [0]


def test_conversations_behind_one_system_prompt_spread_and_each_returns():
    """The prompt itself is a reason to go where it is only as long as nothing else was computed there."""
    shared, route, replicas = PROMPT[:16], prefix_aware(), [replica(holds=PROMPT[:16]), *(replica() for _ in range(3))]
    began = []
    for number in range(40):
        prompt = [*shared, *range(1000 * number + 500, 1000 * number + 500 + 160)]
        began += chosen(route, replicas, prompt)
        serve(replicas[began[-1]], prompt)
    assert {began.count(index) for index in range(4)} <= {9, 10, 11}
    again = [*shared, *range(39_500, 39_660), 7]
    assert chosen(route, replicas, again) == [began[-1]]


def test_a_replica_that_was_away_does_not_get_every_request():
    """Its index is empty, and it was given less than the others: by so much that counts, and no more."""
    route, replicas = prefix_aware(), [replica(holds=PROMPT), replica()]
    for number in range(200):
        chosen(route, replicas[:1], list(range(1000 * number, 1000 * number + 320)))
    prompt = list(range(16 * 40))
    serve(replicas[0], prompt)
    assert MAX_IMBALANCE * BALANCE < 39
    assert chosen(route, replicas, [*prompt, 1]) == [0]
    assert chosen(route, replicas, list(range(5000, 5100))) == [1]


def test_prefix_aware_leaves_a_replica_that_is_overloaded():
    # The least load is 0, so the limit is the margin, 16: 4 running and 3 waiting; one more is 20.
    assert OVERLOAD_MARGIN == 16
    assert chosen(prefix_aware(), [replica(), replica(running=4, waiting=3, holds=LONG)], LONG) == [1]
    assert chosen(prefix_aware(), [replica(), replica(running=4, waiting=4, holds=LONG)], LONG) == [0]


def test_overload_is_relative_to_the_least_load():
    # With a least load of 4 the limit is 1.5 x 4 + 16 = 22, so 20 is not overloaded.
    assert OVERLOAD_FACTOR == 1.5
    assert chosen(prefix_aware(), [replica(running=4), replica(running=4, waiting=4, holds=LONG)], LONG) == [1]


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
def hit_rate(num_replicas, num_blocks, policy="prefix-aware", index_delay=None):
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


@pytest.mark.full
@pytest.mark.parametrize("index_delay", [0, 1, 10, 100])
def test_events_that_come_late_cost_few_hits_of_conversations(index_delay):
    alone = hit_rate(1, 2 * 2400)
    assert hit_rate(2, 2400, index_delay=index_delay) >= 0.95 * alone
    assert hit_rate(2, 2400, "round-robin") < 0.75 * alone


@pytest.mark.parametrize("index_delay", [0, 10**9])
def test_requests_of_one_burst_stay_together_before_any_event(index_delay):
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


def test_a_router_sees_events_as_many_steps_late_as_it_is_told():
    index = PrefixIndex()
    late = _Late(index, 2)
    late.add_events([Findable(b"h" * 16, None, b"", "")])
    seen = []
    for _ in range(4):
        late.step_ended(None, SimpleNamespace(sampling=[]))
        seen.append(len(index.held))
    assert seen == [0, 0, 1, 1]
