"""Costs learned from steps: they converge, follow a machine that slows down, and forget single disturbances."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from nanovllm.features.costs.buckets import RowSizes
from nanovllm.features.costs.cost_model import DeviceCost, StepWork
from nanovllm.features.costs.learned_costs import (
    BUSY,
    DEFAULT_GOAL_S,
    GPU_GOAL_S,
    MAX_MISSES,
    MISS,
    LearnedCosts,
    RecursiveFit,
    relative_decode_cost,
    resolve_goal,
)
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.goals.auto_goal import follow_costs
from nanovllm.features.goals.step_budget import StepBudget
from tests.support.scheduling import Loop, make_scheduler

TRUE = DeviceCost(
    knee=32, fixed=10e-3, per_token_below=0.05e-3, per_token_above=0.2e-3, per_decode=0.05e-3, per_chunk=0.3e-3,
    per_context_token=4e-7, per_shared_context_token=1e-7, per_chunk_pair=5e-8, per_sample=0.03e-3, both=1e-3,
)  # fmt: skip


def random_work(r, *, with_chunk=True):
    count = r.randint(1, 30)
    work = StepWork(count, count, 0, sum(r.randint(1, 900) for _ in range(count)), 0, 0, count)
    return work.with_chunk(64 * r.randint(0, 10), r.randint(1, 400)) if with_chunk else work


def learn(fit, cost, num_steps, *, seed=0, noise=0.03):
    r = random.Random(seed)
    for _ in range(num_steps):
        work = random_work(r, with_chunk=r.random() < 0.5)
        fit.learn(work, cost.seconds(work) * r.uniform(1.0 - noise, 1.0 + noise))


def error(fit, cost):
    """Median relative error over works that were not learned from."""
    r = random.Random(99)
    misses = [abs(fit.seconds(work) / cost.seconds(work) - 1.0) for work in (random_work(r) for _ in range(101))]
    return sorted(misses)[50]


def scaled(cost, factor):
    return DeviceCost(cost.knee, *(factor * value for value in cost.coefficients))


def begun():
    works = [StepWork(0, 0, 0, 0, 0, 0, 0).with_chunk(0, size) for size in (16, 64, 256)]
    works += [StepWork(count, count, 0, 64 * count, 0, 0, count) for count in (1, 8)]
    return RecursiveFit.begin((work, TRUE.seconds(work)) for work in works)


def test_a_few_steps_begin_a_fit_and_some_more_make_it_precise():
    fit = begun()
    assert error(fit, TRUE) < 0.25
    learn(fit, TRUE, 200)
    assert error(fit, TRUE) < 0.03
    assert fit.error < 0.04


def test_a_fit_that_begins_at_the_truth_stays_there():
    fit = RecursiveFit(TRUE)
    assert fit.error is None
    learn(fit, TRUE, 300)
    assert error(fit, TRUE) < 0.02


@pytest.mark.parametrize("factor", [0.6, 1.5, 4.0])
def test_a_machine_that_slows_down_or_speeds_up_is_followed_within_a_hundred_steps(factor):
    fit = RecursiveFit(TRUE)
    learn(fit, TRUE, 100)
    learn(fit, scaled(TRUE, factor), 100, seed=1)
    assert error(fit, scaled(TRUE, factor)) < 0.05


def test_single_steps_that_take_many_times_as_long_are_counted_and_not_learned_from():
    fit, r = RecursiveFit(TRUE), random.Random(5)
    for number in range(300):
        work = random_work(r)
        fit.learn(work, TRUE.seconds(work) * (30.0 if number % 20 == 0 else 1.0))
    assert fit.num_misses == 15
    assert error(fit, TRUE) < 0.01


def test_misses_that_persist_are_learned_from_even_between_steps_of_another_kind():
    fit, r = RecursiveFit(replace(TRUE, per_token_above=8e-3)), random.Random(6)
    for _ in range(60):
        decodes, mixed = random_work(r, with_chunk=False), random_work(r)
        fit.learn(decodes, TRUE.seconds(decodes))
        fit.learn(mixed, TRUE.seconds(mixed))
    assert fit.num_misses > MAX_MISSES
    assert error(fit, TRUE) < 0.1


def test_no_coefficient_is_ever_negative_and_decodes_alone_leave_the_costs_of_prompts():
    fit = RecursiveFit(TRUE)
    learn(fit, TRUE, 100)
    before, r = fit.cost, random.Random(7)
    for _ in range(500):
        work = random_work(r, with_chunk=False)
        fit.learn(work, 1.3 * TRUE.seconds(work) * r.uniform(0.8, 1.2))
        assert min(fit.cost.coefficients) >= 0.0
    assert fit.cost.per_token_above == before.per_token_above
    assert fit.cost.per_chunk_pair == before.per_chunk_pair


def test_nearly_all_steps_keep_the_predicted_time_with_its_margin():
    fit, r = RecursiveFit(TRUE), random.Random(8)
    assert fit.margin == 1.0
    learn(fit, TRUE, 200, noise=0.0)
    assert fit.margin < 1.001
    learn(fit, TRUE, 800, noise=0.3)
    works = [random_work(r) for _ in range(1000)]
    kept = sum(TRUE.seconds(work) * r.uniform(0.7, 1.3) <= fit.margin * fit.seconds(work) for work in works)
    assert 0.96 < kept / len(works) < 1.0


def test_a_margin_is_bounded_and_follows_steps_with_chunks_alone():
    fit, r = RecursiveFit(TRUE), random.Random(9)
    for number in range(200):
        work = random_work(r, with_chunk=number % 2 == 0)
        fit.learn(work, TRUE.seconds(work) * (1.0 if number % 2 == 0 else 1.6 if number % 4 == 1 else 0.6))
    assert fit.margin < 1.25
    for number in range(100):
        work = random_work(r)
        fit.learn(work, fit.seconds(work) * (1.9 if number % 4 == 0 else 0.9))
    assert 1.8 < fit.margin < MISS


def test_a_budget_leaves_the_margin_to_steps_that_vary():
    costs = LearnedCosts(config(), cost=TRUE)
    before = costs.forecast((), 0)(100)
    learn(costs.fit, TRUE, 400, noise=0.3)
    assert costs.forecast((), 0)(100) == pytest.approx(
        costs.fit.margin * costs.fit.seconds(StepWork(0, 0, 0, 0, 0, 0, 0).with_chunk(0, 100))
    )
    assert costs.forecast((), 0)(100) > 1.15 * before


def test_a_step_of_no_time_teaches_nothing():
    fit = RecursiveFit(TRUE)
    fit.learn(random_work(random.Random(0)), 0.0)
    assert fit.cost == TRUE


# ------------------------------------------------------------------------------------------------------ costs, goals


def config(**options):
    return EngineConfig(**options).resolve_limits("cpu", 4096)


def test_a_forecast_is_the_cost_of_the_batch_that_comes_of_it():
    scheduler = make_scheduler(block_size=4)
    loop = Loop(scheduler)
    for number in range(5):
        loop.add([number] * 9, max_tokens=9)
    loop.step()
    loop.add([7] * 30, max_tokens=9)
    costs = LearnedCosts(replace(config(), block_size=16), cost=TRUE)
    batch = loop.step()
    forecast = costs.forecast(batch.entries[: batch.num_decodes], 0)
    assert forecast(30) == pytest.approx(TRUE.seconds(costs.work(batch)))
    assert [forecast(size) for size in range(1, 60)] == sorted(forecast(size) for size in range(1, 60))


def test_on_a_gpu_the_sizes_fill_captured_shapes():
    cuda = replace(config(max_num_seqs=64, max_num_batched_tokens=1024), device="cuda", attention_backend="flex")
    costs, rows = LearnedCosts(cuda), RowSizes.from_config(cuda)
    sizes = costs.sizes(9, 1015)
    assert list(sizes) == sorted(sizes)
    assert sizes[-1] == 1015
    padded, _ = rows.padded(9, 1)
    assert all(padded + size in rows.mixed_rows for size in sizes[:-1])
    assert costs.sizes(9, 1015) is sizes
    assert list(LearnedCosts(config()).sizes(9, 70)) == list(range(64, 71))


def test_a_step_takes_the_seconds_since_the_one_before_was_read_or_since_its_own_begin():
    costs, loop = LearnedCosts(config(), cost=TRUE), Loop(make_scheduler(block_size=4))
    loop.add([1] * 9, max_tokens=9)
    seen = []
    costs.fit.learn = lambda work, seconds: seen.append(round(seconds, 9))
    for start, end in ((1.0, 1.5), (1.2, 1.9), (3.0, 3.1)):  # the second begins while the first runs
        costs.step_ended(SimpleNamespace(start_time=start, time=end), loop.step())
    assert seen == [0.5, 0.4, 0.1]
    assert costs.last_time == 3.1


def test_a_goal_that_a_step_of_one_block_exceeds_is_refused_with_both_times():
    with pytest.raises(ValueError, match=r"itl_goal is 0.02 s, but a step of one block of 64 tokens takes 0.05 s"):
        resolve_goal(config(itl_goal=0.02), 0.05)
    assert resolve_goal(config(itl_goal=0.06), 0.05).itl_goal == 0.06


def test_a_goal_of_half_a_block_or_more_is_kept_with_a_warning(caplog):
    assert resolve_goal(config(itl_goal=0.03), 0.05).itl_goal == 0.03
    assert "itl_goal is 0.03 s, and a step of one block of 64 tokens took 0.05 s at start" in caplog.text


def test_a_generated_token_costs_its_part_of_a_full_batch_against_one_of_a_full_chunk():
    limits = replace(config(max_num_seqs=10, max_num_batched_tokens=1000, max_model_len=2000), num_kv_blocks=101)
    cost = DeviceCost(8, fixed=0.1, per_token_above=1e-3, per_token_below=1e-3, per_context_token=1e-5)
    decode, prompt = (0.1 + 10 * 1e-3 + 3200 * 1e-5) / 10, (0.1 + 1000 * 1e-3) / 1000
    assert relative_decode_cost(cost, limits) == pytest.approx(decode / prompt)
    assert relative_decode_cost(DeviceCost(8), limits) == 1.0
    assert relative_decode_cost(DeviceCost(8, per_decode=1.0), limits) == 100.0


def test_the_automatic_goal_fits_the_device_and_its_speed():
    assert resolve_goal(config(itl_goal="auto"), 1e-3).itl_goal == DEFAULT_GOAL_S
    assert resolve_goal(config(itl_goal="auto"), 1.0).itl_goal == 4.0
    gpu = replace(EngineConfig(itl_goal="auto").resolve_limits("cuda", 4096), device="cuda:1")
    assert (resolve_goal(gpu, 1e-3).itl_goal, resolve_goal(gpu, 1.0).itl_goal) == (GPU_GOAL_S, 4.0)
    assert EngineConfig(itl_goal=0.05).resolve_limits("cuda", 4096).itl_goal == 0.05


def test_prompts_that_wait_long_relax_the_automatic_goal_of_a_cpu():
    assert resolve_goal(config(itl_goal="auto"), 1e-3).ttft_goal == pytest.approx(5.0)
    assert resolve_goal(config(itl_goal="auto"), 1.0).ttft_goal == pytest.approx(200.0)
    assert resolve_goal(config(itl_goal="auto", ttft_goal=1.0), 1e-3).ttft_goal == 1.0
    assert resolve_goal(config(itl_goal=0.1), 1e-3).ttft_goal is None
    gpu = replace(EngineConfig(itl_goal="auto").resolve_limits("cuda", 4096), device="cuda:1")
    assert resolve_goal(gpu, 1e-3).ttft_goal is None


def follower(block_seconds, *, asked=None):
    """Budget of a start with such steps of one block, and its costs."""
    asked = config(itl_goal="auto") if asked is None else asked
    costs = LearnedCosts(asked, cost=DeviceCost(8, fixed=block_seconds))
    budget = StepBudget(resolve_goal(asked, block_seconds), costs, lambda: 0.0)
    follow_costs(asked, budget, costs)
    return budget, costs


def end_steps(costs, seconds, num_steps, start=0.0):
    """Steps of one block of a prompt, of so many seconds each."""
    loop = Loop(make_scheduler(max_num_batched_tokens=64, max_model_len=64, num_kv_blocks=4097))
    for number in range(num_steps):
        loop.add([number % 7] * 63, max_tokens=1)
        begin = start + number * seconds
        costs.step_ended(SimpleNamespace(start_time=begin, time=begin + seconds), loop.step())


def test_the_automatic_goal_of_a_busy_start_follows_the_steps_that_run():
    budget, costs = follower(0.9)
    assert (budget.itl_goal, budget.ttft_goal) == (3.6, 180.0)
    end_steps(costs, 0.04, 60)
    assert budget.itl_goal == budget.stats().itl_goal == pytest.approx(0.16, rel=0.05)
    assert budget.ttft_goal == pytest.approx(50 * budget.itl_goal)


def test_the_automatic_goal_stays_within_its_bounds():
    budget, costs = follower(0.9)
    end_steps(costs, 0.001, 60)
    assert budget.itl_goal == DEFAULT_GOAL_S
    end_steps(costs, 5.0, 60)
    assert budget.itl_goal == BUSY * DEFAULT_GOAL_S


def test_goals_that_were_set_do_not_follow():
    budget, costs = follower(0.04, asked=config(itl_goal=0.5, ttft_goal=9.0))
    end_steps(costs, 0.4, 60)
    assert (budget.itl_goal, budget.ttft_goal) == (0.5, 9.0)
    budget, costs = follower(0.04, asked=config(itl_goal="auto", ttft_goal=9.0))
    end_steps(costs, 0.06, 60)
    assert budget.itl_goal > 0.2 and budget.ttft_goal == 9.0


def test_the_log_tells_the_automatic_goal_at_start_and_a_changed_one_once_a_minute(info_log):
    _, costs = follower(0.9)
    end_steps(costs, 0.1, 60)
    end_steps(costs, 0.04, 60, start=10.0)
    told = [
        "itl_goal is 3600 ms, for steps with a block of 64 tokens that take 900 ms; it follows their costs",
        "itl_goal is 400 ms instead of 3600: steps with a block of 64 tokens take 100 ms now",
    ]
    assert info_log.messages == told
    end_steps(costs, 0.04, 1, start=70.0)
    told.append("itl_goal is 160 ms instead of 400: steps with a block of 64 tokens take 40 ms now")
    assert info_log.messages == told
