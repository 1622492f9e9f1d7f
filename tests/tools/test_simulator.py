"""The simulator: times computed by hand, the real engine's decisions, and no lost request."""

import random
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.features.costs.cost_model import CostModel, DeviceCost, HostCost, IntakeCost
from nanovllm.outputs import RequestMetrics
from nanovllm.tools.simulate.simulator import figures, report, simulate
from nanovllm.tools.workloads.workloads import TimedRequest, Workload
from tests.support.command_line import assert_refused, words
from tests.support.public_options import make_config
from tests.support.refusals import invalid
from tests.support.sweeps import CALIBRATION
from tests.support.tiny_models import VOCAB_SIZE, tiny_model

# Times in seconds that add up exactly in binary.
NOTHING = HostCost()
PER_TOKEN = CostModel(NOTHING, DeviceCost(knee=4, fixed=1.0, per_token_below=0.5, per_token_above=0.5), NOTHING)


def config(**limits):
    return make_config(**({"block_size": 16, "max_model_len": 512, "overlap": False} | limits))


def request(prompt, num_output_tokens, arrival=0.0, **options):
    """A prompt of that many tokens unique to it, or these tokens."""
    request.counter += 1000
    prompt_token_ids = list(range(request.counter, request.counter + prompt)) if isinstance(prompt, int) else prompt
    return TimedRequest(arrival, prompt_token_ids, num_output_tokens, **options)


request.counter = 0


def run(requests, cost=PER_TOKEN, **limits):
    return simulate(Workload("test", requests), config(**limits), cost, keep_steps=True)


def times(simulation):
    return [(m.ttft, m.itls) for m in simulation.requests]


def random_workload(count, *, seed=0, vocab_size=1000, rate=None):
    """Requests of which half share a prefix, all at once or with Poisson arrivals."""
    r = random.Random(seed)
    shared = r.choices(range(vocab_size), k=64)
    requests, now = [], 0.0
    for number in range(count):
        prompt = (shared if number % 2 else []) + r.choices(range(vocab_size), k=r.randint(1, 120))
        requests.append(TimedRequest(now, prompt, r.randint(1, 24)))
        now += r.expovariate(rate) if rate else 0.0
    return Workload(f"random-{count}", requests)


# ------------------------------------------------------------------------------------------------------- by hand


def steps_of_2(schedule=NOTHING, update=NOTHING, *more, **options):
    """Steps of two seconds on the device, whatever they compute."""
    return CostModel(schedule, DeviceCost(knee=4, fixed=2.0), update, *more, **options)


def test_one_request_takes_the_time_of_its_prompt_and_of_each_token():
    # Prompt of 10: 1 + 10 / 2 = 6 s; then each token 1 + 1 / 2 s.
    assert times(run([request(10, 3)])) == [(6.0, [1.5, 1.5])]


def test_a_request_that_arrives_in_a_step_waits_for_its_end():
    # Step 1 (10 tokens) ends at 6; the second came at 2 and joins: 1 decode + 4 tokens = 3.5 s, to 9.5; then 2 decodes.
    simulation = run([request(10, 3), request(4, 2, arrival=2.0)])
    assert times(simulation) == [(6.0, [3.5, 2.0]), (7.5, [2.0])]
    assert [m.scheduled_time for m in simulation.requests] == [0.0, 6.0]


def test_time_passes_while_nothing_is_there_to_do():
    simulation = run([request(2, 1, arrival=1.0), request(2, 1, arrival=100.0)])
    assert [m.finished_time for m in simulation.requests] == [3.0, 102.0]


def test_a_request_that_waits_for_another_arrives_so_long_after_its_end():
    simulation = run([request(2, 2), request(2, 1, arrival=5.0, after=0)])
    assert [m.arrival_time for m in simulation.requests] == [0.0, 2.0 + 1.5 + 5.0]


def test_a_step_costs_what_it_computes_and_not_what_it_finds():
    prompt = list(range(1, 41))
    simulation = run([request(prompt, 1), request(prompt, 1, arrival=50.0)])
    assert times(simulation) == [(21.0, []), (1.0 + (40 - 32) / 2, [])]
    assert [m.num_cached_tokens for m in simulation.requests] == [0, 32]


def test_decodes_cost_their_context_and_chunks_their_pairs():
    cost = CostModel(HostCost(), DeviceCost(knee=4, per_context_token=1.0, per_chunk_pair=100.0), HostCost())
    # Two chunks of a prompt of 48, 32 and 16 tokens long: pairs with 0 and 32 tokens before; the decode reads 49.
    simulation = run([request(48, 2)], cost, max_num_batched_tokens=32, long_prefill_token_threshold=32)
    first = 100.0 * (32 * 33 / 2 + 16 * 32 + 16 * 17 / 2)
    assert times(simulation) == [(first, [49.0])]


