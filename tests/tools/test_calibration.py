"""Calibration: on disk, from a real engine, and in its commands."""

import json
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest

from nanovllm import EngineConfig
from nanovllm.build import build_engine
from nanovllm.fast.host.memory import take_memory
from nanovllm.features.costs.buckets import RowSizes
from nanovllm.features.costs.cost_model import IntakeCost, StepWork
from nanovllm.model_runner import ModelRunner
from nanovllm.observability.step_records import StepRecord
from nanovllm.scheduler import Scheduler
from nanovllm.tools.simulate.calibrate import (
    Group,
    _run,
    _samples,
    _StepLog,
    calibrate,
    head_starts,
    residuals,
    scenarios,
)
from nanovllm.tools.simulate.calibration import Calibration
from nanovllm.tools.simulate.cost_fit import StepSample
from tests.support import sweeps
from tests.support.command_line import assert_refused
from tests.support.public_options import make_config
from tests.support.refusals import invalid
from tests.support.tiny_models import MAX_POSITIONS, tiny_model

COST = replace(sweeps.COST, intake=IntakeCost(2e-4, 1e-6))
CALIBRATION = replace(
    sweeps.CALIBRATION, model="a-model", dtype="bfloat16", attention_backend="cpp", enforce_eager=False, block_size=64,
    max_position_embeddings=2048, kv_token_bytes=1000, kv_cache_bytes=100 * 64 * 1000, num_samples=12, cost_model=COST,
    hardware={"processor": "a processor"}, versions={"torch": "2"},
    residuals={"median": 0.01, "p90": 0.02, "max": 0.03},
)  # fmt: skip
SMALL = {"enforce_eager": True, "max_model_len": 128}
MODULE = "nanovllm.tools.simulate.calibrate"


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "calibration.json"
    CALIBRATION.save(path)
    return path


cpu_config = partial(make_config, device="cpu", block_size=16)


def steps_of(group, **options):
    """Records and work of each step of a tiny engine that runs one group of requests."""
    with closing(build_engine(tiny_model(), None, None, SMALL | options, clock=CountingClock())) as engine:
        engine.observers.append(log := _StepLog())
        _run(engine, (group,), seed=1)
        records, batches = zip(*log.steps, strict=True)
        return records, [StepWork.from_batch(batch, engine.config.block_size) for batch in batches]


# --------------------------------------------------------------------------------------------------------- on disk


def test_a_calibration_is_read_as_it_was_written(stored):
    assert Calibration.load(stored) == CALIBRATION


