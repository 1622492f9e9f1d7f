"""`bench/machines/traffic.py`: lengths are log-normal, captures and pauses are counted, every part runs."""

import asyncio
import json
import logging
import statistics
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from bench.machines import traffic, traffic_worker
from bench.machines.random_models import SHAPES, checkpoint, token_bytes, weight_bytes
from bench.machines.step_counts import StepWatch, Taken, counts, decode_seconds, pauses, round_up
from bench.machines.traffic_engines import VLLM_ENVIRONMENT, VllmOffline, play
from bench.machines.traffic_report import Results
from bench.machines.traffic_requests import OPTIONS, lognormal, params_of, params_of_option
from bench.machines.traffic_worker import PARTS, TINY, Job, run
from nanovllm import SamplingParams, StepRecord
from nanovllm.tools.bench.replay import figures
from nanovllm.tools.workloads.workloads import TimedRequest, Workload
from tests.support.command_line import words

# ------------------------------------------------------------------------------------------------------------ requests


def test_lengths_have_their_median_and_meet_their_maximum():
    workload = lognormal()
    prompts = [len(request.prompt_token_ids) for request in workload.requests]
    outputs = [request.num_output_tokens for request in workload.requests]
    assert len(workload.requests) == 400
    assert max(prompts) == 6000 and max(outputs) == 1500
    assert statistics.median(prompts) == pytest.approx(220, rel=0.15)
    assert statistics.median(outputs) == pytest.approx(180, rel=0.15)
    assert min(prompts + outputs) >= 1


def test_a_seed_gives_the_same_requests():
    assert lognormal(seed=3) == lognormal(seed=3)
    assert lognormal(seed=3) != lognormal(seed=4)


def test_every_option_is_valid_and_one_in_eight_has_filters():
    for option in OPTIONS:
        assert [SamplingParams(**params).max_tokens for params in params_of_option(option, 3, 9)] == [9] * 3
    filtered = params_of_option("one in 8 with filters", 16, 9)
    assert [number for number, params in enumerate(filtered) if "top_p" in params] == [0, 8]


# --------------------------------------------------------------------------------------------------- captures, pauses


def record(start, end, *, decodes=4, chunks=0):
    return StepRecord(0, end, start, 1, decodes, chunks, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, ())


def steps(*seconds, start=0.0, **sizes):
    """Steps without time between them."""
    records = []
    for each in seconds:
        records.append(record(start, start + each, **sizes))
        start += each
    return records


def test_sizes_are_rounded_to_eighths_of_powers_of_two():
    assert [round_up(count) for count in (0, 1, 8, 9, 16, 17, 64, 65, 600)] == [0, 1, 8, 10, 16, 20, 64, 80, 640]


def test_a_pause_is_longer_than_its_kind_by_a_fifth_and_by_five_milliseconds():
    assert pauses([steps(*[0.010] * 8, 0.0149)]) == [[]]
    assert pauses([steps(*[0.100] * 8, 0.119)]) == [[]]
    assert pauses([steps(*[0.100] * 8, 0.121)]) == [[pytest.approx(0.021)]]


def test_long_chunks_are_no_pauses_of_short_steps():
    long = steps(*[0.05] * 6, start=1.0, chunks=4000)
    assert pauses([steps(*[0.010] * 8) + long]) == [[]]


def test_a_rare_kind_is_compared_with_the_next_larger_one():
    usual = steps(*[0.020] * 6, chunks=400)
    assert pauses([usual + steps(0.120, start=1.0, chunks=300)]) == [[pytest.approx(0.1)]]


def test_kinds_take_their_medians_from_all_parts_and_pauses_stay_in_theirs():
    first = steps(0.120, 0.120, chunks=400)
    later = steps(*[0.020] * 9, chunks=400)
    assert [len(found) for found in pauses([first, later])] == [2, 0]


def test_idle_time_is_no_pause_and_overlapping_steps_are_not_counted_twice():
    before, after = steps(*[0.010] * 6), steps(*[0.010] * 6, start=9.0)
    overlapping = [record(9.06, 9.08), record(9.065, 9.09)]
    assert pauses([before + after + [*overlapping]]) == [[pytest.approx(0.01)]]


