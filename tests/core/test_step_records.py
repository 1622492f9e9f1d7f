"""Step records and request metrics, and hooks that fail without harm to requests."""

import logging
from dataclasses import astuple

import pytest

from nanovllm import LLM, SamplingParams, TraceWriter
from nanovllm.build import build_engine
from nanovllm.observability.timeline import read_trace
from nanovllm.serving.server.live.engine_snapshot import STEP_VALUES, step_row
from tests.support import llms
from tests.support.layer_kinds import WINDOW, model, prompts
from tests.support.llms import GREEDY, OPTIONS, check_engine, generate, greedy, submit, token_ids
from tests.support.tiny_models import random_prompts, tiny_model


def open_llm(records, **options):
    return llms.open_llm(tiny_model(), on_step=records.append, **options)


class Clock:
    """Each look takes a millisecond."""

    now = 0.0

    def __call__(self):
        self.now += 0.001
        return self.now


# -------------------------------------------------------------------------------------------------------------- steps


def test_a_step_record_has_the_steps_tokens_and_requests():
    records = []
    prompt = random_prompts(1, low=40, high=40)[0]
    with open_llm(records) as llm:
        generate(llm, [prompt, [5] * 10], greedy(3))
        generate(llm, [prompt], greedy(1))
    shape = [(r.num_sequences, r.num_decode_tokens, r.num_prefill_tokens, r.num_cached_tokens) for r in records]
    assert shape == [(2, 0, 50, 0), (2, 2, 0, 0), (2, 2, 0, 0), (1, 0, 8, 32)]
    assert [r.num_running for r in records] == [2, 2, 0, 0]
    assert [r.num_used_blocks for r in records] == [4, 4, 0, 0]
    assert [r.step_id for r in records] == sorted({r.step_id for r in records})


@pytest.mark.parametrize("overlap", [False, True])
def test_records_add_up_to_the_engines_counters(overlap):
    records = []
    shared = random_prompts(1, low=64, high=64)[0]
    with open_llm(records, overlap=overlap, max_num_batched_tokens=64, max_num_seqs=4) as llm:
        generate(llm, [[*shared, n, n + 1] for n in range(8)])
        stats = llm.stats()
    assert sum(r.num_decode_tokens + r.num_prefill_tokens for r in records) == stats.num_scheduled_tokens
    assert sum(r.num_cached_tokens for r in records) == stats.prefix_cache_hits > 0
    assert len(records) == stats.num_steps
    assert max(r.num_waiting for r in records) > 0


def test_times_of_a_step_are_those_of_its_parts():
    records = []
    engine = build_engine(tiny_model(), None, records.append, OPTIONS, clock=Clock())
    submit(engine, "a", [5, 6, 7], greedy(4))
    while engine.has_unfinished:
        engine.step()
    assert len(records) == 4
    for record in records:
        assert min(record.schedule_time, record.execute_time, record.update_time) > 0.0
        assert record.schedule_time + record.execute_time + record.update_time < 0.010
    assert [r.time for r in records] == sorted(r.time for r in records)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [64, 512])
def test_each_sequence_reports_its_first_token_once(overlap, budget):
    """Also those whose last chunk is a single token, and those that were preempted before or after it."""
    records = []
    prompts = [*random_prompts(7, low=40, high=50), [7], [5] * 49, [6] * 65]
    options = {"overlap": overlap, "max_num_batched_tokens": budget, "max_num_seqs": 4, "num_kv_blocks": 14}
    with open_llm(records, **options, max_model_len=160) as llm:
        outputs = generate(llm, prompts)
        assert llm.stats().num_preemptions > 0
    ttfts = [ttft for record in records for ttft in record.ttfts]
    assert sorted(ttfts) == pytest.approx(sorted(output.metrics.ttft for output in outputs), abs=1e-9)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_hook_that_raises_is_logged_and_left_out_and_the_requests_go_on(caplog, overlap):
    prompts, calls = random_prompts(3), []

    def hook(record):
        calls.append(record)
        if len(calls) == 2:
            raise KeyError("no such gauge")

    with open_llm([]) as llm:
        expected = token_ids(generate(llm, prompts))
    with llms.open_llm(tiny_model(), on_step=hook, overlap=overlap) as llm:
        with caplog.at_level(logging.ERROR, logger="nanovllm"):
            outputs = generate(llm, prompts)
        assert token_ids(outputs) == expected
        assert len(calls) == 2
        assert llm.stats().hook_error == "KeyError: 'no such gauge'"
        assert llm.stats().num_used_blocks == 0
    (logged,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "not called again" in logged.message
    assert logged.exc_info is not None


def test_a_hook_that_calls_its_own_engine_gets_an_error_and_does_not_hang():
    holder = []
    with llms.open_llm(on_step=lambda _: holder[0].stats()) as llm:
        holder.append(llm)
        (output,) = generate(llm, [5, 6, 7])
        assert len(output.outputs[0].token_ids) == 12
        assert "from within one of its own steps" in str(llm.stats().hook_error)
        own = SamplingParams(max_tokens=3, logits_processors=lambda _, row: llm.stats() and row)
        (output,) = generate(llm, [5, 6, 7], own)
        assert "from within one of its own steps" in str(output.error)


def test_a_hook_that_is_interrupted_loses_nothing():
    def hook(record):
        if record.step_id == 3:
            raise KeyboardInterrupt

    with llms.open_llm(on_step=hook) as llm:
        stream = llm.stream([5, 6, 7], GREEDY)
        next(stream)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, [8, 9])
        *_, last = stream
        assert len(last.outputs[0].token_ids) == 12
        assert llm.stats().hook_error is None
        check_engine(llm)


