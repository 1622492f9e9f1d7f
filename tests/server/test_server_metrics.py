"""Prometheus metrics: their values, and a dashboard that uses no others."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from nanovllm.serving.server.metrics import GapHistogram, worst_reason
from tests.support.async_llms import slow_steps
from tests.support.llms import comes_true
from tests.support.prometheus import figures
from tests.support.serving import raw_stream, serving

ALERTS = Path(__file__).parents[2] / "examples" / "prometheus_alerts.yaml"
DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana_dashboard.json"


def leave(running, body, when):
    """Send a request and leave once something is true; waits until the server has forgotten it."""
    connection = raw_stream(running, body)
    comes_true(when)
    connection.close()
    comes_true(lambda: running.is_idle() and running.app.state.server.admission.num_open == 0)


@pytest.fixture(scope="module")
def counted():
    """Metrics after a prompt of 48 tokens twice, 5 tokens each; n=2 of 3 tokens; a refusal; a client that
    left."""
    with serving() as running:
        body = {"prompt": list(range(100, 148)), "max_tokens": 5, "temperature": 0}
        for given in (body, body, {"prompt": [1, 2], "max_tokens": 3, "n": 2}):
            running.answer("/v1/completions", given)
        running.error("/v1/completions", {"prompt": [1], "n": 0})
        assert running.get("/nowhere/1").status_code == 404
        before = running.stats().num_steps
        with slow_steps(running.engine):
            body = {"prompt": [3, 4], "max_tokens": 500}
            leave(running, body, lambda: running.stats().num_steps > before + 1)
        return figures(running) | {"steps": running.stats().num_steps, "tokens": running.stats().num_output_tokens}


def test_requests_are_counted_by_how_they_ended(counted):
    assert counted["request_success_total{finished_reason=length}"] == 3
    assert counted["request_success_total{finished_reason=abort}"] == 1


def test_clients_that_leave_before_they_saw_anything_are_counted():
    with serving(max_num_seqs=1, max_model_len=2048) as running, slow_steps(running.engine):
        for stream, number in ((False, 1), (True, 2)):
            body = {"prompt": [[3, 4], [5]], "max_tokens": 2000, "stream": stream, "ignore_eos": True}
            leave(running, body, lambda: running.stats().num_waiting == 1)
            assert figures(running)["request_success_total{finished_reason=abort}"] == 2 * number


def test_answers_are_counted_by_endpoint_and_status(counted):
    assert counted["http_responses_total{endpoint=/v1/completions,status=200}"] == 4
    assert counted["http_responses_total{endpoint=/v1/completions,status=400}"] == 1
    assert counted["http_responses_total{endpoint=other,status=404}"] == 1


def test_tokens_and_the_prefix_cache_are_counted(counted):
    assert counted["prompt_tokens_total"] == 48 + 48 + 2 + 2
    assert counted["generation_tokens_total"] == counted["tokens"]
    assert counted["prefix_cache_hits_total"] == 32
    assert counted["prefix_cache_queries_total"] >= 98
    assert counted["step_tokens_total{kind=cached}"] == 32
    assert counted["step_tokens_total{kind=prefill}"] == 48 + 16 + 2 + 2  # two samples share their short prompt


def test_latencies_are_those_of_all_requests_and_lengths_those_of_requests_that_ended(counted):
    for name, num_requests in (
        ("time_to_first_token_seconds", 4),  # including the client that left
        ("e2e_request_latency_seconds", 4),
        ("request_queue_time_seconds", 3),
    ):
        assert counted[f"{name}_count"] == num_requests
        assert 0 < counted[f"{name}_sum"] < 600
    # Every token but the first of each sample has one.
    assert counted["inter_token_latency_seconds_count"] == counted["tokens"] - 5
    assert counted["request_generation_tokens_sum"] == 5 + 5 + 6


def test_token_times_are_seen_while_a_request_runs_and_not_again_when_it_ends():
    with serving({"drain_timeout": 0.0}, max_model_len=2048) as running:
        with slow_steps(running.engine):
            connection = raw_stream(running, {"prompt": [3, 4], "max_tokens": 2000, "ignore_eos": True})
            comes_true(lambda: running.stats().num_output_tokens > 3)
            found = figures(running)
            assert found["time_to_first_token_seconds_count"] == 1
            assert found["inter_token_latency_seconds_count"] >= 2
            assert found["e2e_request_latency_seconds_count"] == 0
            connection.close()
        comes_true(lambda: running.is_idle() and running.app.state.server.admission.num_open == 0)
        for body in (
            {"max_tokens": 1, "n": 3, "temperature": 1},
            {"max_tokens": 2000, "ignore_eos": True, "timeout": 0.05},
        ):
            running.answer("/v1/completions", {"prompt": [5]}, body)
        found = figures(running)
        assert found["time_to_first_token_seconds_count"] == found["e2e_request_latency_seconds_count"] == 3
        assert found["inter_token_latency_seconds_count"] == running.stats().num_output_tokens - 5
        total = found["inter_token_latency_seconds_bucket{le=+Inf}"]
        assert total == found["inter_token_latency_seconds_count"]


def test_an_answer_that_is_not_streamed_counts_too_when_its_client_leaves():
    with serving(max_model_len=2048) as running, slow_steps(running.engine):
        body = {"prompt": [3, 4], "max_tokens": 2000, "ignore_eos": True, "stream": False}
        leave(running, body, lambda: running.stats().num_output_tokens > 3)
        comes_true(lambda: "key_requests_total{finished_reason=abort,key=none}" in figures(running))
        found, num_tokens = figures(running), running.stats().num_output_tokens
        assert found["time_to_first_token_seconds_count"] == found["e2e_request_latency_seconds_count"] == 1
        assert found["inter_token_latency_seconds_count"] == num_tokens - 1
        assert found["key_tokens_total{key=none,kind=prompt}"] == 2
        assert found["key_tokens_total{key=none,kind=generation}"] == num_tokens
        assert not running.app.state.server.in_flight._facts


def test_gaps_are_counted_as_prometheus_counts_them():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    gaps = GapHistogram("gap_seconds", "Text.", "m", (0.001, 0.5, 5.0))
    ours.register(gaps)
    reference = Histogram("gap_seconds", "Text.", ["model_name"], buckets=(0.001, 0.5, 5.0), registry=theirs)
    for seconds, count in ((0.0, 1), (0.001, 3), (0.25, 2), (0.5, 1), (5.5, 4)):
        gaps.observe(seconds, count)
        for _ in range(count):
            reference.labels("m").observe(seconds)
    shown = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == shown


def test_steps_have_a_time_and_a_composition(counted):
    assert counted["steps_total"] == counted["step_time_seconds_count"] == counted["steps"]
    computed = counted["step_tokens_total{kind=decode}"] + counted["step_tokens_total{kind=prefill}"]
    assert counted["iteration_tokens_total_sum"] == computed


def test_an_idle_server_has_nothing_in_use(counted):
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_blocks{state=used}"):
        assert counted[name] == 0
    assert counted["kv_blocks{state=free}"] == 128
    assert counted["process_resident_memory_bytes"] > 0


def test_two_servers_of_one_process_count_apart():
    with serving() as one, serving() as other:
        one.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 1})
        assert figures(one)["steps_total"] == 1
        assert figures(other)["steps_total"] == 0


def asked_and_known(expressions, counted):
    """Names of the metrics in expressions, and those that the server has."""
    asked = set(re.findall(r"nanovllm:(\w+)", " ".join(expressions)))
    return asked, {name.partition("{")[0] for name in counted}


def test_the_dashboard_asks_for_nothing_that_the_server_has_not(counted):
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = (target["expr"] for panel in panels for target in panel.get("targets", ()))
    asked, known = asked_and_known(expressions, counted)
    assert len(asked) > 12 and asked <= known


def test_the_alerts_ask_for_nothing_that_the_server_has_not(counted):
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    rules = group["rules"]
    assert all(rule["alert"] and rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in rules)
    asked, known = asked_and_known((rule["expr"] for rule in rules), counted)
    assert len(asked) > 8 and asked - known == {"replica_up", "replica_restarts_total"}  # shown where there are several


def test_a_request_of_several_samples_ends_as_its_worst_one():
    def reason(*reasons):
        return worst_reason(SimpleNamespace(outputs=[SimpleNamespace(finish_reason=each) for each in reasons]))

    assert [reason("stop", "length"), reason("timeout", "abort", "stop"), reason("error", "stop")] == [
        "length", "abort", "error"
    ]  # fmt: skip
    assert (reason("stop"), reason(None), worst_reason(None)) == ("stop", "abort", "error")
