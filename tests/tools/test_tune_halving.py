"""`nanovllm tune`: the ranking of settings, and successive halving."""

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.outputs import RequestMetrics
from nanovllm.tools.tune import report
from nanovllm.tools.tune.goals import Goal, RequestGoals
from nanovllm.tools.tune.halving import Round, Sweep, num_measurements, rounds_for
from nanovllm.tools.tune.ranking import ranked, summarise
from nanovllm.tools.tune.settings import Resolver
from tests.support.sweeps import ITL_40, TTFT_500, Machine, build_sweep, run, setting

# -------------------------------------------------------------------------------------------------------------- ranking


def budgets(summaries):
    return [summary.setting.values[0] for summary in summaries]


def ranking(runs, *goals):
    """Summaries of runs by their budgets, the best first."""
    return ranked(summarise(setting(budget), [[of]], goals) for budget, of in runs.items())


def test_the_most_tokens_among_those_that_keep_the_goals_come_first():
    runs = {256: run(500, itl=0.03), 512: run(600, itl=0.039), 1024: run(700, itl=0.041), 2048: run(800, itl=0.08)}
    order = ranking(runs, ITL_40)
    assert budgets(order) == [512, 256, 1024, 2048]
    assert [summary.keeps_goals for summary in order] == [True, True, False, False]
    assert order[-1].excess == pytest.approx(1.0)


def test_with_as_many_tokens_the_one_furthest_from_the_limits_comes_first():
    runs = {256: run(595, itl=0.02), 512: run(600, itl=0.03), 1024: run(580, itl=0.001)}
    for goals in ([ITL_40, TTFT_500], []):
        assert budgets(ranking(runs, *goals)) == [256, 512, 1024]  # 580 is 3.3 % below


def test_of_several_rates_the_fastest_that_keeps_the_goals_counts():
    points = [run(201, arrivals=1.0), run(200, arrivals=2.0, itl=0.039), run(300, arrivals=4.0, itl=0.05)]
    summary = summarise(setting(256), [points], [ITL_40])
    assert summary.best["rate"] == 2.0 and summary.tokens_per_second == 200 and summary.keeps_goals
    missed = summarise(setting(256), [points], [Goal("itl", "p99", 0.005)])
    assert missed.best["rate"] == 1.0 and not missed.keeps_goals
    assert missed.excess == pytest.approx(1.0)


def test_repeats_count_by_their_median():
    repeats = [[run(100, itl=0.5)], [run(300, itl=0.01)], [run(200, itl=0.02)]]
    summary = summarise(setting(256), repeats, [ITL_40])
    assert summary.tokens_per_second == 200 and summary.best["itl"]["p99"] == 0.02 and summary.keeps_goals


# -------------------------------------------------------------------------------------------------------------- halving


def test_shares_double_while_rivals_are_halved():
    assert rounds_for(16, 0.0) == [Round(0.125, 15), Round(0.25, 8), Round(0.5, 4), Round(1.0, 2)]
    assert rounds_for(16, 0.3) == [Round(0.3, 15), Round(0.3, 8), Round(0.5, 4), Round(1.0, 2)]
    assert rounds_for(4, 0.0) == [Round(1.0, 3)] and rounds_for(1, 1.0) == [Round(1.0, 0)]


@hypothesis.settings(deadline=None)
@given(st.permutations(range(20)), st.lists(st.sampled_from([0.01, 0.03, 0.05, 0.09]), min_size=20, max_size=20),
       st.sampled_from([0.0, 0.3, 1.0]))  # fmt: skip
def test_where_shares_rank_like_the_whole_halving_finds_the_best_setting(order, itls, smallest):
    runs = {setting(100 + n): run(100 * 1.05 ** order[n], itl=itls[n]) for n in range(20)}
    keeping = [of for of in runs if runs[of]["itl"]["p99"] <= 0.04]
    best = max(keeping, key=lambda of: runs[of]["output_tokens_per_second"], default=None)
    sweep, machine = build_sweep(runs, goals=[ITL_40], smallest=smallest), Machine(runs)
    sweep.run(machine)
    winner = sweep.finalists()[0]
    if best is None:
        assert not winner.keeps_goals and winner.best["itl"]["p99"] == min(itls)
    else:
        assert winner.setting == best
    assert len(machine.asked) == len(set(machine.asked)) == num_measurements(sweep.rounds, sweep.repeats)
    assert {of for of, share, _ in machine.asked if share == sweep.rounds[0].share} == set(runs)
    assert machine.asked[-1] == (winner.setting, 1.0, 2)  # the winner once more, at the end