def test_a_hook_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="on_step must be callable"):
        LLM(tiny_model(), on_step="print", **OPTIONS)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- requests


def test_metrics_have_queue_time_ttft_and_itl():
    engine = build_engine(tiny_model(), None, None, OPTIONS | {"max_num_seqs": 1, "record_itl": True}, clock=Clock())
    submit(engine, "first", [5, 6, 7], greedy(5))
    submit(engine, "second", [8, 9], greedy(4))
    while engine.has_unfinished:
        engine.step()
    first, second = (output.metrics for output in engine.outputs)
    for metrics, count in ((first, 5), (second, 4)):
        assert metrics.num_output_tokens == count
        assert metrics.arrival_time < metrics.scheduled_time < metrics.first_token_time < metrics.last_token_time
        assert metrics.ttft > metrics.queue_time > 0
        assert len(metrics.itls) == count - 1
        assert metrics.max_itl == max(metrics.itls)
        assert metrics.mean_itl == pytest.approx(sum(metrics.itls) / (count - 1))
    assert second.queue_time > first.queue_time
    assert second.scheduled_time > first.last_token_time
    assert (first.num_prompt_tokens, second.num_prompt_tokens) == (3, 2)


def test_gaps_are_kept_only_if_asked_for_and_one_token_has_none():
    with open_llm([]) as llm:
        (output,) = generate(llm, [5, 6], greedy(4))
        assert output.metrics.itls is None
        assert output.metrics.max_itl >= output.metrics.mean_itl > 0
        (output,) = generate(llm, [5, 6], greedy(1))
        assert (output.metrics.mean_itl, output.metrics.max_itl) == (None, None)


# ------------------------------------------------------------------------------------------------------------- engine


def test_recent_figures_are_those_of_the_last_steps(monkeypatch):
    monkeypatch.setattr("nanovllm.observability.step_records.RECENT_STEPS", 10)
    with open_llm([], max_num_batched_tokens=100, max_num_seqs=8) as llm:
        fresh = llm.stats()
        assert (fresh.recent_hit_rate, fresh.recent_budget_use) == (None, None)
        prompt = random_prompts(1, low=33, high=33)[0]
        generate(llm, prompt, greedy(1))
        assert (llm.stats().recent_hit_rate, llm.stats().recent_budget_use) == (0.0, 0.33)
        generate(llm, prompt, greedy(1))
        assert llm.stats().recent_hit_rate == 32 / 66
        assert llm.stats().recent_budget_use == pytest.approx((0.33 + 0.01) / 2)
        generate(llm, [5], greedy(9))
        assert llm.stats().recent_hit_rate == 32 / 34  # ten steps back
        generate(llm, [5], greedy(100))  # those steps lie further back than ten now
        assert llm.stats().recent_hit_rate is None
        assert llm.stats().recent_budget_use == pytest.approx(0.01)
        assert llm.stats().prefix_cache_hits == 32


def test_records_are_plain_data():
    records = []
    with open_llm(records) as llm:
        generate(llm, [5], greedy(2))
    *numbers, ttfts, request_ttfts, itls, groups, budget, predicted, drafted, accepted = astuple(records[-1])
    (gap,), () = itls, groups
    assert (budget, predicted, drafted, accepted) == (records[-1].budget, None, 0, 0)
    assert all(isinstance(value, (int, float)) for value in [*numbers, *ttfts, *request_ttfts, *gap])
    assert (groups, records[-1].group_usage) == ((), ""), "of one cache group"


def test_cache_groups_are_counted_in_records_traces_timelines_and_the_live_view(tmp_path):
    records = []
    path, options = tmp_path / "out.json", OPTIONS | {"max_model_len": 160, "num_kv_blocks": 33}
    with TraceWriter(path) as trace, LLM(model("Gemma2"), on_step=records.append, trace=trace, **options) as llm:
        generate(llm, prompts()[3])
        full, window = llm.stats().cache_groups
    middle = records[-2]
    assert [group.name for group in middle.cache_groups] == ["full attention", f"window {WINDOW}"]
    assert [group.num_blocks for group in middle.cache_groups] == [full.num_blocks, window.num_blocks]
    used = [group.num_used_blocks for group in middle.cache_groups]
    assert used[0] == middle.num_used_blocks > used[1] > 0  # what fell behind the window was freed
    words = f"full attention: {used[0]} of {full.num_blocks}, window {WINDOW}: {used[1]} of {window.num_blocks}"
    assert read_trace(path).groups[middle.step_id] == words == step_row(middle, 0.0)[STEP_VALUES.index("groups")]
    counters = [line for line in path.read_text().splitlines() if '"blocks by group"' in line]
    assert len(counters) == len(records)
