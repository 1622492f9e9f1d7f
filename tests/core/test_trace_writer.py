"""Traces: each request's states without a gap, each step's tokens, also after failures."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from nanovllm import LLM, StepError, TraceWriter
from nanovllm.build import build_engine
from tests.support import traces
from tests.support.llms import generate, submit
from tests.support.tiny_models import random_prompts, tiny_model, tiny_tokenizer
from tests.support.traced_llms import OPTIONS, open_llm, params

TIGHT = {"num_kv_blocks": 14, "max_model_len": 160}  # three requests of 100 tokens preempt each other


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.json"


def traced(path, *request, **options):
    """Outputs of a call, and the trace of it."""
    with TraceWriter(path) as writer, open_llm(writer, **options) as llm:
        outputs = generate(llm, *request)
    return outputs, traces.read(path)


# ------------------------------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize("overlap", [False, True])
def test_every_token_of_a_request_is_in_its_lane(path, overlap):
    shared = random_prompts(1, low=64, high=64)[0]
    prompts = [[*shared, *prompt] for prompt in random_prompts(8)]
    limits = {"max_num_batched_tokens": 72, "max_num_seqs": 4}
    outputs, trace = traced(path, prompts, params(), overlap=overlap, **limits)
    assert sum(output.num_cached_tokens for output in outputs) > 0
    for output in outputs:
        name = output.request_id
        cached = trace.total(name, "prefill", "cached")
        assert cached == output.num_cached_tokens
        assert trace.total(name, "prefill", "tokens") == len(output.prompt_token_ids) - cached
        assert trace.total(name, "decode", "tokens") == len(output.outputs[0].token_ids) - 1
        last = trace.lane(name)[-1].arguments
        assert (last["reason"], last["output_tokens"]) == ("length", 12)
        assert last["prompt_cached_tokens"] == output.num_cached_tokens
    assert any(trace.states(output.request_id).count("prefill") > 1 for output in outputs)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_lane_covers_its_request_from_arrival_to_finish_on_the_engines_clock(path, overlap):
    outputs, trace = traced(path, random_prompts(5), params(), overlap=overlap, max_num_seqs=2)
    for output in outputs:
        lane, metrics = trace.lane(output.request_id), output.metrics
        assert lane[0].start == round(metrics.arrival_time * 1e6)
        assert lane[-1].end == round(metrics.finished_time * 1e6)
        assert lane[0].end >= round(metrics.scheduled_time * 1e6)
        first_token = round(metrics.first_token_time * 1e6)
        (prefill,) = [span for span in lane if span.state == "prefill"]
        assert prefill.start < first_token <= prefill.end


@pytest.mark.costly
@pytest.mark.parametrize("overlap", [False, True])
def test_a_pool_that_is_too_small_shows_who_was_preempted_and_what_was_computed_again(path, overlap):
    outputs, trace = traced(path, random_prompts(3, low=40, high=50), params(60), overlap=overlap, **TIGHT)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert any("stalled" in trace.states(output.request_id) for output in outputs)
    for output in outputs:
        states, count = trace.states(output.request_id), output.metrics.num_preemptions
        assert states.count("preempted") == count
        assert all(after == "prefill" for before, after in pairwise(states) if before == "preempted")
        # A request that comes back draws one token with its last chunk, as it did at first.
        assert trace.total(output.request_id, "decode", "tokens") == 60 - 1 - count
        assert trace.lane(output.request_id)[-1].arguments["preemptions"] == count


def test_every_sample_has_a_lane_of_its_own(path):
    _, trace = traced(path, random_prompts(1, low=40, high=40), params(n=3, temperature=1.0))
    assert list(trace.names.values()) == ["0 [0]", "0 [1]", "0 [2]"]
    assert [trace.total(name, "decode", "tokens") for name in trace.names.values()] == [11, 11, 11]


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_that_end_early_say_why(path, overlap):
    now = [0.0]

    def clock():
        now[0] += 0.001
        return now[0]

    with TraceWriter(path) as writer:
        options = OPTIONS | {"max_num_seqs": 2, "overlap": overlap}
        engine = build_engine(tiny_model(), tiny_tokenizer(), None, options, trace=writer, clock=clock)
        submit(engine, "runs", [5, 6, 7], params(40))
        submit(engine, "late", [8, 9], params(40), timeout=0.05)
        submit(engine, "waits", [8, 9, 10], params(40))
        submit(engine, 'waits "too"', [8, 9, 10], params(40), timeout=0.02)
        for _ in range(10):
            engine.step()
        engine.abort("runs")
        while "late" in engine.requests:
            engine.step()
        engine.abort("waits")
        engine.close()
    trace = traces.read(path)
    reasons = {name: trace.lane(name)[-1].arguments["reason"] for name in trace.names.values()}
    assert reasons == {"runs": "abort", "late": "timeout", "waits": "abort", 'waits "too"': "timeout"}
    assert trace.states('waits "too"') == ["waiting"]
    for name in ("runs", "late"):
        assert trace.states(name) == ["waiting", "prefill", "decode"]
        assert trace.total(name, "decode", "tokens") == trace.lane(name)[-1].arguments["output_tokens"] - 1


def test_what_is_open_when_the_trace_is_closed_is_unfinished(path):
    writer = TraceWriter(path)
    with open_llm(writer) as llm:
        stream = llm.stream([5, 6, 7], params())
        next(stream), next(stream)
        writer.close()
        writer.close()
        assert len(list(stream)[-1].outputs[0].token_ids) == 12
        assert llm.stats().hook_error is None
    lane = traces.read(path).lane("0")
    assert [span.state for span in lane] == ["waiting", "prefill", "decode"]
    assert (lane[-1].arguments["reason"], lane[-1].arguments["tokens"]) == ("unfinished", 1)


# ---------------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("overlap", [False, True])
def test_slices_and_counters_of_steps_are_those_of_their_records(path, overlap):
    records = []
    with TraceWriter(path) as trace:
        llm = LLM(tiny_model(), on_step=records.append, trace=trace, overlap=overlap, **OPTIONS)
        generate(llm, random_prompts(4), params())
        llm.close()
    trace = traces.read(path)
    assert len(records) > 10
    names = {
        "step": "step_id", "decode": "num_decode_tokens", "prefill": "num_prefill_tokens",
        "cached": "num_cached_tokens", "sequences": "num_sequences", "used_blocks": "num_used_blocks",
    }  # fmt: skip
    for record, step in zip(records, trace.steps, strict=True):
        assert {key: step[key] for key in names} == {key: getattr(record, name) for key, name in names.items()}
    assert {(step["budget"], step["blocks"]) for step in trace.steps} == {(llm_budget(trace), 128)}
    for record, update in zip(records, trace.slices["update"], strict=True):
        assert update["ts"] + update["dur"] == round(record.time * 1e6)
        assert update["dur"] == pytest.approx(record.update_time * 1e6, abs=2)
    for record, schedule in zip(records, trace.slices["schedule"], strict=True):
        assert schedule["ts"] == round(record.start_time * 1e6)
    assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(trace.slices["step"]))
    for name in ("tokens", "budget", "blocks", "requests", "host µs"):
        assert len(trace.counters[name]) == len(records)
    assert [event["args"]["used"] for event in trace.counters["blocks"]] == [r.num_used_blocks for r in records]


def llm_budget(trace):
    """The budget that the engine resolved by itself: the used share of it is told as a counter."""
    percents = [event["args"]["used %"] for event in trace.counters["budget"]]
    (budget,) = {step["budget"] for step in trace.steps}
    assert percents == [100 * (step["decode"] + step["prefill"]) // budget for step in trace.steps]
    return budget


# ------------------------------------------------------------------------------------------------------------- failures


def test_a_step_that_failed_is_not_in_the_trace_and_its_requests_go_on(path, monkeypatch):
    with TraceWriter(path) as writer:
        engine = build_engine(tiny_model(), None, None, OPTIONS, trace=writer)
        submit(engine, "a", [5, 6, 7], params(6))
        execute, calls = engine.model_runner.execute, []

        def failing(batch):
            calls.append(batch)
            if len(calls) == 3:
                raise MemoryError("no more")
            return execute(batch)

        monkeypatch.setattr(engine.model_runner, "execute", failing)
        failures = 0
        while engine.has_unfinished:
            try:
                engine.step()
            except StepError:
                failures += 1
        engine.close()
    trace = traces.read(path)
    assert failures == 1
    assert len(trace.steps) == len(calls) - 1 == 6
    assert trace.states("a") == ["waiting", "prefill", "decode"]
    assert trace.total("a", "decode", "tokens") == 5


@pytest.mark.parametrize("overlap", [False, True])
def test_a_call_that_sigint_ends_ends_in_the_trace_and_the_others_go_on(path, monkeypatch, sigint_is_heeded, overlap):
    prompts = random_prompts(2, low=30, high=30)
    with TraceWriter(path) as writer, open_llm(writer, overlap=overlap) as llm:
        stream = llm.stream(prompts[0], params())
        next(stream), next(stream)
        update = llm._engine.scheduler.update

        def interrupted(*arguments):
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
            return update(*arguments)

        monkeypatch.setattr(llm._engine.scheduler, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, prompts[1], params())
        *_, last = stream
        assert len(last.outputs[0].token_ids) == 12
    trace = traces.read(path)
    assert trace.states("0") == ["waiting", "prefill", "decode"]
    assert trace.lane("0")[-1].arguments["reason"] == "length"
    assert trace.lane("1")[-1].arguments["reason"] == "abort"


def test_a_disk_that_is_full_ends_the_trace_and_not_the_requests(caplog):
    writer = TraceWriter(os.devnull)
    writer._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with open_llm(writer) as llm, caplog.at_level(logging.ERROR, logger="nanovllm"):
        (output,) = generate(llm, [5, 6, 7], params())
        assert len(output.outputs[0].token_ids) == 12
        assert "No space left" in llm.stats().hook_error
    assert "the trace '/dev/null' raised" in caplog.text
    with pytest.raises(OSError, match="No space left"):
        writer.close()


@pytest.mark.full
def test_a_killed_process_leaves_whole_events_that_lack_only_the_end(path):
    code = f"""
