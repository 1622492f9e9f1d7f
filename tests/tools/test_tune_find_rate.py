"""`nanovllm tune --find-rate`: bisection between rates, and a whole command over simulated engines."""

import tomllib
from dataclasses import replace

import pytest

from nanovllm.tools.tune.find_rate import FoundRate, find_rate, rates_around
from tests.support.command_line import assert_refused
from tests.support.sweeps import CALIBRATION, ITL_40, result_in, run

pytestmark = pytest.mark.usefixtures("answering_hub")  # for the model "m"


def limit_at(limit, asked):
    """A machine that keeps the goal up to a rate; `asked` gets the rates that it was measured at."""

    def play(rate):
        asked.append(rate)
        return run(100.0, itl=0.03 if rate <= limit else 0.05, arrivals=rate)

    return play


@pytest.mark.parametrize("limit", [0.9, 3.1, 4.0, 5.9, 9.99])
def test_the_rate_is_the_highest_that_keeps_the_goals_within_the_tolerance(limit):
    asked = []
    play = limit_at(limit, asked)
    points = [play(rate) for rate in rates_around(10.0)]
    asked.clear()
    found = find_rate(play, [ITL_40], points, 10.0)
    assert found.rate <= limit < found.fails_at <= 1.05 * found.rate
    assert len(asked) <= 8 and len(set(asked)) == len(asked)


def test_no_rate_above_the_capacity_is_asked_for():
    asked = []
    play = limit_at(1e9, asked)
    points = [play(4.0), play(8.0)]
    assert find_rate(play, [ITL_40], points, 10.0) == FoundRate(10.0, None, 10.0)
    assert find_rate(limit_at(9.0, asked), [ITL_40], points, 10.0).fails_at <= 10.0 == max(asked)


def test_a_goal_that_no_rate_keeps_is_given_up():
    play = limit_at(0.0, [])
    found = find_rate(play, [ITL_40], [play(4.0), play(8.0)], 10.0)
    assert found.rate is None and found.fails_at == 0.125 and "no rate keeps the goals" in found.sentence


WORKLOAD = "--workload random:requests=60,prompt=100,output=6,vocab=512 --device cpu --model m"
NAMED = "--only-named --max-num-batched-tokens 128,1024 --repeats 1"


def test_a_command_finds_the_rate_and_writes_a_file_that_the_server_takes(engines, output, command, monkeypatch):
    fixed = f"--max-model-len 256 --kv-events tcp://*:5557 --engine-seed 7 --output {output}"
    line = f"tune {WORKLOAD} {NAMED} {fixed} --find-rate --ttft-p99 120ms"
    status, out, err = command(line)
    assert status == 0 and "highest rate that keeps the goals: " in out and "nanovllm serve --config" in err
    result = result_in(output)
    found, best = result["found_rate"], result["recommended"]["options"]
    assert found["rate"] < found["fails_at"] <= 1.05 * found["rate"] and found["fails_at"] <= found["capacity"]
    assert {options["max_num_batched_tokens"] for options in engines.options} == {128, 1024}
    assert {options["max_num_seqs"] for options in engines.options} == {64}  # not named: the default
    count = len(engines.options)
    assert command(line)[0] == 0 and len(engines.options) == count  # all of it is in the journal
    calls = []
    monkeypatch.setattr("nanovllm.serving.server.app.serve", lambda *arguments: calls.append(arguments) or 0)
    file = output / "serve.toml"
    assert command(f"serve --config {file} --port 9")[0] == 0
    ((model, _, settings, engine, _),) = calls
    assert model == "m" and settings.port == 9
    given = {"max_model_len": 256, "seed": 7, "kv_events": "tcp://*:5557"}
    assert engine.items() >= (given | {"max_num_batched_tokens": best["max_num_batched_tokens"]}).items()
    assert set(tomllib.loads(file.read_text())) >= {"model", "block_size", "max_num_seqs", "engine_seed"}


@pytest.mark.full
def test_the_goal_is_tried_near_the_rate_of_the_best_budget(engines, output, command):
    line = "--max-num-batched-tokens 64,1024 --max-num-seqs 64 --block-size 64 --repeats 1 --find-rate --itl-p99 22ms"
    workload = WORKLOAD.replace("prompt=100,output=6", "prompt=300,output=20")
    out = command(f"tune {workload} {line} --ttft-p99 300ms --output {output}")[1]
    made = result_in(output)
    answer = made["by_goal"]
    assert answer["sentence"] in out.splitlines() and answer["suffices"]
    assert f"keeps {made['found_rate']['rate']:g} requests/s" in answer["sentence"]


def test_with_a_calibration_the_rates_are_forecast_too_and_a_high_utilisation_is_said(engines, tmp_path, command):
    costs = tmp_path / "costs.json"
    replace(CALIBRATION, residuals={"p90": 0.07}).save(costs)
    line = f"--output {tmp_path / 't'} --find-rate --itl-p99 1s --simulate {costs} --candidates 2"
    out = command(f"tune {WORKLOAD} {NAMED} {line}")[1]
    assert "which is the capacity" in out and "forecasts are within 7% if the steps are" in out
    assert "the utilisation is" in out and "above 0.8" in out


@pytest.mark.parametrize(
    "arguments, named",
    [
        ("--find-rate", "--find-rate needs a goal"),
        ("--find-rate --itl-p99 1s --rate 3", "leave --rate out"),
        ("--only-named", "--only-named sweeps what is named, and nothing is"),
    ],
)
def test_flags_that_make_no_sense_are_refused(command, output, arguments, named):
    assert_refused(command(f"tune {WORKLOAD} --output {output} {arguments}"), named)
    assert not output.exists()
