"""x-request-id, the access log, JSON logs, counts by API key, and spans."""

import json
import logging
import re
import subprocess
import sys

import pytest

from nanovllm.features.sampling_params import SamplingParams
from nanovllm.sequence import NewRequest
from nanovllm.serving.server.logs import JsonFormatter
from nanovllm.serving.server.request_facts import CURRENT, InFlight, RequestFacts
from tests.support.llms import comes_true
from tests.support.serving import serving, user

pytestmark = pytest.mark.usefixtures("programs_are_forked")
BODY = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A server with two keys, one of which has a name."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# ours\nsecret-a # alice\nsecret-b\n")
    with serving({"api_key_file": str(keys)}) as running:
        yield running


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="nanovllm")
    return caplog


def accesses(log, count):
    """The lines of `count` requests; the last one is written after its response."""

    def found():
        return [record for record in log.records if record.name == "nanovllm.access"]

    comes_true(lambda: len(found()) >= count)
    assert len(found()) == count
    return found()


def test_a_request_keeps_its_id_and_gets_one_if_it_has_none_that_fits(running, log):
    with running.http(headers={"Authorization": "Bearer secret-a"}) as http:
        given = http.post("/v1/completions?key=x", json=BODY, headers={"x-request-id": "gateway-7"})
        assert given.headers["x-request-id"] == "gateway-7"
        fresh = http.get("/v1/models").headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", fresh)
        for bad in ("a b", "x" * 129, ""):
            assert http.get("/version", headers={"x-request-id": bad}).headers["x-request-id"] != bad
        assert http.get("/nowhere", headers={"x-request-id": "n"}).headers["x-request-id"] == "n"
    first = accesses(log, 6)[0].getMessage()
    shape = r"[\d-]+T[\d:.]+Z 127\.0\.0\.1:\d+ POST /v1/completions 200 \d+\.\d{3}s key=alice request=gateway-7 "
    assert re.match(shape, first)
    assert given.json()["id"] in first and "secret" not in first and "key=x" not in first


def test_streams_refusals_and_clients_that_leave_have_their_line(running, log):
    body = json.dumps(BODY | {"stream": True})
    headers = {"Authorization": "Bearer secret-b", "Content-Type": "application/json"}
    assert running.post("/v1/completions", content=body, headers=headers).text.endswith("[DONE]\n\n")
    accesses(log, 1)  # a stream's line is written after its end
    assert running.post("/v1/completions", BODY).status_code == 401
    wrong = running.post("/v1/completions", BODY, headers={"Authorization": "Bearer x", "x-request-id": "w"})
    assert wrong.status_code == 401 and wrong.headers["x-request-id"] == "w"
    text = [record.getMessage() for record in accesses(log, 3)]
    assert " 200 " in text[0] and "key=key-2 " in text[0]
    assert " 401 " in text[1] and "key=none " in text[1] and "key=invalid " in text[2]


def test_the_access_log_can_be_turned_off(log):
    with serving({"access_log": False}) as other:
        assert other.get("/version").headers["x-request-id"]
    assert not [record for record in log.records if record.name.endswith("access")]


def test_a_line_of_json_has_the_fields_of_an_access_and_of_an_exception(running, log):
    running.answer("/v1/completions", BODY, headers={"Authorization": "Bearer secret-a"})
    (record,) = accesses(log, 1)
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["method"], line["path"], line["status"]) == ("INFO", "POST", "/v1/completions", 200)
    assert line["key"] == "alice" and line["seconds"] > 0.0 and line["answer"].startswith("cmpl-")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        failed = logging.LogRecord("nanovllm", logging.ERROR, "f", 1, "it %s", ("failed",), sys.exc_info())
    text = JsonFormatter().format(failed)
    line = json.loads(text)
    assert "\n" not in text and line["message"] == "it failed" and "two\nlines" in line["exception"]


