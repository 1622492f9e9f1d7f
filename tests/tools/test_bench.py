"""`nanovllm bench`: requests are sent when due, figures add up, two results compare."""

import importlib.util
import json
import re
import time
from contextlib import closing

import pytest

from nanovllm.observability import timeline
from nanovllm.requests import InputProcessor
from nanovllm.tools.bench import processes
from nanovllm.tools.bench.engines import check_arrivals, load_engine
from nanovllm.tools.bench.processes import EngineSpec
from nanovllm.tools.bench.replay import Finished, figures, replay
from nanovllm.tools.bench.step_profile import TIMED, StepProfile
from nanovllm.tools.bench.worker import measure, run_job
from nanovllm.tools.workloads.files import read_trace, write_trace
from nanovllm.tools.workloads.workloads import TimedRequest, Workload, chat, random_requests
from tests.support.command_line import assert_refused
from tests.support.forked_processes import programs_are_forked
from tests.support.refusals import invalid

ENGINE = {"block_size": 16, "num_kv_blocks": 129, "max_model_len": 512}
FLAGS = "--block-size 16 --num-kv-blocks 129 --max-model-len 512"
SMALL = "random:requests=5,prompt=40,shared=32,output=6,vocab=512"


# ------------------------------------------------------------------------------------------------------------- replay


class Clock:
    def __init__(self):
        self.now = 1000.0
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


class OneTokenASecond:
    """An engine with its own clock: a step takes a second and gives every request a token."""

    takes_arrivals = True

    def __init__(self, clock):
        self.clock = clock
        self.added = {}
        self.running = {}

    def add(self, number, request):
        self.added[number] = self.clock.now - 1000.0
        self.running[number] = request, []

    def step(self):
        self.clock.now += 1.0
        for _, times in self.running.values():
            times.append(self.clock.now)
        ended = [number for number, (request, times) in self.running.items() if len(times) == request.num_output_tokens]
        return [Finished(number, self.running.pop(number)[1]) for number in ended]


def timed(arrival, num_output_tokens, **options):
    return TimedRequest(arrival, [1], num_output_tokens, **options)


def play_on_a_fake_clock(requests):
    clock = Clock()
    player = OneTokenASecond(clock)
    workload = Workload("test", requests)
    played = replay(player, workload, clock=lambda: clock.now, sleep=clock.sleep)
    return clock, player, played, figures(workload, played)


def test_a_request_is_handed_over_when_it_is_due_and_not_before():
    requests = [timed(0.0, 1), timed(5.25, 2), timed(5.5, 1)]
    clock, player, played, reported = play_on_a_fake_clock(requests)
    assert player.added == {0: 0.0, 1: 5.25, 2: 6.25}  # the third is due during a step
    assert clock.slept == [4.25]
    assert [arrival - 1000.0 for arrival in played.arrivals] == [0.0, 5.25, 5.5]
    assert reported["seconds"] == 7.25 and reported["output_tokens_per_second"] == 4 / 7.25
    # The third waited for a step's end: its first token came 1.75 s after it was due.
    assert reported["ttft"]["max"] == 1.75 and reported["ttft"]["p50"] == 1.0
    assert reported["itl"] == {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}


def test_a_turn_comes_so_long_after_the_end_of_the_last():
    requests = [timed(1.0, 3), timed(2.5, 1, after=0), timed(0.0, 1, after=1), timed(0.5, 1, after=0)]
    _, player, _, _ = play_on_a_fake_clock(requests)
    assert player.added == {0: 1.0, 3: 1.0 + 3 + 0.5, 1: 1.0 + 3 + 2.5, 2: 6.5 + 1.0}


def test_an_output_of_another_length_is_no_result():
    workload = random_requests(requests=1, prompt=1, output=3)
    _, _, played, _ = play_on_a_fake_clock(workload.requests)
    played.finished[0].token_times.pop()
    with pytest.raises(RuntimeError, match="request 0 got 2 tokens instead of 3"):
        figures(workload, played)


# ------------------------------------------------------------------------------------------------------ this engine


def test_turns_of_a_chat_find_their_last_one_in_the_prefix_cache_and_each_token_has_its_time(folder):
    workload = chat(conversations=2, turns=3, system=0, user=24, answer=12, think=0.0, vocab=512)
    with closing(load_engine("nanovllm", str(folder), ENGINE, 512)) as player:
        for _ in range(2):
            player.prepare(workload)
            played = replay(player, workload)
            for request, arrival, ended in zip(workload.requests, played.arrivals, played.finished, strict=True):
                # At least the whole blocks of the last prompt; the answer in the prompt is drawn, not the engine's.
                last = 0 if request.after is None else len(workload.requests[request.after].prompt_token_ids)
                assert ended.num_cached_tokens == last // 16 * 16
                times = [arrival, *ended.token_times]
                assert len(times) == 13 and times == sorted(times) and times[-1] - arrival < played.seconds
            assert sum(ended.num_cached_tokens for ended in played.finished) == 2 * (16 + 48)
    with invalid("record_itl is False"):
        load_engine("nanovllm", str(folder), ENGINE | {"record_itl": False}, 512)