def times_alone(cost, num_tokens=3, **limits):
    """Time of the first token of a request alone, and of those behind it."""
    return times(run([request(8, num_tokens)], cost, **limits))[0]


def test_without_overlap_host_and_device_take_turns():
    cost = steps_of_2(HostCost(0.25, 0.25), HostCost(0.5, 0.5), launch_blocks=False)
    assert times_alone(cost) == (3.5, [3.5, 3.5])


def test_a_device_of_its_own_begins_once_a_step_is_launched():
    cost = steps_of_2(HostCost(0.5), HostCost(0.25), HostCost(0.5, 0.5), False)
    assert times_alone(cost) == (3.75, [3.75, 3.75])
    # Launched at 1.5, step 1 computes until 3.5; step 2, launched at 3.0, follows without a gap.
    assert times_alone(cost, overlap=True) == (3.75, [2.0, 2.0])
    record, *_ = run([request(8, 3)], cost).steps[0]
    assert record.schedule_time == 0.5 and record.execute_time == 3.0 and record.update_time == 0.25


def test_with_overlap_the_host_works_while_the_device_does():
    cost = steps_of_2(HostCost(0.5), HostCost(0.25), launch_blocks=False)
    # Launched at 0.5, steps compute without gaps until 2.5, 4.5, 6.5; each is read 0.25 s later.
    assert times_alone(cost, overlap=True) == (2.75, [2.0, 2.0])


def test_a_step_that_waits_for_the_device_has_no_head_start():
    cost = steps_of_2(HostCost(0.5), HostCost(0.25), HostCost(0.5), False, head_start=0.25)
    assert times_alone(cost) == (3.25, [3.25, 3.25])
    # Launched at 1.0, step 1 computes from 0.75 to 3.0, and those behind it take as long: until 5.25, 7.5.
    assert times_alone(cost, overlap=True) == (3.25, [2.25, 2.25])


def test_with_overlap_a_slow_host_is_what_counts():
    cost = steps_of_2(HostCost(4.0), HostCost(1.0), launch_blocks=False)
    # Schedules end at 4, 8; step 1 was ready at 6 and is read at 9; then each step is 4 + 1. The last one, launched at
    # 18, is waited for until 20 with nothing to schedule.
    assert times_alone(cost, num_tokens=4, overlap=True) == (9.0, [5.0, 5.0, 2.0])


def test_overlap_hides_nothing_where_the_host_computes_the_step_itself():
    cost = steps_of_2(HostCost(0.5), HostCost(0.25), launch_blocks=True)
    # Two steps are launched before the first is read.
    assert times_alone(cost, overlap=True) == (5.25, [2.75, 0.25])


def test_a_front_delays_requests_and_their_first_tokens():
    cost = steps_of_2()
    requests = [request(8, 2), request(8, 1, arrival=1.0), request(8, 1, arrival=0.5, after=1)]
    assert times(run(requests, cost)) == [(2.0, [2.0]), (3.0, []), (2.0, [])]
    # The second is with the engine at 1.5 and waits for the end of its step at 2.5; the third arrives at 5.0.
    simulation = run(requests, replace(cost, front_delay=0.5))
    assert times(simulation) == [(2.5, [2.0]), (3.5, []), (2.5, [])]
    assert [metrics.queue_time for metrics in simulation.requests] == [0.5, 1.5, 0.5]
    with invalid("front_delay is -1"):
        run(requests, replace(cost, front_delay=-1.0))


def test_requests_are_taken_in_one_after_the_other_between_steps():
    cost = steps_of_2(intake=IntakeCost(0.25, 0.125))
    simulation = run([request(2, 2), request(6, 2), request(2, 1, arrival=2.5)], cost)
    # The first two before the first step, 0.5 and 1.0; the third during the first step, 0.5 before the second.
    assert times(simulation) == [(3.5, [2.5]), (3.5, [2.5]), (3.5, [])]


def test_a_request_that_arrives_during_an_intake_waits_for_the_next_step():
    cost = steps_of_2(intake=IntakeCost(0.5))
    # An idle engine: the second request arrives while the first is taken in, and the first step ends at 2.5.
    simulation = run([request(2, 1), request(2, 1, arrival=0.25)], cost)
    assert [m.scheduled_time for m in simulation.requests] == [0.5, 3.0]
    # A busy one: the second is taken in from 2.5 to 3.0, the third arrives meanwhile, and the second step ends at 5.0.
    simulation = run([request(2, 3), request(2, 1, arrival=1.0), request(2, 1, arrival=2.75)], cost)
    assert [m.scheduled_time for m in simulation.requests] == [0.5, 3.0, 5.5]