def test_every_line_of_a_server_with_json_logs_is_an_object(tmp_path):
    """Also those before the model is loaded, and the last ones."""
    code = "import sys; from nanovllm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["serve", "--log-format", "json", "--port", "0", "--host", "0.0.0.0", "--model", str(tmp_path)]
    for name in ("config.json", "model.safetensors", "tokenizer.json"):  # read before the first line
        (tmp_path / name).write_text("{}")
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    *logged, error = done.stderr.strip().splitlines()
    assert done.returncode == 2 and error.startswith("nanovllm: error: ")
    assert logged and all(json.loads(line)["logger"].startswith("nanovllm") for line in logged if line[0] == "{")


def test_requests_and_tokens_are_counted_by_key_those_of_clients_that_left_too(tmp_path):
    (tmp_path / "keys").write_text("a # alice\nb\n")
    with serving({"api_key_file": str(tmp_path / "keys")}, max_model_len=2048) as running:
        key = {"Authorization": "Bearer a"}
        running.answer("/v1/completions", BODY, '{"n": 2}', headers=key)
        for prompt in ([], [5] * 2048):
            running.error("/v1/completions", BODY, {"prompt": prompt}, headers=key)
        assert not running.app.state.server.in_flight._facts
        text = running.get("/metrics", headers=key).text
        for line in (
            'key="alice",kind="generation",model_name="tiny"} 8.0',
            'key="alice",kind="prompt",model_name="tiny"} 3.0',
            'nanovllm:key_requests_total{finished_reason="length",key="alice",model_name="tiny"} 1.0',
            'block_size="16"',
            'num_gpu_blocks="128"',
            "cache_config_info",
        ):
            assert line in text


def test_a_listener_that_raises_takes_no_other_with_it_and_leaves_no_facts(caplog):
    def fail(*_):
        raise RuntimeError("no collector")

    told = []
    in_flight = InFlight()
    in_flight.listeners += [fail, lambda facts, request, output: told.append(facts.request_id)]
    token = CURRENT.set(RequestFacts("mine"))
    in_flight.add(["a", "b"])
    CURRENT.reset(token)
    for name in ("a", "b"):
        in_flight.end(NewRequest(name, [1], SamplingParams()), None)
    assert told == ["mine", "mine"] and not in_flight._facts
    assert caplog.text.count("it is not called again") == 1


# ------------------------------------------------------------------------------------------------------------- spans


@pytest.fixture
def spans():
    """The module of spans, and a provider with the spans that ended."""
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed (nanovllm[otel])")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from nanovllm.serving.server.spans import SpanWriter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return SpanWriter(provider, "tiny").write, exporter


def test_a_request_is_a_span_below_the_clients(spans):
    write, exporter = spans
    with serving() as running:
        running.app.state.server.in_flight.listeners.append(write)
        running.post("/v1/completions", BODY | {"seed": 5}, headers={"traceparent": PARENT, "x-request-id": "r"})
        running.post("/v1/chat/completions", {"messages": [user("x")], "max_tokens": 2})
        comes_true(lambda: len(exporter.get_finished_spans()) == 2)
    first, second = exporter.get_finished_spans()
    assert (first.name, second.name) == ("text_completion tiny", "chat tiny")
    assert (
        format(first.context.trace_id, "032x") == PARENT[3:35] and format(first.parent.span_id, "016x") == PARENT[36:52]
    )
    assert second.parent is None
    values = first.attributes
    assert (values["gen_ai.usage.input_tokens"], values["gen_ai.usage.output_tokens"]) == (3, 4)
    assert (values["gen_ai.request.max_tokens"], values["gen_ai.request.seed"]) == (4, 5)
    assert values["gen_ai.response.finish_reasons"] == ("length",) and values["gen_ai.response.id"].startswith("cmpl-")
    assert 0 < values["gen_ai.latency.time_to_first_token"] <= values["gen_ai.latency.e2e"]
    assert first.end_time > first.start_time > 1.6e18


def test_nobody_imports_opentelemetry_unasked_and_without_it_the_option_says_what_to_install():
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from nanovllm.serving.server import app\n"
        "assert 'nanovllm.serving.server.spans' not in sys.modules\n"
        "settings = app.ServerSettings(otlp_traces_endpoint='http://localhost:1/v1/traces')\n"
        "try: app._in_flight(None, settings, 'tiny')\n"
        "except RuntimeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install 'nanovllm[otel]'" in done.stdout, done.stderr
