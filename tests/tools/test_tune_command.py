"""The command `nanovllm tune`: sweeps over simulated engines, and one over real ones."""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch

from nanovllm.cli import tune as tune_command
from nanovllm.cli.tune_question import build_question
from nanovllm.tools.tune.forecast import forecast
from tests.support.command_line import assert_refused, words
from tests.support.forked_processes import programs_are_forked
from tests.support.sweeps import CALIBRATION, result_in

WORKLOAD = "--workload random:requests=12,prompt=40,output=6,vocab=512"
BUDGETS = "--rate 20 --max-num-batched-tokens 256,1024 --max-num-seqs 16"

pytestmark = pytest.mark.usefixtures("answering_hub")  # for the model "m"


def question_of(line):
    parser = argparse.ArgumentParser()
    tune_command.add_tune_command(parser.add_subparsers())
    return build_question(parser.parse_args(words(f"tune --model m {line}")))


@pytest.fixture
def tune(output, command):
    """Run the command, with a workload and an output unless the line has others; returns its result."""
    return lambda line, workload=WORKLOAD: command(f"tune --model m --device cpu {workload} --output {output} {line}")


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"
    CALIBRATION.save(path)
    return f"--simulate {path}"


def test_a_sweep_ends_in_a_table_advice_json_and_a_picture(engines, tune, output):
    status, out, err = tune("--rate 5,20 --itl-p99 40ms --candidates 8")
    assert status == 0
    assert "(killed, possibly out of memory)" in out
    assert "\nrecommended: --max-num-batched-tokens " in out and "at 20 requests/s" in out
    assert err.count("tokens/s") >= 8 and "note: 8 of " in err
    result = result_in(output)
    assert len(result["settings"]) == 8 and result["question"]["workload"]["requests"] == 12
    assert result["question"]["workload"]["parameters"]["seed"] == 0
    assert (output / "curves.png").stat().st_size > 1000
    plays = [runs for of in result["settings"] for measured in of["measurements"] for runs in measured["runs"]]
    assert {runs["rate"] for runs in plays} == {5.0, 20.0}


def test_an_interrupted_sweep_goes_on_and_ends_as_if_it_had_not_been(engines, tune, output):
    line = "--rate 20 --candidates 8 --max-num-seqs 4,8"
    _, whole, _ = tune(f"{line} --output {output}2")
    all_of_them = list(engines.options)
    engines.options.clear()
    engines.interrupt_at = 5
    status, out, _ = tune(line)
    assert status == 130 and "interrupted; the measurements are in " in out and "the same command resumes" in out
    assert out.split()[0] == "budget" and out.count(" 0.667 ") == 4  # the table so far; one more failed
    assert not (output / "result.json").exists()
    engines.interrupt_at = None
    status, out, _ = tune(line)
    assert status == 0 and out == whole and engines.options == all_of_them
    engines.options.clear()
    assert tune(line)[1] == whole and engines.options == []  # complete now
    tune(f"{line} --retry")
    assert {of["max_num_batched_tokens"] for of in engines.options} == {512}


def test_other_goals_need_no_new_measurements_and_another_workload_is_another_question(engines, tune):
    line = f"{BUDGETS} --block-size 64"
    assert tune(line)[0] == 0
    measured = len(engines.options)
    status, out, _ = tune(f"{line} --ttft-mean 1ms")
    assert status == 1 and "no setting keeps the goals; the nearest" in out
    assert tune(f"{line} --arrivals poisson --seed 0 --dtype auto")[0] == 0
    for more, workload, named in (
        ("--seed 3", WORKLOAD, "arrivals.seed was 0, and is 3"),
        ("", "--workload random:requests=9", "workload.requests was 12, and is 9"),
    ):
        assert_refused(tune(f"{line} {more}", workload), f"another question & {named}")
    assert len(engines.options) == measured


def test_contradictions_are_reported_for_named_values(engines, tune):
    line = "--rate 20 --candidates 2"
    assert "refused" not in tune(line)[1]
    out = tune(f"{line} --max-num-batched-tokens 72,256 --max-num-seqs 16")[1]
    assert "budget 72, seqs 16, block 64: refused: max_num_batched_tokens is 72, but" in out
    assert "refused" not in tune(f"{line} --max-num-batched-tokens 72,256")[1]