def build_job(folder, workload, path, **changes):
    write_trace(workload, path)
    job = {"engine": "nanovllm", "label": "nanovllm", "model": str(folder), "options": ENGINE, "traces": [str(path)],
           "warm_ups": 1, "profile": False, "record": None}  # fmt: skip
    return job | changes


def test_a_job_counts_steps_tokens_and_hits_of_the_measured_run_only(folder, tmp_path):
    workload = random_requests(requests=5, prompt=40, shared=32, output=6, vocab=512)
    (run,) = run_job(build_job(folder, workload, tmp_path / "small.jsonl", profile=True))
    assert run["cached_tokens"] == 4 * 32  # four of the five hit the prefix that the first computes
    assert run["steps"] == 6
    assert run["computed_tokens"] == 5 * 40 - 4 * 32 + 5 * 5
    assert run["tokens_per_step"] == run["computed_tokens"] / 6
    assert run["config"]["block_size"] == 16 and run["environment"]["torch"]
    assert run["peak_memory_mib"] > 100
    assert run["ttft"]["p50"] < run["seconds"]
    for part in ("schedule", "build inputs", "dense", "attention", "sampling", "update"):
        assert run["parts"][part] > 0, part
    assert sum(run["parts"].values()) <= run["seconds"]


def test_a_job_samples_as_its_options_say(folder, tmp_path, monkeypatch):
    asked, process_one = [], InputProcessor.process_one

    def noting(self, request_id, prompt, params, **options):
        asked.append(params)
        return process_one(self, request_id, prompt, params, **options)

    monkeypatch.setattr(InputProcessor, "process_one", noting)
    workload = random_requests(requests=2, prompt=8, output=3, vocab=512)
    sampling = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1}
    run_job(build_job(folder, workload, tmp_path / "s.jsonl", sampling=sampling, warm_ups=0))
    assert [(p.temperature, p.top_p, p.repetition_penalty, p.ignore_eos) for p in asked] == [(0.8, 0.95, 1.1, True)] * 2


def test_transformers_gives_every_token_its_time(folder, tmp_path):
    workload = random_requests(requests=3, prompt=(4, 9), output=(2, 5), vocab=512)
    options = {"engine": "transformers", "options": {"batch_size": 2}, "warm_ups": 0}
    (run,) = run_job(build_job(folder, workload, tmp_path / "t.jsonl", **options))
    assert run["output_tokens_per_second"] == pytest.approx(workload.num_output_tokens / run["seconds"])
    assert 0 < run["itl"]["p50"] <= run["itl"]["max"] < run["seconds"]
    assert run["ttft"]["max"] > run["ttft"]["p50"]  # the second batch waits for the first


class Counted:
    """An engine that ends each request at once; `plays` has the requests of each replay, and when they arrived."""

    takes_arrivals = True
    takes_sampling = False

    def __init__(self):
        self.plays = []
        self._new = []

    def prepare(self, workload):
        self.plays.append([])

    def add(self, number, request):
        self.plays[-1].append(request.arrival)
        self._new.append(Finished(number, [time.monotonic()] * request.num_output_tokens))

    def step(self):
        ended, self._new = self._new, []
        return ended

    def counters(self):
        return {}


@pytest.mark.parametrize("arrival, num_warm", [(0.0, 100), (1e-3, 64)])
def test_requests_that_arrive_over_time_are_not_all_played_twice(arrival, num_warm):
    requests = [timed(number * arrival, 1) for number in range(100)]
    engine = Counted()
    measure(engine, Workload("w", requests), {"engine": "nanovllm", "warm_ups": 1, "profile": False})
    assert [len(play) for play in engine.plays] == [num_warm, 100]
    assert set(engine.plays[0]) == {0.0} and engine.plays[1][-1] == 99 * arrival


# --------------------------------------------------------------------------------------------------------- profiles


def test_the_engine_is_as_it_was_after_a_profile():
    before = [getattr(owner, name) for owner, name, _ in TIMED]
    with pytest.raises(KeyError), StepProfile().recording():
        assert [getattr(owner, name) for owner, name, _ in TIMED] != before
        raise KeyError
    assert [getattr(owner, name) for owner, name, _ in TIMED] == before


def test_a_call_within_a_call_of_the_same_part_counts_once():
    profile = StepProfile()
    inner = profile._timed(lambda: None, "attention")
    profile._timed(lambda: (inner(), inner()), "attention")()
    assert profile.calls == {"attention": 1}


