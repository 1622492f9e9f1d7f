"""`nanovllm tune`: advice, table, picture, and forecasts by the simulator."""

import json

import pytest

from nanovllm.tools.tune import plot, report, result
from nanovllm.tools.tune.find_rate import FoundRate
from nanovllm.tools.tune.forecast import forecast
from nanovllm.tools.tune.goal_answer import RivalAtRate, goal_answer, rival_of
from nanovllm.tools.tune.goals import Goal
from nanovllm.tools.tune.halving import Sweep, rounds_for
from nanovllm.tools.tune.ranking import summarise
from nanovllm.tools.tune.settings import Resolver, values_to_try
from nanovllm.tools.workloads.workloads import poisson, random_requests
from tests.support.sweeps import CALIBRATION, ITL_40, TTFT_500, Machine, as_played, build_sweep, run, setting

# --------------------------------------------------------------------------------------------------------------- report


def build_outcome(runs, *goals, failing=(), **about):
    sweep = build_sweep(runs, goals=goals)
    sweep.run(Machine(runs, failing=failing))
    question = {"model": "m", "workload": {"name": "w"}}
    return report.Outcome(sweep, Resolver("cpu", {}), question, {"torch": "2"}, **({"refused": []} | about))


def advised(runs, *goals):
    """Lines of the advice."""
    return report.advice(build_outcome(runs, *goals)).splitlines()


def test_the_advice_names_flags_and_numbers():
    runs = {setting(1024): run(500, itl=0.05), setting(256): run(400, itl=0.02), setting(512): run(450, itl=0.03)}
    lines = advised(runs, ITL_40, TTFT_500)
    assert lines[0] == "recommended: --max-num-batched-tokens 512 --max-num-seqs 16 --block-size 64"
    assert lines[1] == (
        "because: 450 tokens/s is the most of 2 settings measured on the whole workload that keep ITL p99 <= 40 ms "
        "(30 ms) and TTFT p99 <= 500 ms (100 ms); 10.0% less than the defaults (500 tokens/s), which miss the goals "
        "(ITL p99 +25%)"
    )
    alone = advised(runs, Goal("itl", "p99", 0.025))[1]
    assert "of 3 settings measured on the whole workload it alone keeps ITL p99 <= 25 ms (20 ms), with 400" in alone
    assert lines[2].startswith("measured 3 times: 450 to 450 tokens/s, 0.0% apart")


def test_a_busy_machine_is_reported_whichever_setting_showed_it():
    def measured(rates):
        left = {setting(1024): iter([500.0] * 9), setting(256): iter(rates)}
        sweep = Sweep(list(left), [], rounds_for(2, 0.0), 2)
        sweep.run(lambda of, share, repeat: [run(next(left[of]))])
        return report.advice(report.Outcome(sweep, Resolver("cpu", {}), {}, None, []))

    assert "repeated measurements of a setting differ by up to 25%" in measured([400.0, 320.0])
    assert "repeated measurements" not in measured([400.0, 390.0])


def test_where_nothing_keeps_the_goals_the_nearest_setting_is_named_with_what_it_misses():
    runs = {setting(1024): run(500, itl=0.08), setting(256): run(400, itl=0.05)}
    lines = advised(runs, ITL_40, TTFT_500)
    assert lines[0].startswith("no setting keeps the goals; the nearest: --max-num-batched-tokens 256")
    assert "ITL p99 is 50 ms, 25% above the goal of 40 ms" in lines[1]


def test_settings_with_as_many_tokens_are_called_equal():
    runs = {setting(1024): run(500, itl=0.03), setting(256): run(499, itl=0.02)}
    lines = advised(runs, ITL_40)
    assert "--max-num-batched-tokens 256" in lines[0]
    assert "the 2 with most tokens/s differ by less than 2%; it is furthest below the limits" in lines[1]
    arriving = {of: reported | {"rate": 4.0} for of, reported in runs.items()}
    assert "a higher --rate shows which" in report.advice(build_outcome(arriving, ITL_40))
    assert "--rate" not in report.advice(build_outcome(runs, ITL_40))


NEEDED, NONE = "a fixed budget keeps more: ", "no fixed budget needed: "