def test_a_step_on_a_gpu_costs_what_it_is_rounded_up_to():
    on_gpu = {"device": "cuda", "attention_backend": "flex", "max_num_batched_tokens": 256}
    simulation = run([request(33, 2)], PER_TOKEN, **on_gpu)
    assert times(simulation) == [(1.0 + 0.5 * 64, [1.0 + 0.5 * 4])]


# ---------------------------------------------------------------------------------- the real engine's decisions

TINY = {"block_size": 16, "max_model_len": 512}
POOLS = {
    "roomy pool": {"num_kv_blocks": 129, "max_num_seqs": 16, "max_num_batched_tokens": 128},
    "tiny pool": {"num_kv_blocks": 25, "max_num_seqs": 16, "max_num_batched_tokens": 80, "max_model_len": 200},
}


def composition(record):
    """A record without its times; TTFTs and ITLs are replaced by their numbers."""
    firsts, gaps = (0.0,) * len(record.ttfts), ((0.0, sum(count for _, count in record.itls)),)
    times = dict.fromkeys(("time", "start_time", "schedule_time", "launch_time", "execute_time", "update_time"), 0.0)
    return replace(record, **times, ttfts=firsts, request_ttfts=firsts, itls=gaps)


@pytest.mark.costly
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_steps_are_the_real_engines(pool, overlap):
    workload = random_workload(24, vocab_size=VOCAB_SIZE)
    real = []
    with LLM(tiny_model(), enforce_eager=True, overlap=overlap, on_step=real.append, **(TINY | pool)) as llm:
        params = [
            SamplingParams(temperature=0.0, max_tokens=r.num_output_tokens, ignore_eos=True) for r in workload.requests
        ]
        outputs = llm.generate([r.prompt_token_ids for r in workload.requests], params, use_tqdm=False)
        resolved, stats = llm.config, llm.stats()
    simulation = simulate(workload, resolved, PER_TOKEN, keep_steps=True)
    assert [*map(composition, simulation.steps[0])] == [*map(composition, real)]
    assert [m.num_cached_tokens for m in simulation.requests] == [o.num_cached_tokens for o in outputs]
    assert [m.num_preemptions for m in simulation.requests] == [o.metrics.num_preemptions for o in outputs]
    assert simulation.stats == [replace(stats, kv_touched_bytes=0, kv_findable_bytes=0)]  # it has no memory
    assert stats.prefix_cache_hits > 0
    if pool is POOLS["tiny pool"]:
        assert stats.num_preemptions > 0


# --------------------------------------------------------------------------------------------------- conservation


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("launch_blocks", [False, True])
@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_every_request_gets_its_tokens_and_every_block_comes_back(pool, overlap, launch_blocks):
    workload = random_workload(60, rate=0.1)
    cost = replace(PER_TOKEN, launch_blocks=launch_blocks)
    simulation = simulate(workload, config(overlap=overlap, **pool), cost, num_replicas=3, keep_steps=True)
    for metrics, of_request in zip(simulation.requests, workload.requests, strict=True):
        assert metrics.num_output_tokens == of_request.num_output_tokens == len(metrics.itls) + 1
        assert metrics.num_prompt_tokens == len(of_request.prompt_token_ids)
        assert of_request.arrival == metrics.arrival_time <= metrics.scheduled_time < metrics.first_token_time
        assert min(metrics.itls, default=0.0) >= 0.0
        assert metrics.first_token_time + sum(metrics.itls) == pytest.approx(metrics.finished_time)
    assert [s.num_used_blocks for s in simulation.stats] == [0, 0, 0]
    assert sum(s.num_output_tokens for s in simulation.stats) == workload.num_output_tokens
    for records, stats in zip(simulation.steps, simulation.stats, strict=True):
        assert sum(r.num_decode_tokens + r.num_prefill_tokens for r in records) == stats.num_scheduled_tokens
        assert all(before.time <= after.time for before, after in pairwise(records))


def test_a_run_repeats_itself():
    workload = random_workload(40, rate=0.5)
    runs = [simulate(workload, config(**POOLS["tiny pool"]), PER_TOKEN, num_replicas=2) for _ in range(2)]
    assert runs[0] == runs[1]


def test_priorities_go_first():
    simulation = run([request(8, 2), request(8, 2, priority=-1)], max_num_seqs=1)
    assert simulation.requests[1].finished_time < simulation.requests[0].first_token_time


def test_salted_prompts_share_no_prefix():
    prompt = list(range(100))
    simulation = run([request(prompt, 1), request(prompt, 1, cache_salt="a"), request(prompt, 1)])
    assert [m.num_cached_tokens for m in simulation.requests] == [0, 0, 96]


# --------------------------------------------------------------------------------------------------------- figures