def test_the_defaults_are_measured_in_every_round():
    runs = {setting(100 + n): run(100.0 * (1 + n)) for n in range(16)}
    machine = Machine(runs)
    build_sweep(runs).run(machine)
    first = next(iter(runs))
    assert [(share, repeat) for of, share, repeat in machine.asked if of == first] == [
        (0.125, 0), (0.25, 0), (0.5, 0), (1.0, 0), (1.0, 1)
    ]  # fmt: skip
    assert sum(share < 1.0 for _, share, _ in machine.asked) == 16 + 9 + 5


@pytest.mark.parametrize("slow", ["goal", "fixed"])
def test_the_best_goal_and_the_best_fixed_budget_both_become_finalists(slow):
    goals = [setting(1024, block_size=block, itl_goal=0.036) for block in (16, 32, 64, 128)]
    fixed = [setting(1024), *(setting(100 + n) for n in range(12))]
    fast = goals if slow == "fixed" else fixed
    runs = {of: run((400.0 if of in fast else 100.0) + n) for kind in (fixed, goals) for n, of in enumerate(kind)}
    sweep = build_sweep(runs)
    sweep.run(Machine(runs))
    finalists = {summary.setting for summary in sweep.finalists()}
    assert finalists >= {goals[-1], fixed[-1], fixed[0]} and len(finalists) <= 4


def test_a_setting_that_fails_never_ends_the_sweep():
    runs = {setting(100 + n): run(100.0 * (1 + n)) for n in range(8)}
    first, best = setting(100), setting(107)
    sweep, machine = build_sweep(runs), Machine(runs, failing=(first, best))
    sweep.run(machine)
    assert sweep.failures == {first: "out of memory", best: "out of memory"}
    assert sweep.finalists()[0].setting == setting(106)
    asked = [of for of, _, _ in machine.asked]
    assert asked.count(best) == asked.count(first) == 1
    everything = build_sweep(runs)
    everything.run(Machine(runs, failing=tuple(runs)))
    assert everything.finalists() == [] and len(everything.failures) == 8


def unshared(goals=(), *, repeats, **measured):
    """A sweep whose rounds all run the whole workload; `measured` has the repeats by budget."""
    runs = {setting(int(budget[1:])): of for budget, of in measured.items()}
    sweep = Sweep(list(runs), list(goals), rounds_for(len(runs), 1.0), repeats)
    sweep.run(lambda of, share, repeat: [runs[of][repeat]])
    return report.Outcome(sweep, Resolver("cpu", {}), {}, None, [])


def test_a_setting_that_was_given_up_cannot_win_by_one_lucky_run():
    others = {f"_{budget}": [run(1)] for budget in range(104, 116)}
    outcome = unshared(
        repeats=2, _100=[run(200)] * 2, _101=[run(500), run(100), run(300)], _102=[run(499), run(41)], _103=[run(400)],
        **others,
    )  # fmt: skip
    # The finalists' medians are 300, 270 and 200; 103 was eliminated with 400.
    assert len(outcome.sweep.results[setting(103)][1.0]) == 1
    assert budgets(outcome.sweep.finalists()) == [101, 102, 100]
    rows = [line.split() for line in report.table(outcome).splitlines()]
    assert [row[1] for row in rows if row[0] == "->"] == ["101"]


def test_the_advice_has_the_last_run_of_a_setting_beside_its_first():
    stays = report.advice(unshared(repeats=2, _100=[run(500), run(500), run(490)], _101=[run(450)] * 2))
    assert "first 500, last, after all others, 490" in stays
    # 100 leads until its last run, which lowers its median from 500 to 400.
    changes = report.advice(unshared(repeats=2, _100=[run(600), run(400), run(400)], _101=[run(449), run(451)]))
    assert "--max-num-batched-tokens 101" in changes and "measured 2 times: 449 to 451" in changes
    assert "after all others" not in changes


def test_a_request_without_a_token_keeps_no_goal():
    goals = RequestGoals(ttft=1.0)
    assert not goals.kept_by(RequestMetrics(0.0)) and goals.kept_by(RequestMetrics(0.0, first_token_time=0.5))