# ------------------------------------------------------------------------------------------------------ the command


def test_engines_run_in_turn(command, folder, tmp_path, monkeypatch):
    ran = []

    def run_in_subprocess(engine, traces, settings, folder, *, after_workload):
        ran.append((engine.label, [len(read_trace(trace).requests) for trace in traces]))
        (run,) = build_result([10.0 * len(ran)])["runs"]
        after_workload(0, run)
        return [run | {"engine": engine.label, "workload": SMALL}]

    monkeypatch.setattr(processes, "run_in_subprocess", run_in_subprocess)
    path = tmp_path / "result.json"
    line = f"--workload {SMALL} --engines nanovllm transformers:batch_size=8 --json {path}"
    status, out, err = command(f"bench --model {folder} --repeats 2 {line}")
    assert ran == [("nanovllm", [5]), ("transformers:batch_size=8", [5])] * 2
    assert [run["repeat"] for run in json.loads(path.read_text())["runs"]] == [0, 0, 1, 1]
    assert status == 0 and err.count("tokens/s") == 4
    header, ours, theirs = out.splitlines()
    assert header.split()[0] == "workload" and ours.split()[2:4] == ["20", "(10-30)"] and ours.split()[-1] == "1.00"
    assert theirs.split()[1:4] == ["transformers:batch_size=8", "30", "(20-40)"] and theirs.split()[-1] == "0.67"


@pytest.mark.full
@programs_are_forked()
def test_a_run_in_its_own_process_ends_in_a_table_and_in_json(command, folder, tmp_path):
    path, record = tmp_path / "result.json", tmp_path / "trace.json"
    line = f"bench --model {folder} --workload {SMALL} --dtype float32 --profile --json {path} --record {record}"
    status, out, err = command(f"{line} {FLAGS}")
    assert status == 0
    lines = out.splitlines()
    assert re.fullmatch(rf"nanovllm, {SMALL}: \d+ tokens/s in .* s, TTFT p50 .*, ITL p50 .* ms", err.strip())
    assert lines[1].split()[:2] == [SMALL, "nanovllm"]
    assert lines[-1].split()[0] == "step" and lines[-1].split()[-1] == "100.0%"
    result = json.loads(path.read_text())
    about = result["workloads"][SMALL]
    assert about["parameters"]["seed"] == 0 and about["prompt_tokens"] == 200 and about["output_tokens"] == 30
    (run,) = result["runs"]
    assert run["config"]["dtype"] == "float32" and run["config"]["num_kv_blocks"] == 129
    assert run["environment"]["cores"] and run["environment"]["nanovllm"]
    assert run["cached_tokens"] == 4 * 32
    recorded = timeline.read_trace(record)
    assert len(recorded.lanes) == 5 and len(recorded.steps) == run["steps"]  # without the warm-up
    assert sum(step[2 + timeline.STEP_VALUES.index("cached")] for step in recorded.steps) == 4 * 32


@pytest.mark.full
@programs_are_forked()
def test_a_refusal_is_reported_with_the_name_of_its_engine(command, folder):
    workload = "random:requests=2,prompt=500,output=13,vocab=512"
    result = command(f"bench --model {folder} --workload {workload} {FLAGS}")
    assert_refused(result, "error: nanovllm: & 500 tokens")


def test_an_exported_workload_is_the_one_that_would_be_played(command, tmp_path):
    path = tmp_path / "out.jsonl"
    line = f"bench --workload {SMALL} --rate 2 --arrivals bursty --burst 2 --seed 4"
    assert command(f"{line} --export {path}")[0] == 0
    requests = read_trace(path).requests
    assert len(requests) == 5
    assert requests[0].arrival == requests[1].arrival < requests[2].arrival