def test_captures_are_counted_and_those_with_an_unfinished_request():
    watch, logger = StepWatch(), logging.getLogger("nanovllm")
    level = logger.level
    with watch.attached():
        logger.debug("captured %s: %.1f MiB", "a shape", 1.0)
        watch.num_unfinished = 2
        logger.debug("captured another")
        logger.debug("something else was captured")
    logger.debug("captured after it")
    assert logger.level == level and watch not in logger.handlers
    taken = watch.take()
    assert taken.num_captures == 2 and taken.num_busy_captures == 1
    assert watch.take() == Taken()
    assert counts([taken])[0] | {"pauses": None} == {
        "captures": 2, "captures, request unfinished": 1, "pauses": None, "pauses, ms in all": 0.0,
        "longest pause, ms": 0.0,
    }  # fmt: skip


def test_decode_steps_are_those_in_which_all_decode():
    records = [record(0.0, 1.0, decodes=2, chunks=9), *steps(1.0, 1.5, 2.0, start=1.0), record(5.5, 9.0, decodes=3)]
    assert decode_seconds(records, 4) == [1.5, 2.0]


# ------------------------------------------------------------------------------------------------------------- clients


class TwoAtOnce:
    """Streams two tokens an output."""

    prepares_when_idle = False

    def __init__(self, *, fails=False):
        self.watch = StepWatch()
        self.most = 0
        self.fails = fails

    async def stream(self, prompt, params):
        for _ in range(params["max_tokens"] // 2):
            self.most = max(self.most, self.watch.num_unfinished)
            await asyncio.sleep(0)
            if self.fails:
                raise RuntimeError("it failed")
            yield 2


def requests(count):
    return Workload("some", [TimedRequest(0.0, [1, 2], 4) for _ in range(count)])


def test_clients_time_every_token_and_count_the_unfinished():
    engine, workload = TwoAtOnce(), requests(3)
    played = asyncio.run(play(engine, workload, params_of(workload)))
    assert [len(ended.token_times) for ended in played.finished] == [4, 4, 4]
    assert [ended.number for ended in played.finished] == [0, 1, 2]
    assert figures(workload, played)["ttft"]["max"] > 0
    assert engine.most == 3 and engine.watch.num_unfinished == 0


def test_an_error_of_a_stream_reaches_the_caller():
    engine, workload = TwoAtOnce(fails=True), requests(2)
    with pytest.raises(RuntimeError, match="it failed"):
        asyncio.run(play(engine, workload, params_of(workload)))


# ------------------------------------------------------------------------------------- vLLM, by a double of its package


class VllmDouble:
    """Gives every running request a token a step, the last added one from the second step on."""

    def __init__(self, model, **options):
        self.running = {}
        self.llm_engine = self

    def add_request(self, request_id, prompt, params):
        self.running[request_id] = [params, 0]

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        last = [*self.running][-1]
        is_first = all(count == 0 for _, count in self.running.values())
        stepped = [request_id for request_id in self.running if not (is_first and request_id == last)]
        for request_id in stepped:
            self.running[request_id][1] += 1
        self.running = {name: state for name, state in self.running.items() if state[1] < state[0].max_tokens}
        return [SimpleNamespace(request_id=request_id) for request_id in stepped]

    def generate(self, prompts, params, *, use_tqdm):
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5] * each.max_tokens)]) for each in params]

    def reset_prefix_cache(self):
        pass


class AsyncVllmDouble:
    @classmethod
    def from_engine_args(cls, arguments, *, usage_context):
        return cls()

    async def generate(self, prompt, params, request_id):
        for _ in range(params.max_tokens):
            await asyncio.sleep(0)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5])])

    async def reset_prefix_cache(self):
        return True

    def shutdown(self):
        pass


@pytest.fixture
def vllm(monkeypatch):
    def module(name, **names):
        made = ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)

    for variable in VLLM_ENVIRONMENT:
        monkeypatch.setenv(variable, "1")
    module("vllm", LLM=VllmDouble, SamplingParams=SimpleNamespace, AsyncEngineArgs=SimpleNamespace)
    module("vllm.sampling_params", RequestOutputKind=SimpleNamespace(DELTA="delta"))
    module("vllm.usage")
    module("vllm.usage.usage_lib", UsageContext=SimpleNamespace(OPENAI_API_SERVER="server"))
    module("vllm.v1")
    module("vllm.v1.engine")
    module("vllm.v1.engine.async_llm", AsyncLLM=AsyncVllmDouble)