def test_what_an_earlier_sweep_recommended_is_gone_when_another_begins(engines, tune, output):
    assert tune(f"{BUDGETS} --block-size 64")[0] == 0
    reported = {output / name for name in ("result.json", "curves.png")}
    assert reported <= set(output.iterdir())
    engines.interrupt_at = len(engines.options)
    assert tune(f"{BUDGETS} --block-size 32,64")[0] == 130
    assert not reported & set(output.iterdir())


@pytest.mark.full
def test_simulate_looks_at_many_and_measures_few(engines, tune, output, costs):
    status, out, err = tune(f"--rate 20 {costs} --candidates 3", "--workload random:requests=24,prompt=300,output=20")
    assert status == 0 and out.splitlines()[0].count("predicted") == 2 and "note: 3 of " in err
    # The measurements are simulated too.
    assert "off by at most 0% on tokens/s, and on ITL p99 by 0%" in out
    result = result_in(output)
    assert len(result["predicted"]) > 20 and len(result["settings"]) <= 3


@pytest.mark.full
def test_a_goal_is_forecast_and_measured_beside_fixed_budgets(engines, tune, output, costs):
    line = f"--rate 4,8 --itl-p99 22ms {costs} --max-num-batched-tokens 80,1024 --max-num-seqs 16 --block-size 64"
    status, out, _ = tune(f"{line} --candidates 4", "--workload random:requests=60,prompt=200-300,output=20")
    assert status == 0 and "goal" in out.splitlines()[0] + out.splitlines()[1]
    assert "\nno fixed budget needed: itl_goal 20ms keeps 8 requests/s, budget " in out
    made = result_in(output)
    assert made["by_goal"]["suffices"] and 0.02 in [of["options"].get("itl_goal") for of in made["predicted"]]
    assert {options.get("itl_goal") for options in engines.options} == {None, 0.02}
    if "itl_goal" in made["recommended"]["options"]:
        assert "itl_goal = 0.02" in (output / "serve.toml").read_text()


def test_a_share_of_the_gpus_memory_that_forecasts_do_not_know_is_reported(engines, tune, output, costs):
    line, note = f"--rate 20 {costs} --candidates 2", "forecasts assume the calibrated engine's KV cache"
    assert note not in tune(line)[2]
    line += " --gpu-memory-utilization 0.5"
    assert f"{note} of 819,200 bytes" in tune(f"{line} --output {output}2")[2]
    assert note not in tune(f"{line} --kv-cache-memory-bytes 409600 --output {output}3")[2]


def test_with_a_calibration_of_a_gpu_the_defaults_can_be_simulated(tmp_path):
    path = tmp_path / "costs.json"
    calibration = replace(
        CALIBRATION, device="cuda", attention_backend="flex", enforce_eager=False, cuda_graphs=True, block_size=128
    )
    calibration.save(path)
    question = question_of(f"--workload random:requests=2,prompt=40 --simulate {path}")
    made = forecast(calibration, question.candidates.settings[:5], question.workloads, {}, model="m")
    assert question.candidates.settings[0] in made.runs and not made.refused


def test_what_the_simulator_refuses_for_every_setting_is_reported_and_not_measured(engines, tune, costs):
    result = tune(f"{costs} --max-model-len 32")
    assert_refused(result, "no setting can be simulated: request 0 has 40 prompt tokens")
    assert engines.options == []


def test_all_at_once_is_said_to_say_nothing_about_first_tokens(engines, tune, output):
    line = "--ttft-p99 1s --candidates 8"
    err = tune(line)[2]
    assert "all requests arrive at the start" in err and "every setting runs the whole workload" in err
    assert "at the start" not in tune(f"{line} --rate 2")[2]
    few = tune(f"--candidates 8 --rate 2 --output {output}2", f"{WORKLOAD} --requests 8")[2]
    assert "too few requests for a meaningful share" in few and "a --rate" not in few


@pytest.mark.parametrize(
    "arguments, named",
    {
        "--ttft-p99 500": "'500' is not a time; give a number with its unit, such as 500ms or 0.5s",
        "--ttft-p99 -1s": "expected one argument",
        "--itl-mean 0ms": "'0ms' is not above 0",
        "--rate 0": "the rate is 0.0",
        "--rate 2,2": "names a rate twice",
        "--rate a": "'a' is not of the form FLOAT,FLOAT",
        "--burst 2": "--burst is 2",
        "--block-size 16,17": "block_size is 17",
        "--block-size 16,x": "'16,x' is not of the form INT,INT",
        "--max-num-batched-tokens 64 --max-num-seqs 64": "max_num_batched_tokens is 64, but",
        "--candidates 0": "0 is too small",
        "--simulate /nowhere.json": "/nowhere.json",
        "--trace x.jsonl": "this command takes one workload or trace",
        "--record-itl": "unrecognized arguments",
    }.items(),
)
def test_flags_that_make_no_sense_are_refused_before_anything_runs(engines, tune, output, arguments, named):
    assert_refused(tune(arguments), named)
    assert engines.options == [] and not output.exists()