@pytest.mark.parametrize("name, value", {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"}.items())
def test_a_calibration_is_of_one_number_of_ranks_and_one_form_of_k_and_v(tmp_path, name, value):
    path = tmp_path / "other.json"
    replace(CALIBRATION, **{name: value}).save(path)
    assert getattr(Calibration.load(path).resolve(EngineConfig()), name) == value
    with invalid(f"of {name}=.*, and {name}={value!r} is asked for"):
        CALIBRATION.resolve(EngineConfig(**{name: value}))


def test_options_resolve_as_on_the_measured_engine():
    config = CALIBRATION.resolve(EngineConfig())
    assert config.dtype == "bfloat16" and config.device == "cpu" and config.attention_backend == "cpp"
    assert config.max_model_len == 2048 and config.block_size == 64 and config.num_kv_blocks == 100
    assert config.max_num_batched_tokens == 1024 and config.max_num_seqs == 64 and not config.overlap


def test_options_that_were_given_count():
    given = {"block_size": 32, "max_num_seqs": 7, "max_model_len": 500, "overlap": True}
    config = CALIBRATION.resolve(EngineConfig(**given))
    assert {name: getattr(config, name) for name in given} == given
    assert config.num_kv_blocks == 7 * 16 + 1  # 7 sequences of max_model_len; the measured pool would hold 200


def test_a_pool_that_is_too_small_is_refused_as_the_engine_refuses_it():
    with invalid("max_model_len is 2048"):
        CALIBRATION.resolve(EngineConfig(num_kv_blocks=10, max_model_len=2048))


NOT_MEASURED = {
    "dtype": "float32",
    "device": "cuda",
    "attention_backend": "sdpa",
    "enforce_eager": True,
    "cuda_graphs": True,
}


@pytest.mark.parametrize("name", NOT_MEASURED)
def test_what_was_not_measured_is_refused(name):
    value = NOT_MEASURED[name]
    with invalid(f"this calibration is of .*{name}={value!r}"):
        CALIBRATION.resolve(EngineConfig(**{name: value}))


def test_another_model_is_refused_and_the_same_is_not():
    with invalid("of model='a-model', and model='b-model'"):
        CALIBRATION.resolve(EngineConfig(), model="b-model")
    assert CALIBRATION.resolve(EngineConfig(), model="a-model") == CALIBRATION.resolve(EngineConfig())


@pytest.mark.parametrize(
    "old, new", {"{": "no JSON", '"format": 4': '"format": 3', '"knee"': '"knees"', '"dtype"': '"type"'}.items()
)
def test_a_file_that_is_no_calibration_is_refused(stored, old, new):
    for text in (stored.read_text().replace(old, new), "[]", "{}"):
        stored.write_text(text)
        with invalid("is no calibration"):
            Calibration.load(stored)


# ----------------------------------------------------------------------------------------------------- measurement


def test_scenarios_respect_the_limits_of_the_engine():
    plan = scenarios(cpu_config(max_model_len=300, max_num_seqs=8, num_kv_blocks=101))
    for groups in plan:
        assert sum(group.num_requests for group in groups) <= 8
        assert max(group.num_prompt_tokens + group.num_output_tokens for group in groups) <= 300
        assert sum(g.num_requests * -(-(g.num_prompt_tokens + g.num_output_tokens) // 16) for g in groups) <= 100
    assert {group.num_requests for groups in plan for group in groups} >= {1, 2, 4, 8}
    assert any(len(groups) == 2 for groups in plan)


def test_scenarios_with_a_shared_beginning_share_it():
    _, works = steps_of(Group(4, 100, 3, num_shared_tokens=64))
    steps = [(work.num_decodes, work.num_shared_context_tokens) for work in works]
    assert steps == [(0, 0), (4, 3 * 64), (4, 3 * 64)]


def test_shared_beginnings_are_among_the_scenarios():
    plan = scenarios(cpu_config(max_model_len=2048, max_num_seqs=16, num_kv_blocks=1001))
    shared = [group for groups in plan for group in groups if group.num_shared_tokens]
    assert {(group.num_requests, group.num_shared_tokens) for group in shared} == {
        (4, 512), (4, 1024), (16, 512)
    }  # fmt: skip


def test_residuals_are_relative_errors():
    work = StepWork(16, 16, 0, 0, 0, 0, 16)
    samples = [StepSample(work, 0.0, 0.0, seconds, 0.0) for seconds in (0.01, 0.0125, 0.02)]
    assert residuals(samples, COST) == pytest.approx({"median": 0.2, "p90": 0.2, "max": 0.5})


class CountingClock:
    """A clock that advances by a millisecond per call, so that every step takes the same time."""

    now = 0.0

    def __call__(self):
        self.now += 1e-3
        return self.now


@pytest.mark.full
def test_a_real_engine_is_measured_on_its_clock():
    calibration = calibrate(tiny_model(), repeats=1, clock=CountingClock(), max_num_seqs=4, **SMALL)
    assert calibration.model == "LlamaForCausalLM" and calibration.dtype == "float32" and calibration.device == "cpu"
    assert (calibration.attention_backend, calibration.enforce_eager) == ("sdpa", True)
    assert calibration.max_position_embeddings == MAX_POSITIONS
    assert calibration.num_samples >= 20
    cost = calibration.cost_model
    assert cost.launch_blocks
    # A launch and a wait are two calls of the clock; scheduling is one.
    assert cost.device.seconds(StepWork(8, 8, 0, 800, 0, 0, 8)) == pytest.approx(2e-3, rel=0.05)
    assert cost.schedule.seconds(4) == pytest.approx(1e-3, rel=0.05)
    # Adding a request is one call between those before and after it: the one for its arrival time.
    assert cost.intake.seconds(50) == pytest.approx(2e-3)
    assert calibration.residuals["max"] < 0.1
    config = calibration.resolve(EngineConfig(max_model_len=128, max_num_seqs=4))
    assert config.num_kv_blocks * config.block_size * calibration.kv_token_bytes == calibration.kv_cache_bytes


def test_an_engine_that_is_measured_keeps_its_one_scheduler(monkeypatch):
    schedulers = []

    monkeypatch.setattr(f"{MODULE}._run", lambda engine, *_, **__: schedulers.append(engine.scheduler) or [])
    monkeypatch.setattr(f"{MODULE}._samples", lambda *_, **__: next(iter(())))
    with pytest.raises(StopIteration):
        calibrate(tiny_model(), repeats=1, max_num_seqs=4, **SMALL)
    assert schedulers and all(type(each) is Scheduler and each is schedulers[0] for each in schedulers)


def test_of_a_device_of_its_own_the_launch_counts_apart():
    records, works = steps_of(Group(4, 20, 3), overlap=False)
    samples = list(_samples(records, works, launch_blocks=False))
    assert [sample.work.num_tokens for sample in samples] == [80, 4, 4]
    for sample, record in zip(samples, records, strict=True):
        # Launching takes two calls of the clock, and so does waiting.
        assert sample.launch_time == pytest.approx(1e-3)
        assert sample.launch_time + sample.device_time == pytest.approx(record.execute_time) == pytest.approx(2e-3)


def test_rows_that_are_rounded_up_count_and_memory_is_taken_first(monkeypatch):
    sizes, taken, fitted = RowSizes(4, 512), [], []
    monkeypatch.setattr(RowSizes, "from_config", lambda config: sizes if config.device == "cpu" else None)
    monkeypatch.setattr(f"{MODULE}.take_memory", lambda caches: taken.append(len(caches.of_layers)))
    monkeypatch.setattr(f"{MODULE}.fit", lambda *samples, **_: fitted.append(samples) or COST)
    calibrate(tiny_model(), repeats=1, max_num_seqs=4, **SMALL)
    [(samples, intakes)] = fitted
    assert taken == [tiny_model().config.num_hidden_layers]
    assert {sample.work.num_tokens for sample in samples} <= {*sizes.decodes, *sizes.mixed_rows}
    assert any(sample.work.num_tokens > sample.work.num_sequences > 2 for sample in samples)
    assert {8, 16, 64} <= {size for size, _ in intakes} and min(seconds for _, seconds in intakes) > 0.0


@pytest.mark.full
def test_shapes_of_a_device_of_its_own_are_captured_before_it_is_measured(monkeypatch):
    events, left = [], [True, True, False]
    monkeypatch.setattr(f"{MODULE}._launch_blocks", lambda engine: False)
    monkeypatch.setattr(ModelRunner, "capture_ahead", lambda runner: events.append("capture") or left.pop(0))
    monkeypatch.setattr(
        f"{MODULE}._run",
        lambda engine, scenario, *, seed: events.append((scenario, seed)) or _run(engine, scenario, seed=seed),
    )
    calibration = calibrate(tiny_model(), repeats=1, max_num_seqs=4, **SMALL)
    plan = [scenario for scenario, seed in events[: events.index("capture")]]
    measured = [(scenario, 1) for scenario in plan]
    overlapped = [(scenario, 0) for scenario in plan if scenario[0].num_output_tokens > 6 and len(scenario) == 1]
    assert events == [*((scenario, 0) for scenario in plan), *["capture"] * 3, *measured, *overlapped]
    assert len(plan) > 4 and len(overlapped) == 3
    assert calibration.cost_model.launch_blocks is False


def test_how_far_reads_are_apart_shows_the_head_start():
    def read_at(time, *, wait, update_time=0.25):
        return StepRecord(1, time + update_time, 0.0, 4, 4, 0, 0, 4, 0, 9, 0.1, 1.0, 1.0 + wait, update_time, ())

    decodes = [StepWork(4, 4, 0, context, 0, 0, 4) for context in (100, 104, 108, 112, 116, 120)]
    mixed = StepWork(64, 4, 1, 120, 0, 900, 5)
    works = [*decodes[:5], mixed, decodes[5]]
    reads = [(10.0, 0.5), (12.5, 0.5), (15.0, 0.0), (19.0, 0.5), (21.75, 0.5), (25.0, 0.5), (28.5, 0.5)]
    records = [read_at(time, wait=wait) for time, wait in reads]
    device_times = dict.fromkeys(decodes[:5], 2.0)
    # Of the steps from the second on: 2.5 apart; the host was late; it had been; 2.75 apart; a chunk; never measured.
    assert list(head_starts(records, works, device_times)) == [0.5, 0.75]


def test_decodes_are_measured_while_all_of_them_decode():
    config = cpu_config(max_model_len=2048, max_num_seqs=64, num_kv_blocks=2001)
    config = replace(config, max_num_batched_tokens=1024)
    (group,) = next(groups for groups in scenarios(config) if groups[0][:2] == (16, 256))
    _, works = steps_of(group, max_model_len=320, max_num_batched_tokens=1024)
    assert sum(work.num_decodes == 16 for work in works) >= 6


def test_taking_memory_leaves_zeros():
    with closing(build_engine(tiny_model(), None, None, SMALL)) as engine:
        caches = engine.model_runner.binding.caches
        for cache in caches.of_layers:
            cache.fill_(1.0)
        take_memory(caches)
        assert not any(cache.any() for cache in caches.of_layers)


def test_what_cannot_be_measured_is_refused():
    with invalid("leave overlap out"):
        calibrate(tiny_model(), overlap=True)
    with invalid("repeats is 0"):
        calibrate(tiny_model(), repeats=0)


# -------------------------------------------------------------------------------------------------------- commands


@pytest.mark.full
def test_calibrate_writes_what_simulate_reads(command, folder, tmp_path):
    path = tmp_path / "out.json"
    limits = "--enforce-eager --max-model-len 64 --max-num-seqs 2"
    status, out, _ = command(f"calibrate --model {folder} --output {path} --repeats 1 {limits}")
    assert status == 0 and "relative errors of the fit: median" in out
    workload = "random:requests=3,prompt=20,output=5"
    status, out, _ = command(f"simulate --calibration {path} --model {folder} --workload {workload}")
    assert status == 0 and "3 requests, 60 tokens in, 15 out" in out


ONE = "--workload random:requests=1,prompt=100,output=3"


@pytest.fixture
def simulate(command, stored):
    """Run `simulate` with the stored calibration; returns the command's result."""
    return lambda line: command(f"simulate --calibration {stored} {line}")


@pytest.fixture
def simulated(simulate):
    """Run it; returns its output and, with --json -, the object in it."""

    def simulated(line):
        status, out, err = simulate(line)
        assert status == 0, err
        return json.loads(out) if line.endswith("--json -") else out

    return simulated


def test_simulate_prints_a_table_of_what_follows_from_the_costs(simulated):
    # A prompt and 3 tokens: 0.3 ms to take it in, and 3 steps of 10 ms, each with 0.2 ms of the host's and 1 us for its
    # sequence, and 84 of the prompt's 100 tokens behind the knee.
    out = simulated(ONE)
    assert "1 requests, 100 tokens in, 3 out\n76 output tokens/s (" in out, out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith(("TTFT", "ITL"))] == ["18.9", "10.2"]


def test_simulate_writes_requests_and_steps_as_json(simulated):
    line = "--requests 4 --rate 5 --replicas 2 --routing least-loaded --max-num-seqs 1 --json -"
    result = simulated(line)
    assert result["model"] == "a-model" and result["replicas"] == 2 and result["config"]["max_num_seqs"] == 1
    assert [len(request["itls"]) for request in result["requests"]] == [63] * 4
    assert {request["replica"] for request in result["requests"]} == {0, 1}
    assert sum(len(records) for records in result["steps"]) == result["figures"]["steps"]
    assert all(record["num_running"] <= 1 for records in result["steps"] for record in records)


def test_simulate_counts_a_fronts_delay_in(simulated):
    alone, behind = (simulated(f"{ONE} {more} --json -") for more in ("", "--front-delay 2.5ms"))
    assert alone["front_delay"] == 0.0 and behind["front_delay"] == 0.0025
    for name, delay in (("ttft", 0.0025), ("itl", 0.0)):
        assert behind["figures"][name]["p50"] == pytest.approx(alone["figures"][name]["p50"] + delay)


def test_simulate_counts_the_requests_within_goals(simulate, simulated, tmp_path):
    path = tmp_path / "r.json"
    # As above: the first token after 18.9 ms, and gaps of 10.2 ms.
    kept = "--goal-ttft 19ms --goal-itl 10.5ms"
    for limits, share in {kept: 1.0, "--goal-ttft 18ms": 0.0, "--goal-itl 10ms": 0.0}.items():
        out = simulated(f"{ONE} {limits} --json {path}")
        goals = json.loads(path.read_text())["figures"]["goals"]
        assert goals["share"] == share and f"{share:.1%} of requests within " in out
    assert goals == {"ttft": None, "itl": 0.01, "share": 0.0, "requests_per_second": 0.0}
    assert "0.0% of requests within each ITL <= 10 ms: 0.00 requests/s" in out
    assert "goals" not in simulated(f"{ONE} --json -")["figures"]
    assert_refused(simulate(f"{ONE} --goal-ttft 0ms"), "'0ms' is not above 0")


def test_simulate_keeps_an_itl_goal(simulated):
    line = "--workload random:requests=20,prompt=300,output=30 --rate 10 --goal-itl 22ms"
    usual, goal = (simulated(f"{line} {more} --json -")["figures"] for more in ("", "--itl-goal 20ms"))
    assert usual["goals"]["share"] < 0.5 and goal["goals"]["share"] == 1.0
    assert goal["itl"]["max"] <= 0.022 < usual["itl"]["max"]


def test_simulate_replays_a_trace(simulated, tmp_path):
    trace = tmp_path / "turns.jsonl"
    prompt = list(range(130))
    trace.write_text(
        f'{{"prompt": {prompt}, "output_tokens": 2, "arrival": 1.5, "priority": 1}}\n'
        f'{{"prompt": {prompt}, "output_tokens": 1, "arrival": 0.5, "after": 0}}'
    )
    assert simulated(f"--trace {trace}").startswith("turns on 1 x a-model")
    first, second = simulated(f"--trace {trace} --json -")["requests"]
    assert first["arrival_time"] == 1.5 and second["arrival_time"] == first["finished_time"] + 0.5
    assert second["num_cached_tokens"] == 128


@pytest.mark.parametrize(
    "arguments, named",
    {
        "--rate 0": "the rate is 0.0",
        "--burst 2": "--burst is 2",
        "--requests 0": "0 is too small",
        "--workload random:shared=200": "above the shortest prompt (128)",
        "--workload random:prompt=3000": "request 0 has 3000 prompt tokens",
        "--workload W --trace x.jsonl": "2 are given: W and x.jsonl",
        "--replicas 0": "num_replicas is 0",
        "--front-delay 2": "'2' is not a time",
        "--routing best": "invalid choice: 'best'",
        "--model b-model": "model='b-model'",
        "--dtype float16": "dtype='float16'",
        "--max-queue 5": "max_queue is 5",
        "--block-size 17": "block_size is 17",
        "--trace /nowhere.jsonl": "/nowhere.jsonl",
    }.items(),
)
def test_simulate_refuses_in_one_line(simulate, arguments, named):
    assert_refused(simulate(arguments), named)


def test_a_trace_that_cannot_be_read_is_refused_with_its_line(simulate, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": [1], "output_tokens": 1}\n{"prompt": "text", "output_tokens": 1}\n')
    named = "line 2: the prompt is text, which needs a tokenizer; give --model"
    assert_refused(simulate(f"--trace {trace}"), named)


@pytest.mark.parametrize(
    "line, named",
    {
        "simulate": "--calibration",
        "simulate --calibration none.json": "none.json",
        "calibrate": "--output",
        "calibrate --output nowhere/x.json": "does not exist. Create it first",
    }.items(),
)
def test_commands_say_what_is_missing(command, line, named):
    assert_refused(command(line), named)