@pytest.mark.parametrize(
    "arguments, named",
    {
        "--workload Q": "no workload 'Q'",
        "--workload random:requests=0": "random:requests is 0",
        "--workload random:prompt=8,shared=9": "shared is 9",
        "--workload W --workload W": "the same name",
        "--engines nanovllm transformers nanovllm": "two engines have the same label nanovllm",
        "--engines tgi": "no engine 'tgi'; there are nanovllm, vllm",
        "--engines nanovllm:block_size": "'block_size' in 'nanovllm:block_size' is not of the form",
        "--engines transformers --profile": "--profile supports this engine only",
        "--engines transformers --record x": "--record supports one run of this engine",
        "--repeats 2 --record x": "--record supports one run of this engine",
        "--engines transformers --rate 3": "transformers generates for static batches",
        "--engines transformers --workload chat": "requests of 'chat' arrive over time",
        "--rate 0": "the rate is 0",
        "--seed -1 --workload chat": "chat:seed is -1",
        "--arrivals bursty": "--arrivals is bursty, but without --rate",
        "--rate 1 --burst 4": "--burst is 4, but only --arrivals bursty",
        "--workload W --workload P --export x": "--export writes one workload",
        "--trace no-such-file.jsonl": "no-such-file.jsonl",
        "--block-size 17": "block_size is 17",
        "--sampling top_p": "'top_p' in 'top_p' is not of the form",
        "--sampling seed=1": "--sampling has no option 'seed'; there are temperature",
        "--sampling top_p=2": "top_p is 2",
        "--sampling top_p=0.9": "--sampling has top_p, but is greedy",
        "--sampling temperature=1,temperature=2": "temperature is given twice",
        "--sampling temperature=1 --export x": "which --sampling does not change",
        "--sampling temperature=0.5 --engines transformers": "transformers is greedy here",
        "--repeats 0": "0 is too small",
        "--warm-ups -1": "-1 is below 0",
        "--arrivals weekly": "'weekly'",
        "compare a.json": "FILE",
    }.items(),
)
def test_flags_that_make_no_sense_are_refused_before_anything_runs(command, arguments, named):
    assert_refused(command(f"bench {arguments}"), named)


def test_an_engine_that_is_not_installed_needs_an_interpreter(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with invalid(r"vllm is not installed here .* vllm:python=PATH"):
        EngineSpec.parse("vllm:max_num_seqs=64", {})
    spec = EngineSpec.parse("vllm:max_num_seqs=64,python=/some/python", {"dtype": "float32", "block_size": 16})
    assert spec.label == "vllm:max_num_seqs=64" and spec.python == "/some/python"
    assert spec.options == {"max_num_seqs": 64, "dtype": "float32"}  # inherits dtype only


def test_only_static_batches_are_refused_for_arrivals():
    timed = chat(conversations=1, turns=2)
    for engine in ("nanovllm", "vllm", "transformers-continuous", "llama.cpp"):
        check_arrivals(engine, timed)
    check_arrivals("transformers", timed.first(1))


# --------------------------------------------------------------------------------------------------- two results


def build_result(rates, **changes):
    run = """{"workload": "W", "engine": "nanovllm", "ttft": {"p50": 2.0, "p99": 4.0},
        "itl": {"p50": 0.01, "p99": 0.02}, "peak_memory_mib": 100.0, "load_seconds": 1.0, "seconds": 3.0,
        "environment": {"torch": "2.13.0"}, "config": {"block_size": 64}}"""
    runs = [json.loads(run) | changes | {"output_tokens_per_second": rate} for rate in rates]
    return {"model": "m", "warm_ups": 1, "workloads": {"W": {"requests": 64}}, "runs": runs}


@pytest.fixture
def compared(command, tmp_path):
    """Compare two results on disk; returns the command's result."""

    def compared(a, b):
        (tmp_path / "a.json").write_text(json.dumps(a))
        (tmp_path / "b.json").write_text(json.dumps(b))
        return command(f"bench compare {tmp_path}/a.json {tmp_path}/b.json")

    return compared


def test_compare_gives_the_second_over_the_first_by_medians(compared):
    a = build_result([100.0, 300.0, 200.0])
    b = build_result([500.0], ttft={"p50": 1.0, "p99": 4.0})
    status, out, _ = compared(a, b)
    reported = {" ".join(line.split()[2:-3]): line.split()[-3:] for line in out.splitlines()[1:]}
    assert status == 0
    assert reported["tokens/s"] == ["200", "500", "2.500"]
    assert reported["TTFT p50, s"] == ["2", "1", "0.500"]
    assert reported["ITL p99, ms"] == ["20", "20", "1.000"]


def test_compare_says_what_differs_in_hardware_and_config(compared):
    a, b = build_result([1.0]), build_result([1.0], environment={"torch": "2.11.0"}, config={"block_size": 16})
    b["runs"].append(b["runs"][0] | {"engine": "vllm"})
    out = compared(a, b)[1]
    assert "differs: nanovllm: torch: 2.13.0 | 2.11.0\n" in out
    assert "differs: nanovllm: block_size: 64 | 16\n" in out
    assert re.search("^only in.*vllm on W", out, re.MULTILINE)
    assert "differs:" not in compared(a, build_result([2.0]))[1]


def test_compare_refuses_what_is_no_result_or_has_nothing_in_common(command, compared, tmp_path):
    one, path = build_result([1.0]), tmp_path / "c.json"
    assert_refused(compared(one, build_result([1.0], engine="vllm")), "no workload and engine in common")
    assert_refused(compared(one, {"runs": []}), "b.json is no result")
    path.write_text("{")
    assert_refused(command(f"bench compare {path} {path}"), "c.json is no result")