from nanovllm import TraceWriter
from tests.support.traced_llms import open_llm, params

with TraceWriter({str(path)!r}) as trace, open_llm(trace) as llm:
    while True:
        llm.generate([5, 6, 7], params(100), use_tqdm=False)
"""
    child = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    try:
        until = time.monotonic() + 120
        while not path.exists() or path.stat().st_size < 20_000:
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    text = path.read_text(encoding="utf-8")
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    events = json.loads(text + "]")
    assert {"B", "E", "X", "C", "M"} == {event["ph"] for event in events}


# ---------------------------------------------------------------------------------------------------------------- input


def test_an_empty_trace_is_valid_too(path):
    TraceWriter(path).close()
    assert {event["ph"] for event in json.loads(path.read_text())} == {"M"}


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(OSError, match="no_such_folder"):
        TraceWriter(tmp_path / "no_such_folder" / "out.json")


def test_what_is_no_writer_is_refused_before_the_model_is_loaded():
    with pytest.raises(TypeError, match=r"trace must be a TraceWriter.*out\.json"):
        LLM("/no/such/model", trace="out.json")  # type: ignore[arg-type]


def test_a_writer_serves_one_engine(path):
    with TraceWriter(path) as trace, open_llm(trace), pytest.raises(ValueError, match="another engine"):
        LLM("/no/such/model", trace=trace)
    with pytest.raises(ValueError, match="is closed"):
        LLM("/no/such/model", trace=trace)


def test_limits_that_the_engine_chose_itself_are_in_the_trace(path):
    """The number of blocks follows from the memory, and is known only once the model is open."""
    with TraceWriter(path) as trace, open_llm(trace, num_kv_blocks=None, kv_cache_memory_bytes=2**21) as llm:
        generate(llm, [5, 6, 7], params(2))
        blocks, budget = llm.stats().num_blocks, llm.config.max_num_batched_tokens
    assert {(step["blocks"], step["budget"]) for step in traces.read(path).steps} == {(blocks, budget)}
