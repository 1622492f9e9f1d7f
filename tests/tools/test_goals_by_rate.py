"""`bench/machines/goals_by_rate.py`: the capacity comes first, every setting plays the same requests, verdicts."""

import json
from dataclasses import replace

import pytest

from bench.machines.assumed_costs import NOISE, by_arithmetic, noisy
from bench.machines.goals_by_rate import Machine, Row, main, metrics_of, simulated, verdict
from nanovllm.features.costs.cost_model import DeviceCost, StepWork
from nanovllm.tools.bench.replay import Finished, Replay
from nanovllm.tools.tune.goals import RequestGoals
from nanovllm.tools.workloads.specs import build
from nanovllm.tools.workloads.workloads import random_requests
from tests.support.command_line import words
from tests.support.sweeps import CALIBRATION

LIMITS = "--itl-goal 20ms --goal-ttft 500ms --goal-itl 24ms"
SMALL = f"--traffic azure-conv --requests 40 --scale 0.1 --budgets 128 1024 {LIMITS}"


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"
    replace(CALIBRATION, max_position_embeddings=4096).save(path)
    return path


def test_settings_play_the_same_requests_at_shares_of_the_capacity(costs, tmp_path, capsys):
    out = tmp_path / "rows.json"
    main(words(f"--costs {costs} --shares 0.5 1 {SMALL} --out {out}"))
    lines = capsys.readouterr().out.splitlines()
    found = next(line for line in lines if line.startswith("capacity of azure-conv: "))
    rows = [Row(**row) for row in json.loads(out.read_text())]
    assert [(row.setting, row.share) for row in rows] == [
        (setting, share) for setting in ("goal 20 ms", "128", "1024") for share in (0.5, 1.0)
    ]
    capacity = rows[1].rate
    assert [row.rate for row in rows] == pytest.approx([row.share * capacity for row in rows])
    assert f" {capacity:.3g}/s, where budget " in found and "keeps 90%" in found
    assert all(str(row) in lines for row in rows)
    assert sum("against" in line for line in lines) == 2
    assert max(row.kept for row in rows if row.share == 0.5) > 0.9


def test_a_bound_on_minutes_leaves_plays_out_and_says_so(costs, capsys):
    main(words(f"--costs {costs} --capacity 1 --minutes 0 {SMALL}"))
    assert "simulated azure-conv 0.5 goal 20 ms: left out after 0 minutes" in capsys.readouterr().out


def row(setting, kept, tokens, itl=0.02):
    return Row("simulated", "azure-conv", 0.5, 2.0, setting, kept, {"p50": 0.1, "p99": 0.2}, {"p99": itl}, tokens)


@pytest.mark.parametrize(
    "goal, is_met",
    [
        (row("goal 20 ms", 0.9, 98.0, 0.022), True), (row("goal 20 ms", 0.88, 100.0), False),
        (row("goal 20 ms", 0.9, 97.0), False), (row("goal 20 ms", 0.9, 100.0, 0.023), False),
    ],
)  # fmt: skip
def test_the_goal_is_held_against_the_budget_that_keeps_most_requests(goal, is_met):
    (line,) = verdict([goal, row("512", 0.9, 100.0), row("8192", 0.1, 200.0)], 0.02)
    assert "against 512: " in line and line.endswith("met" if is_met else "MISSED")


def test_gaps_and_first_tokens_are_those_that_the_client_saw():
    (metrics,) = metrics_of(Replay(9.0, [1.0], [Finished(0, [1.5, 1.6, 1.6, 2.0])]))
    assert metrics.ttft == 0.5 and metrics.itls == pytest.approx([0.1, 0.0, 0.4])
    assert metrics.max_itl == pytest.approx(0.4) and metrics.finished_time == 2.0


def test_a_machine_plays_every_setting_on_an_engine_opened_for_it(folder):
    machine = Machine(str(folder), {"max_model_len": 128, "num_kv_blocks": 20}, idle=0.0)
    workload = random_requests(requests=3, prompt=20, output=4, vocab=256)
    for options in ({"itl_goal": 60.0}, {"max_num_batched_tokens": 256, "max_num_seqs": 8}):
        assert [len(metrics.itls) for metrics in machine(workload, options)] == [3, 3, 3]
    machine.end()


def test_costs_by_arithmetic_are_those_of_an_8b_model():
    cost = by_arithmetic("8b").cost_model.device
    assert cost.fixed == pytest.approx(4.1e-3, rel=0.1) and cost.per_token_above == pytest.approx(26e-6, rel=0.1)
    assert cost.per_context_token == pytest.approx(37e-9, rel=0.02)
    assert cost.per_chunk_pair == pytest.approx(1.5e-9, rel=0.1)


# --------------------------------------------------------------------------------------------------------------- noise

# About two cores of a Xeon with AMX and a model of 135M parameters.
TWO_CORES = DeviceCost(
    16, fixed=15e-3, per_token_below=0.1e-3, per_token_above=0.3e-3, per_decode=0.5e-3, per_chunk=2e-3,
    per_context_token=1e-6, per_shared_context_token=3e-7, per_chunk_pair=2.1e-7, per_sample=0.1e-3, both=1e-3,
)  # fmt: skip
MACHINE = replace(
    CALIBRATION, max_position_embeddings=8192, cost_model=replace(CALIBRATION.cost_model, device=TWO_CORES)
)


def test_steps_of_decodes_and_chunks_take_the_factors_of_a_noise():
    decodes = StepWork(4, 4, 0, 100, 0, 0, 4)
    both, cost = decodes.with_chunk(0, 64), noisy(MACHINE.cost_model, "quiet", seed=1).device
    factors = [cost.seconds(both) / TWO_CORES.seconds(both) for _ in range(2000)]
    assert sorted({round(factor, 6) for factor in factors}) == [1.0, 1.34]
    assert 0.08 < sum(factor > 1.1 for factor in factors) / len(factors) < 0.12
    assert cost.seconds(decodes) == TWO_CORES.seconds(decodes)
    shared = noisy(MACHINE.cost_model, "shared", seed=1).device
    factors = sorted(shared.seconds(both) / TWO_CORES.seconds(both) for _ in range(2000))
    assert factors[1000] == pytest.approx(1.0, abs=0.02) and factors[1900] == pytest.approx(1.55, abs=0.08)


@pytest.mark.costly
@pytest.mark.parametrize("noise", NOISE)
def test_beside_steps_that_vary_a_goal_keeps_as_many_requests_as_the_best_budget(noise):
    limits, play = RequestGoals(2.0, 0.12), simulated(MACHINE, noise)
    workloads = [build(f"azure-conv:requests=800,scale=0.25,rate=2.55,seed={seed}") for seed in (10, 11)]

    def kept(**options):
        played = [request for each in workloads for request in play(each, {"max_num_batched_tokens": 1024, **options})]
        return float(limits.figures(played, 1.0)["share"])

    best = max(kept(max_num_batched_tokens=budget) for budget in (128, 256, 512))
    assert kept(itl_goal=0.1) >= best - 0.01