@pytest.mark.parametrize(
    "goal, budget, sentence",
    [
        (run(500, arrivals=9.0), run(510, arrivals=9.0),
         f"{NONE}itl_goal 36ms keeps 9 requests/s, budget 512 keeps 9 requests/s"),
        (run(500, arrivals=9.0), run(400, arrivals=8.0),
         f"{NONE}itl_goal 36ms keeps 9 requests/s, budget 512 keeps 8 requests/s"),
        (run(500, arrivals=8.0), run(400, arrivals=9.0),
         f"{NEEDED}itl_goal 36ms keeps 8 requests/s, budget 512 keeps 9 requests/s"),
        (run(996), run(1000), f"{NONE}itl_goal 36ms keeps 996 tokens/s, budget 512 keeps 1000 tokens/s"),
        (run(980), run(1000), f"{NEEDED}itl_goal 36ms keeps 980 tokens/s, budget 512 keeps 1000 tokens/s"),
        (run(500), run(900, itl=0.05), f"{NONE}itl_goal 36ms keeps 500 tokens/s, budget 512 misses the goals"),
        (run(500, itl=0.05), run(400), f"{NEEDED}itl_goal 36ms misses the goals, budget 512 keeps 400 tokens/s"),
        (run(500, itl=0.05), run(400, itl=0.06), None),
    ],
)  # fmt: skip
def test_the_advice_says_whether_a_fixed_budget_is_needed(goal, budget, sentence):
    outcome = build_outcome({setting(512): budget, setting(1024, itl_goal=0.036): goal}, ITL_40)
    lines = report.advice(outcome).splitlines()
    assert (sentence in lines) if sentence else not any("fixed budget" in line for line in lines)
    answer = result.as_json(outcome)["by_goal"]
    assert answer == (sentence and {"suffices": sentence.startswith("no "), "sentence": sentence})
    assert "goal" in report.table(outcome).splitlines()[1] and "36ms" in report.table(outcome)
    assert build_outcome({setting(512): budget}, ITL_40).by_goal is None


@pytest.mark.parametrize("leads", ["goal", "fixed"])
@pytest.mark.parametrize("is_kept", [True, False])
def test_with_a_found_rate_the_rival_counts_near_it(leads, is_kept):
    goal, fixed = setting(1024, itl_goal=0.036), setting(512)
    runs = {of: run(500 if (of is goal) == (leads == "goal") else 400, arrivals=9.0) for of in (fixed, goal)}
    outcome = build_outcome(runs, ITL_40)
    found = FoundRate(10.0, 10.4, 12.0)
    rival = rival_of(outcome.sweep.finalists(), found)
    assert rival == ((fixed, 10.1) if leads == "goal" else (goal, 9.9))
    answer = goal_answer(outcome.sweep.finalists(), found, RivalAtRate(*rival, is_kept))
    assert answer.suffices is (is_kept is (leads == "fixed"))
    first, second = ("itl_goal 36ms", "budget 512") if leads == "goal" else ("budget 512", "itl_goal 36ms")
    end = f"{'keeps' if is_kept else 'misses the goals at'} {rival[1]:g} requests/s"
    assert answer.sentence.endswith(f": {first} keeps 10 requests/s, {second} {end}")
    assert goal_answer(outcome.sweep.finalists(), FoundRate(None, 1.0, 12.0)) is None


def test_the_table_has_a_row_for_each_setting_those_that_failed_included():
    runs = {setting(1024 + 64 * n): run(500 - n, itl=0.05 if n == 1 else 0.01) for n in range(6)}
    failing = (setting(1088 + 64),)
    refused = [({"max_num_seqs": 9}, "too much")]
    lines = report.table(build_outcome(runs, ITL_40, failing=failing, refused=refused)).splitlines()
    assert lines[0] == "all: max_num_seqs 16, block_size 64"
    assert lines[1].split()[:4] == ["budget", "share", "rate", "tokens/s"]
    rows = [line.split() for line in lines[2:7]]
    assert rows[0][:5] == ["->", "1024", "all", "-", "500"] and lines[2].endswith("kept  (the defaults)")
    assert [row[0] for row in rows[1:]] == ["1216", "1280", "1344", "1088"]  # 1088: half of the workload
    assert rows[-1][1] == "0.5" and lines[6].endswith("ITL p99 +25%")
    assert lines[7].strip() == "budget 1152: failed: out of memory"
    assert lines[8].strip() == "seqs 9: refused: too much"
    assert report.table(build_outcome(runs, failing=tuple(runs))).count("failed: out of memory") == 6