def test_figures_are_those_of_the_requests():
    simulation = run([request(10, 3), request(4, 2, arrival=2.0)])
    result = simulation.figures()
    assert result["seconds"] == 11.5 and result["num_output_tokens"] == 5 and result["steps"] == 3
    assert result["output_tokens_per_second"] == 5 / 11.5
    # Percentiles are interpolated: of 6 and 7.5, and of 2, 2 and 3.5.
    assert result["ttft"] == pytest.approx({"mean": 6.75, "p50": 6.75, "p90": 7.35, "p99": 7.485, "max": 7.5})
    assert result["itl"] == pytest.approx({"mean": 2.5, "p50": 2.0, "p90": 3.2, "p99": 3.47, "max": 3.5})
    assert result["cached_tokens"] == result["hit_rate"] == result["preemptions"] == 0
    assert "3 steps in 11.50 s" in report(result)


def test_requests_of_one_token_have_no_gaps_to_report():
    result = run([request(4, 1)]).figures()
    assert result["itl"] is None
    assert "between two tokens" not in report(result)


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "wrong, named",
    [
        (request([], 1), "request 1 has 0 prompt tokens"),
        (request(4, 0), "0 output tokens"),
        (request(500, 13), r"max_model_len \(512\)"),
        (request([-1], 1), "token id outside"),
        (request([2**24], 1), "token id outside"),
        (request(4, 1, arrival=-1.0), "arrives at -1.0"),
        (request(4, 1, arrival=float("nan")), "arrives at nan"),
        (request(4, 1, after=1), "waits for request 1"),
        (request(4, 1, after=-1), "waits for request -1"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_its_place(wrong, named):
    with invalid(named):
        run([request(4, 1), wrong])


def test_a_workload_without_requests_is_refused():
    with invalid("no requests"):
        run([])


@pytest.mark.parametrize("overlap", [False, True])
def test_simulated_drafts_are_right_as_often_as_in_the_recorded_run(overlap):
    """Where rows are free, a step of 7 drafts brings 8 tokens if all are right."""
    cost = CostModel(HostCost(), DeviceCost(knee=64, fixed=1.0), HostCost(), launch_blocks=False)
    workload, num_steps = Workload("test", [request(10, 41), request(10, 41)]), {}
    for acceptance in (0.0, 0.7, 1.0):
        drafted = replace(workload, draft_acceptance=acceptance)
        simulation = simulate(drafted, config(overlap=overlap, speculation="suffix"), cost)
        [stats] = simulation.stats
        assert all(m.num_output_tokens == 41 and len(m.itls) == 40 for m in simulation.requests)
        num_steps[acceptance] = stats.num_steps
        if acceptance != 0.7:
            drafts = stats.speculation
            assert drafts.num_accepted_tokens == acceptance * drafts.num_draft_tokens
    assert num_steps[1.0] <= 8 < num_steps[0.7] < 30 < num_steps[0.0]


def test_a_simulation_of_speculation_needs_its_acceptance():
    with invalid("speculation is 'suffix', but a simulation has no text"):
        run([request(10, 3)], speculation="suffix")
    with invalid(r"draft_acceptance is 0\.5, but without speculation"):
        simulate(Workload("test", [request(10, 3)], draft_acceptance=0.5), config(), PER_TOKEN)


@pytest.mark.parametrize("option", words("--gpu-memory-utilization=0.5 --record-itl --engine-seed=1 --revision=a"))
def test_the_command_takes_no_option_that_a_replay_ignores(option, command):
    assert_refused(command(f"simulate --calibration costs.json {option}"), f"unrecognized arguments: {option}")


@pytest.mark.parametrize("rate, is_high", [("1", False), ("1000", True)])
def test_the_command_says_how_far_it_may_be_off(tmp_path, command, rate, is_high):
    path = tmp_path / "costs.json"
    replace(CALIBRATION, residuals={"p90": 0.05}).save(path)
    workload = f"--workload random:requests=60,prompt=100,output=6 --rate {rate} --replicas 2"
    status, out, err = command(f"simulate --calibration {path} {workload}")
    said = r"(\d+) output tokens/s \(± 5\.0%, the p90 of the fit: (\d+) to (\d+)\);.*utilisation (\S+)"
    tokens, low, high, utilisation = map(float, re.search(said, out).groups())
    assert status == 0
    assert low == pytest.approx(0.95 * tokens, abs=1) and high == pytest.approx(1.05 * tokens, abs=1)
    assert (utilisation > 0.8) is is_high is ("measure before you rely on them" in err)


def test_a_rate_counts_from_the_first_arrival():
    metrics = RequestMetrics(5.0, first_token_time=6.0, last_token_time=9.0, finished_time=9.0, num_output_tokens=8)
    found = figures([metrics], [])
    assert found["seconds"] == 4.0 and found["output_tokens_per_second"] == 2.0
