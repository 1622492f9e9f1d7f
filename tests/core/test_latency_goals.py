"""An engine with a latency goal: what it learns and tells, goals of requests, statistics, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from nanovllm import EngineConfig, SamplingParams, TraceWriter
from nanovllm.features.costs.learned_costs import relative_decode_cost
from nanovllm.features.engine_stats import BudgetStats
from nanovllm.features.goals import building
from nanovllm.features.goals.building import learned_budget
from nanovllm.features.shares.client_queue import DECODE_COST
from nanovllm.observability.timeline import STEP_VALUES, read_trace
from nanovllm.serving.replicas.pool_stats import goals_in_force
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.tools.workloads.workloads import TimedRequest, Workload
from tests.support import llms
from tests.support.llms import generate, greedy
from tests.support.refusals import invalid
from tests.support.sweeps import CALIBRATION
from tests.support.tiny_models import random_prompts, tiny_model

GREEDY = greedy(16, ignore_eos=True)


def open_llm(**options):
    return llms.open_llm(tiny_model(), **options)


def test_the_fit_learns_from_steps_and_the_statistics_tell():
    with open_llm(itl_goal=60.0) as llm:
        assert llm.stats().budget.error is None
        generate(llm, random_prompts(4, low=40, high=90), GREEDY)
        stats = llm.stats().budget
    assert (stats.itl_goal, stats.num_tokens) == (60.0, 1024)
    assert stats.error >= 0.0
    with open_llm() as llm:
        assert llm.stats().budget is None


def test_steps_tell_their_budget_and_predicted_time_and_lanes_their_client(tmp_path):
    records = []
    path = tmp_path / "out.json"
    with (
        TraceWriter(path) as trace,
        open_llm(itl_goal=60.0, trace=trace, on_step=records.append, max_num_batched_tokens=64, max_num_seqs=4) as llm,
    ):
        generate(llm, random_prompts(4, low=40, high=90), GREEDY, client="batch")
    assert {record.budget for record in records} == {64}
    assert all(record.predicted_time >= 0.0 for record in records)
    run = read_trace(path)
    steps = [dict(zip(STEP_VALUES, values, strict=True)) for _, _, *values in run.steps]
    assert [step["predicted_us"] for step in steps] == [round(1e6 * record.predicted_time) for record in records]
    assert {step["goal_us"] for step in steps} == {60_000_000}
    assert {lane.spans[0][3]["client"] for lane in run.lanes} == {"batch"}
    with open_llm(on_step=records.append) as llm:
        generate(llm, [[1, 2, 3]], GREEDY)
    assert (records[-1].budget, records[-1].predicted_time) == (1024, None)


def test_a_calibration_begins_the_predictions(tmp_path):
    CALIBRATION.save(tmp_path / "costs.json")
    with open_llm(itl_goal=60.0, step_costs=str(tmp_path / "costs.json")) as llm:
        costs = llm._engine.scheduler.budget._costs
        assert costs.fit.cost == CALIBRATION.cost_model.step_cost(overlap=False)
        assert costs.fit.cost.fixed == pytest.approx(0.01 + 2e-4)
    (tmp_path / "other.json").write_text("{}")
    with invalid(r"other.json', which is no calibration \(KeyError"):
        open_llm(itl_goal=60.0, step_costs=str(tmp_path / "other.json"))


def test_a_request_may_wait_longer_than_by_the_goals_in_force_and_not_less():
    """In force are those that "auto" has once the machine is faster, not those of the start."""
    with open_llm(itl_goal=60.0, ttft_goal=90.0) as llm:
        budget = llm._engine.scheduler.budget

        def refused(name, goal, in_force):
            with invalid(f"{name} of a request is {goal} s, and that of the engine is {in_force} s"):
                generate(llm, [[1, 2, 3]], SamplingParams(**{name: float(goal)}))

        generate(llm, [[1, 2, 3]], SamplingParams(max_tokens=2, itl_goal=60.0, ttft_goal=100.0))
        refused("itl_goal", 50, 60)
        refused("ttft_goal", 50, 90)
        budget.itl_goal, budget.ttft_goal = 30.0, 45.0
        generate(llm, [[1, 2, 3]], SamplingParams(max_tokens=2, itl_goal=30.0, ttft_goal=45.0))
        refused("itl_goal", 29, 30)
        budget.itl_goal = 90.0
        refused("itl_goal", 80, 90)
    with open_llm() as llm, invalid(r"is 50 s, and that of the engine is none; "):
        generate(llm, [[1, 2, 3]], SamplingParams(itl_goal=50.0))


def test_the_front_of_replicas_compares_with_the_goals_that_they_reported():
    report = SimpleNamespace(stats=SimpleNamespace(budget=BudgetStats(0.1, 5.0, 8, None, 0)))
    fresh = SimpleNamespace(stats=None)
    config = EngineConfig(itl_goal=0.4)
    assert goals_in_force([fresh, report], config).itl_goal == 0.1
    assert goals_in_force([fresh], config).itl_goal == 0.4


@pytest.mark.parametrize("name", ["itl_goal", "ttft_goal"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 1e-4])
def test_goals_are_times_of_at_least_a_millisecond(name, value):
    with invalid(rf"{name} is .*; it must be a finite number of at least 0.001"):
        EngineConfig(**({"itl_goal": 1.0} | {name: value}))
    with invalid(rf"{name} is .*; it must be a finite number of at least 0.001"):
        SamplingParams(**{name: value})


def test_a_goal_of_ttft_needs_one_of_itl_which_may_be_automatic():
    with invalid(r"ttft_goal is 1.0, but no itl_goal is set"):
        EngineConfig(ttft_goal=1.0)
    both = EngineConfig(itl_goal="auto", ttft_goal=1.0)
    assert [both.resolve_limits(device, 4096).ttft_goal for device in ("cpu", "cuda")] == [1.0, 1.0]


def test_costs_know_the_device_that_is_chosen_at_load(monkeypatch):
    devices = []
    make = building.LearnedCosts
    monkeypatch.setattr(
        building, "LearnedCosts", lambda config, *rest: devices.append(config.device) or make(config, *rest)
    )
    with open_llm(itl_goal="auto") as llm:
        assert (devices, llm._engine.config.device) == (["cpu"], "cpu")
        assert llm._engine.config.itl_goal >= 0.1


def test_costs_weigh_generated_tokens_where_they_are_known(tmp_path):
    CALIBRATION.save(tmp_path / "costs.json")
    known = CALIBRATION.cost_model.step_cost(overlap=False)
    for goal in (None, 60.0):
        with open_llm(itl_goal=goal, step_costs=str(tmp_path / "costs.json")) as llm:
            config, queue = llm._engine.config, llm._engine.scheduler.waiting
            assert (queue.prefill_cost, queue.decode_cost) == (1.0, relative_decode_cost(known, config))
            assert queue.decode_cost != DECODE_COST
    with open_llm() as llm:
        assert llm._engine.scheduler.waiting.decode_cost == DECODE_COST


@pytest.mark.parametrize("seconds, is_kept", [([0.2] * 3 + [0.04] * 99, True), ([0.2] * 999, False)])
def test_a_machine_that_is_busy_at_start_is_measured_again(seconds, is_kept):
    now, taken = [0.0], iter(seconds)
    with open_llm() as llm:
        runner = llm._engine.model_runner

        def execute(batch):
            now[0] += next(taken)

        def learned():
            config = replace(runner.config, itl_goal=0.05)
            return learned_budget(config, runner.binding, runner.pools, execute, lambda: now[0])[2].itl_goal

        if is_kept:
            assert learned() == 0.05
        else:
            with invalid(r"itl_goal is 0.05 s, but a step of one block of .* takes 0.2 s"):
                learned()


def test_a_start_takes_a_slow_step_of_each_kind_once():
    now, taken = [0.0], []
    with open_llm() as llm:
        runner = llm._engine.model_runner

        def execute(batch):
            taken.append(batch)
            now[0] += 2.0

        config = replace(runner.config, itl_goal="auto")
        assert learned_budget(config, runner.binding, runner.pools, execute, lambda: now[0])[2].itl_goal == 8.0
    assert len(taken) == 2


def test_a_goal_below_a_step_of_one_block_is_refused_at_load():
    with invalid(r"itl_goal is 0.001 s, but a step of one block of 256 tokens takes"):
        open_llm(itl_goal=1e-3, block_size=256, num_kv_blocks=9)


def test_a_simulation_keeps_the_goal_with_the_engines_own_budget():
    config = CALIBRATION.resolve(EngineConfig(itl_goal=0.02))
    requests = [TimedRequest(0.05 * number, [number] * 300, 30) for number in range(8)]
    goal, usual = (
        simulate(Workload("prompts", requests, {}), replace(config, itl_goal=each), CALIBRATION.cost_model)
        for each in (0.02, None)
    )
    worst = [max(metrics.max_itl for metrics in run.requests) for run in (goal, usual)]
    assert worst[0] <= 0.0202 < worst[1]
    assert (goal.stats[0].budget.itl_goal, usual.stats[0].budget) == (0.02, None)