def test_vllm_runs_the_parts_of_which_nothing_is_counted(vllm, job):
    theirs = replace(job, engine="vllm")
    assert [*found_by("offline", theirs)["first call"]] == ["seconds", "output tokens/s", "x later calls"]
    assert [*found_by("poisson", theirs)] == ["100/s", "200/s"]
    assert next(iter(found_by("shared", theirs).values())).keys() == {"ms a step"}


def test_vllm_steps_count_when_all_requests_got_a_token(vllm):
    engine = VllmOffline("unused", {})
    params = params_of_option("greedy", 3, 6)
    assert len(engine.decode_seconds([[1, 2]] * 3, params)) == 4  # the first step gave two of them their token


# --------------------------------------------------------------------------------------------------------------- parts


@pytest.fixture(scope="module")
def job():
    return Job(
        part="", engine="nanovllm", model=str(checkpoint("tiny")), shape="tiny", start_time=0.0,
        options=traffic.TINY_OPTIONS, sizes=TINY, rates=[100.0, 200.0], idle=0.0, repeats=1, copy_rate=1e9,
    )  # fmt: skip


def found_by(part, job):
    found = {}
    run(replace(job, part=part), lambda _, case, figures: found.setdefault(case, {}).update(figures))
    return found


def test_offline_times_start_up_the_first_call_and_later_ones(job):
    found = found_by("offline", job)
    assert [*found] == ["start-up", "first call", "later call 1"]
    assert found["start-up"]["process to engine, s"] > 0
    for case in ("first call", "later call 1"):
        assert found[case]["seconds"] > 0
        assert found[case]["captures"] == 0 and found[case]["captures, request unfinished"] == 0
    ratio = found["first call"]["seconds"] / found["later call 1"]["seconds"]
    assert found["first call"]["x later calls"] == pytest.approx(ratio)


def test_parts_that_are_joined_share_an_engine(job, monkeypatch):
    opened, make = [], Job.open_offline
    monkeypatch.setattr(Job, "open_offline", lambda *arguments: opened.append(1) or make(*arguments))
    found = {}
    run(replace(job, part="offline+w+long"), lambda part, case, _: found.setdefault(part, []).append(case))
    assert found["w"] == ["W1", "W3, 10 in", "W3, 30 in"] and [*found] == ["offline", "w", "long"] and opened == [1]


def test_a_joined_part_that_fails_is_named_and_the_rest_runs(job, monkeypatch):
    def fails(*_):
        raise RuntimeError("it failed")

    monkeypatch.setitem(PARTS, "w", PARTS["w"]._replace(run=fails))
    found = {}
    run(replace(job, part="w+long"), lambda part, _, figures: found.setdefault(part, {}).update(figures))
    assert found["w"] == {"failed": "RuntimeError: it failed"} and found["long"]["ms a step"] > 0


def test_poisson_measures_every_rate_at_the_clients(job):
    found = found_by("poisson", job)
    assert [*found] == ["100/s", "200/s", "start-up and one request", "0 s idle before 100/s", "0 s idle before 200/s"]
    for case in ("100/s", "200/s"):
        assert found[case]["TTFT p99, ms"] >= found[case]["TTFT p50, ms"] > 0
        assert found[case]["ITL max, ms"] >= found[case]["ITL p99, ms"] >= found[case]["ITL p50, ms"] >= 0
        assert found[case]["captures"] == 0


def test_a_named_workload_replaces_log_normal_lengths_and_keeps_its_own_arrivals(job, monkeypatch):
    played = []
    monkeypatch.setattr(
        traffic_worker, "figures", lambda workload, run: played.append(workload) or figures(workload, run)
    )
    sizes = replace(TINY, workload="azure-code:scale=0.02")
    found = found_by("poisson", replace(job, sizes=sizes, rates=[100.0]))
    assert found["100/s"]["output tokens/s"] > 0 and len(sizes.traffic().requests) == TINY.requests
    assert [workload.parameters["arrivals"] for workload in played] == ["own"]