def test_predictions_stand_beside_what_was_measured():
    runs = {setting(1024): run(500), setting(256): run(400)}
    goals = [ITL_40]
    predicted = {of: summarise(of, [[run(550, itl=0.012)]], goals) for of in runs}
    outcome = build_outcome(runs, *goals, predicted=predicted)
    lines = report.table(outcome).splitlines()
    assert [line.count("550") for line in lines[2:]] == [1, 1] and "12 / 12" in lines[2]
    assert "off by at most 38% on tokens/s, and on ITL p99 by 20%" in report.advice(outcome)


def test_the_result_holds_every_measurement_and_the_recommendation():
    runs = {setting(1024): run(500), setting(256): run(400)}
    reported = json.loads(json.dumps(result.as_json(build_outcome(runs, ITL_40, failing=(setting(256),)))))
    first, second = reported["settings"]
    assert [m["repeat"] for m in first["measurements"]] == [0, 1, 2] and first["config"] == {"a": 1}
    assert first["measurements"][0]["runs"][0]["output_tokens_per_second"] == 500
    assert second["failed"] == "out of memory" and second["measurements"] == []
    assert reported["recommended"]["options"]["max_num_batched_tokens"] == 1024 and reported["goals"] == [
        "ITL p99 <= 40 ms"
    ]
    assert reported["environment"] == {"torch": "2"} and reported["question"]["model"] == "m"


def test_the_picture_has_a_curve_for_each_setting_and_marks_the_chosen_point(tmp_path):
    rates = (1.0, 2.0)
    sweep = Sweep([setting(1024), setting(256)], [ITL_40], rounds_for(2, 0.0), 1)
    sweep.run(
        lambda of, share, repeat: [run(100 * rate, itl=of.values[0] * rate / 4e4, arrivals=rate) for rate in rates]
    )
    outcome = report.Outcome(sweep, Resolver("cpu", {}), {"model": "m", "workload": {"name": "w"}}, None, [])
    lines = {line.get_label(): line for line in plot.draw(outcome).axes[0].lines}
    assert list(lines["budget 1024 (the defaults)"].get_xdata()) == pytest.approx([25.6, 51.2])
    assert list(lines["budget 256"].get_xdata()) == pytest.approx([6.4, 12.8])
    assert list(lines["budget 256"].get_ydata()) == [100.0, 200.0]
    assert (*lines["recommended"].get_xdata(), *lines["recommended"].get_ydata()) == pytest.approx((12.8, 200.0))
    assert set(lines["ITL p99 <= 40 ms"].get_xdata()) == {40.0}
    plot.save_plot(outcome, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------------------------- forecast


def test_the_best_by_forecast_is_the_best_of_all_simulations():
    workload = poisson(random_requests(requests=24, prompt=(20, 300), output=(5, 40)), 12.0)
    values = values_to_try("cpu", {}, longest_prompt=300, most_at_once=24, wide=True) | {"block_size": [16, 64]}
    settings = Resolver("cpu", {}).candidates(values).settings[:40]
    made = forecast(CALIBRATION, settings, {12.0: workload}, {}, model="m")
    assert len(made.runs) == 40 and not made.refused
    goal = Goal("itl", "p99", sorted(runs[0]["itl"]["p99"] for runs in made.runs.values())[20])
    best = made.best(3, [goal], settings[0])
    assert best[0] == settings[0] and len(set(best)) == 3
    simulated = [as_played(workload, of.options) for of in settings]
    most = max(figures["output_tokens_per_second"] for figures in simulated if goal.excess(figures) <= 0.0)
    (chosen,) = made.runs[best[1]]
    assert goal.excess(chosen) <= 0.0
    assert chosen["output_tokens_per_second"] > 0.98 * most  # settings within 2 % rank by their tails


def test_of_settings_with_one_forecast_only_one_is_measured():
    workload = random_requests(requests=2, prompt=8, output=4)  # no setting makes a difference to it
    values = values_to_try("cpu", {}, longest_prompt=8, most_at_once=2, wide=True)
    settings = Resolver("cpu", {}).candidates(values).settings
    made = forecast(CALIBRATION, settings, {None: workload}, {}, model="m")
    assert len(settings) > 10 and made.best(5, [], settings[0]) == [settings[0]]


def test_a_forecast_names_what_the_simulator_refuses():
    workload = random_requests(requests=2, prompt=80, output=4)
    settings = [setting(256), setting(512)]
    made = forecast(CALIBRATION, settings, {None: workload}, {"max_model_len": 64}, model="m")
    assert not made.runs and all("more than max_model_len (64)" in why for why in made.refused.values())
    with pytest.raises(ValueError, match="of model='m', and model='other'"):
        forecast(CALIBRATION, settings, {None: workload}, {}, model="other")