def test_a_seed_that_draws_nothing_is_refused(engines, tune, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": [1], "output_tokens": 2}\n')
    for workload in ("--workload W", "--workload random:seed=3", f"--trace {trace}"):
        named = f"--seed is 5, but nothing is drawn with it: {workload.split()[1]} has"
        assert_refused(tune("--seed 5", workload), named)
        assert question_of(f"--seed 5 --rate 2 {workload}").workloads
    assert question_of("--seed 5 --workload random").workload.parameters["seed"] == 5


def test_real_traffic_keeps_its_bursts_at_every_rate(engines, tune):
    bursts = "--workload azure-code:requests=40"
    question = question_of(f"--rate 2,4 {bursts}")
    own = [request.arrival for request in question.workload.requests]
    for rate, workload in question.workloads.items():
        played = [request.arrival for request in workload.requests]
        assert played[-1] == pytest.approx(40 / rate)
        assert played == pytest.approx([arrival * played[-1] / own[-1] for arrival in own])
    assert question.identity["arrivals"] == {"arrivals": "own", "burst": None, "seed": None}
    drawn = question_of(f"--rate 2 --arrivals poisson {bursts}")
    assert drawn.identity["arrivals"] == {"arrivals": "poisson", "burst": None, "seed": 0}
    assert "arrive at once or in a few groups" in tune("--rate 2 --arrivals own")[2]
    assert "nothing is drawn with it" in tune("--rate 2 --seed 5", f"{bursts},seed=3")[2]


def test_a_workload_has_to_be_named_and_to_have_what_a_goal_is_about(engines, tune):
    assert "no workload: give --workload" in tune("", "")[2]
    assert_refused(tune("--itl-p99 1ms", "--workload random:requests=3,output=1"), "leave goals on ITL out")


def ended_after_one_measurement(line):
    """Run a command and terminate it; returns status, output and the processes that it had started."""
    arguments = [sys.executable, "-m", "nanovllm.cli", *words(line)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = []
    for line in process.stderr:
        if "tokens/s" in line:
            while not children:  # a measurement's process
                children = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.5)  # the process has started
            process.terminate()  # like Ctrl-C, but not sent to the child
            break
    out, _ = process.communicate()
    return process.returncode, out, children


@pytest.mark.full
@programs_are_forked()
def test_true_engines_are_measured_and_one_that_is_refused_is_a_row(folder, output, command, monkeypatch):
    line = f"tune --model {folder} --workload random:requests=4,prompt=40,output=6,vocab=512 --repeats 1 --warm-ups 0"
    line += " --max-num-batched-tokens 128 --max-num-seqs 4 --block-size 16,64 --enforce-eager --num-kv-blocks 8"
    line += f" --max-model-len 128 --device cpu --output {output}"
    status, out, children = ended_after_one_measurement(line)
    assert status == 130 and "interrupted; the measurements are in " in out and " all " in out
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    journal = output / "measurements.jsonl"
    before = journal.read_text().splitlines()
    assert len(before) == 2 and '"runs"' in before[1]
    # Threads are part of the environment, and must be those of the command's process above.
    monkeypatch.setattr(torch, "get_num_threads", lambda: json.loads(before[1])["runs"][0]["environment"]["threads"])
    status, out, _ = command(line)
    assert status == 0 and journal.read_text().splitlines()[:2] == before
    assert "block 16: failed: the KV cache of 8 blocks of 16 tokens" in out and out.count("failed") == 1
    assert "recommended: --max-num-batched-tokens 128 --max-num-seqs 4 --block-size 64" in out
    result = result_in(output)
    measured, failed = result["settings"]
    assert measured["config"]["block_size"] == 64 and measured["config"]["num_kv_blocks"] == 8
    assert [of["repeat"] for of in measured["measurements"]] == [0, 1] and failed["config"] is None
    # 160 prompt tokens with a budget of 128 take two steps, the rest of the answers five more.
    assert measured["measurements"][0]["runs"][0]["steps"] >= 7
    assert result["environment"]["nanovllm"] and result["environment"]["cores"]