def test_options_long_and_shared_give_milliseconds_a_step(job):
    options = found_by("options", job)
    assert [*options] == [f"4 decodes, {option}" for option in OPTIONS]
    greedy = options["4 decodes, greedy"]["ms a step"]
    for case, figures_ in options.items():
        assert case == "4 decodes, greedy" or figures_["x greedy"] == pytest.approx(figures_["ms a step"] / greedy)
    (long,) = found_by("long", job).values()
    by_bytes = (weight_bytes("tiny") + 500 * token_bytes("tiny")) / 1e9
    assert long["ms by bytes"] == pytest.approx(1e3 * by_bytes)
    alone, together = found_by("shared", job).values()
    assert together["x faster than unshared"] == pytest.approx(alone["ms a step"] / together["ms a step"])


def test_bytes_of_a_step_follow_from_the_shape():
    assert weight_bytes("0.6b") == pytest.approx(1.19e9, rel=0.01)
    assert token_bytes("0.6b") == 28 * 2 * 8 * 128 * 2
    assert SHAPES["tiny"]["vocab_size"] >= TINY.vocab


# -------------------------------------------------------------------------------------------------------- whole command


@pytest.mark.full
def test_an_engine_that_cannot_run_is_named_and_the_rest_runs(tmp_path, capsys):
    out = tmp_path / "traffic.json"
    engines = ["nanovllm", "vllm:python=/no/such/python"]
    assert traffic.main(["long", "--tiny", "--engines", *engines, "--cold-cache", "--out", str(out)]) == 1
    result = json.loads(out.read_text())
    (figures_,) = result["figures"]["long"].values()
    assert figures_["ms a step"].keys() == {"nanovllm"}
    assert [failure[:2] for failure in result["failures"]] == [["long", engines[1]]]
    assert result["part_seconds"]["long"].keys() == {*engines}
    text = out.with_suffix(".md").read_text()
    assert "| 1 decode at 500 | ms a step |" in text and f"- long, {engines[1]}: " in text
    assert text in capsys.readouterr().out


def test_a_process_that_takes_too_long_is_ended_and_named(capsys):
    assert traffic.main(words("long --tiny --engines nanovllm --timeout 0.01")) == 1
    assert "it took more than 0.01 s" in capsys.readouterr().out


@pytest.mark.parametrize("line, reason", {
    "nothing": "no part 'nothing'", "--engines other": "no engine 'other'", "--rates 0": "--rates",
    "w+poisson": "poisson takes an engine of its own", "w+offline": "offline measures the first call",
    "--workload azure": "no workload 'azure'",
}.items())  # fmt: skip
def test_bad_arguments_are_refused(line, reason, capsys):
    with pytest.raises(SystemExit):
        traffic.main(words(line))
    assert reason in capsys.readouterr().err


def test_tables_have_ratios_and_name_what_failed():
    results = Results(["nanovllm", "vllm"])
    results.add("options", "4 decodes, greedy", "nanovllm", {"ms a step": 1.0, "captures": 0, "pauses": 2})
    results.add("options", "4 decodes, greedy", "vllm", {"ms a step": 1.6})
    results.add("options", "4 decodes, top_k", "nanovllm", {"longest pause, ms": 7.5})
    results.add("options", "4 decodes, top_p", "nanovllm", {"longest pause, ms": 6.5, "pauses": 1})
    results.add("options", "4 decodes, min_p", "vllm", {"failed": "ValueError: no such option"})
    text = results.markdown()
    assert "| 4 decodes, greedy | ms a step | 1 | 1.6 | 0.62 |" in text
    assert "| 4 decodes, greedy | captures" not in text and "| **all cases** | captures | 0 | - | - |" in text
    assert "| 4 decodes, greedy | pauses | 2 | - | - |" in text
    assert "| **all cases** | pauses | 3 |" in text and "| **all cases** | longest pause, ms | 7.5 |" in text
    assert "- options: 4 decodes, min_p, vllm: ValueError: no such option" in text
