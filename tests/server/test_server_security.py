"""API keys, limits, origins, and what answers and logs must not reveal."""

import asyncio
import json
import logging
import socket
import time

import httpx
import openai
import pytest
from pydantic import ValidationError

from nanovllm.serving.server.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from nanovllm.serving.server.security import ApiKeys, BodyGate, client_name
from nanovllm.serving.server.settings import ServerSettings, cache_salt
from nanovllm.serving.server.state import served_name
from tests.support.async_llms import slow_steps
from tests.support.llms import comes_true
from tests.support.serving import MODEL, function_tool, serving, user
from tests.support.tiny_models import tiny_tokenizer

PROMPT = list(range(100, 148))
HI = [user("Hi")]
BODY = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}


AS_JSON = {"content-type": "application/json"}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_without_the_key_nothing_but_health_is_answered():
    with serving({"api_key": ("right",)}) as running:
        assert running.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Basic right"}, *map(bearer, ("wrong", "righ", "right2"))):
            for path in ("/v1/models", "/metrics", "/version", f"/v1/models/{MODEL}", "/api/tags"):
                assert running.get(path, headers=headers).status_code == 401
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/embeddings"):
                answer = running.post(path, BODY, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
            assert running.post("/api/chat", BODY, headers=headers).status_code == 401
        assert running.answer("/v1/completions", BODY, headers=bearer("right"))
        with running.client("wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_every_key_of_a_file_is_accepted_and_an_empty_file_refused(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\n\nfirst\n  second  \n")
    keys = ApiKeys(ServerSettings(api_key=("third",), api_key_file=str(file)).api_keys())
    assert [keys.check(f"Bearer {key}") for key in ("first", "second", "third")] == ["first", "second", "third"]
    file.write_text("# none\n")
    with pytest.raises(ValueError, match="holds no key"):
        ServerSettings(api_key_file=str(file)).api_keys()


def test_the_time_of_a_check_does_not_depend_on_which_key_fits(monkeypatch):
    """Keys are compared by digests of equal length, in constant time."""
    compared = []

    def compare(one, other):
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr("nanovllm.serving.server.security.hmac.compare_digest", compare)
    keys = ApiKeys(["a", "a much longer key", "c"])
    keys.check("Bearer a")
    assert compared == [(32, 32)] * 3


@pytest.mark.parametrize("key", ["sécret", " secret", "secret\t", "sec\nret"])
def test_a_key_that_no_request_can_bring_is_refused_and_not_shown(key):
    with pytest.raises(ValueError, match="API key 2") as refused:
        ApiKeys(["right", key])
    assert "ret" not in str(refused.value)
    assert "ret" not in repr(ServerSettings(api_key=(key,)))


def test_keys_are_kept_apart_from_what_they_were_given_in():
    """An exhausted iterator of keys would leave the server open."""
    given = ["one", "two"]
    settings = ServerSettings(api_key=given)
    given.clear()
    assert settings.api_key == ServerSettings(api_key=iter(["one", "two"])).api_key == ("one", "two")


@pytest.mark.parametrize("keys", ["one", b"one", None, 5, [""], ["one", 5]])
def test_keys_that_are_no_strings_are_refused(keys):
    with pytest.raises(TypeError, match="api_key must hold strings"):
        ServerSettings(api_key=keys)


def test_without_the_key_a_body_is_not_even_read():
    with serving({"api_key": ("right",)}) as running:
        connection = socket.create_connection(running.address)
        connection.settimeout(30.0)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
        )  # nothing else
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")
        connection.close()


def test_a_body_beyond_the_limit_is_413():
    data = b'{"prompt": "' + b"x" * 18_000 + b'"}'

    def in_two_chunks():
        yield data[:9_100]
        time.sleep(0.2)  # else the server reads both as one
        yield data[9_100:]

    with serving({"max_body_bytes": 10_000}) as running:
        for content in (data, in_two_chunks()):
            error = running.error("/v1/completions", status=413, content=content, headers=AS_JSON)
            assert error["code"] == "body_too_large" and "10000" in error["message"]
        assert running.answer("/v1/completions", BODY)


def test_with_a_salt_per_key_no_key_hits_the_prefixes_of_another():
    def cached(key, **body):
        answer = running.answer("/v1/completions", BODY, body, headers=bearer(key))
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    keys = ("alice", "bob")
    with serving({"api_key": keys, "cache_salt_per_key": True}) as running:
        assert [cached("alice") for _ in range(2)] == [0, 32]
        for salt in ("", cache_salt("alice"), f"{cache_salt('alice')}:"):  # nor by naming her salt
            assert cached("bob", cache_salt=salt) == 0
        assert cached("alice") == 32
    with serving({"api_key": keys}) as running:
        assert [cached("alice"), cached("bob")] == [0, 32]  # shared by default
    with pytest.raises(ValueError, match="no API key"):
        ServerSettings(cache_salt_per_key=True)


@pytest.fixture
def clients():
    """The client of each request that the engine prepares."""
    return []


def note_clients(engine, clients):
    process = engine._input_processor.process_each

    def noted(*arguments, **options):
        clients.append(options["client"])
        return process(*arguments, **options)

    engine._input_processor.process_each = noted


@pytest.mark.parametrize(
    "keys, names",
    [
        ("first\nsecond #batch\nb#c", {"first": "key-1", "second": "batch", "b#c": "key-3"}),
        ("right # none", {"right": "none"}),
    ],
)
def test_each_key_is_a_client_by_its_name(clients, tmp_path, keys, names):
    file = tmp_path / "keys"
    file.write_text(keys)
    with serving({"api_key_file": str(file)}) as running:
        note_clients(running.engine, clients)
        for key in names:
            assert running.answer("/v1/completions", BODY, headers=bearer(key))
            assert running.answer("/v1/chat/completions", {"messages": HI, "max_tokens": 1}, headers=bearer(key))
    assert clients == [name for name in names.values() for _ in range(2)]


@pytest.mark.parametrize("settings, headers, expected", [
    ({"client_header": "x-client-id"}, [{"X-Client-Id": "alice"}, {}], ["alice", ""]),
    ({}, [{"X-Client-Id": "alice"}, {}, {"X-Client-Id": "a" * 257}], ["", "", ""]),
    ({"client_header": "x-client-id", "api_key": ("right",)},
     [bearer("right") | {"x-client-id": "alice"}, bearer("right")], ["alice", "key-1"]),
], ids=["a header", "none", "a header before a key"])  # fmt: skip
def test_a_header_names_the_client_only_where_the_server_says_so(clients, settings, headers, expected):
    with serving(settings) as running:
        note_clients(running.engine, clients)
        for own in headers:
            assert running.answer("/v1/completions", BODY, headers=own)
        if "api_key" not in settings and settings:
            error = running.error("/v1/completions", BODY, headers={"X-Client-Id": "a" * 257})
            assert "256" in error["message"]
    assert clients == expected


def test_a_bad_name_of_a_header_is_refused():
    with pytest.raises(ValueError, match="client_header is 'x client'; it must be the name of a header"):
        ServerSettings(client_header="x client")


def test_clients_by_a_header_add_no_lines_to_the_metrics():
    def lines(*clients):
        for client in clients:
            assert running.answer("/v1/completions", BODY, headers={"x-client-id": client})
        return {line.rpartition(" ")[0] for line in running.get("/metrics").text.splitlines()}

    with serving({"client_header": "x-client-id"}) as running:
        lines("first")
        assert lines("first") == lines(*(f"c{number}" for number in range(20)))


def test_other_origins_are_let_in_only_when_named():
    origin, allowed = {"Origin": "https://example.org"}, "access-control-allow-origin"
    preflight = origin | {"Access-Control-Request-Method": "POST"}
    with serving() as running:
        assert allowed not in running.get("/health", headers=origin).headers
        assert running.options("/v1/completions", headers=preflight).status_code == 405
    with serving({"cors_origin": ("https://example.org",), "api_key": ("right",)}) as running:
        assert running.options("/v1/completions", headers=preflight).status_code == 200
        for answer in (running.get("/health", headers=origin), running.post("/v1/completions", headers=origin)):
            assert answer.headers[allowed] == "https://example.org"  # also in a 401
        assert allowed not in running.get("/health", headers={"Origin": "https://evil.org"}).headers


def test_prompts_are_logged_only_with_log_prompts(caplog):
    caplog.set_level(logging.INFO, logger="nanovllm")
    body = {"prompt": "a secret thought", "max_tokens": 1}
    for log_prompts in (False, True):
        caplog.clear()
        with serving({"log_prompts": log_prompts}) as running:
            assert running.post("/v1/completions", body).status_code == 200
            assert running.post("/v1/completions", body | {"n": 0}).status_code == 400
        assert ("secret" in caplog.text) == log_prompts


def test_an_unforeseen_error_is_a_500_without_its_trace(monkeypatch):
    with serving() as running:
        monkeypatch.setattr("nanovllm.serving.server.openai.models._model", lambda state, name: 1 / 0)
        answer = running.get("/v1/models")
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "Zero" not in answer.text and ".py" not in answer.text
        counted = 'http_responses_total{endpoint="/v1/models",model_name="tiny",status="500"} 1.0'
        assert counted in httpx.get(f"{running.url}/metrics").text  # the other connection is closed


def test_the_model_is_not_named_by_its_path(tmp_path):
    (tmp_path / "my-model").mkdir()
    assert served_name(ServerSettings(), tmp_path / "my-model") == "my-model"
    assert served_name(ServerSettings(), "org/model") == "org/model"
    assert served_name(ServerSettings(served_model_name="x"), tmp_path) == "x"


MANY = 20_000


@pytest.mark.parametrize(
    "model, body",
    [
        *((CompletionRequest, {"prompt": [1]} | fields) for fields in (
            {"prompt": [-1] * MANY}, {"prompt": [[-1] * MANY] * 2}, {"stop": [1] * MANY}, {"bad_words": [1] * MANY},
            {"allowed_token_ids": [-1] * MANY}, {"logit_bias": {str(number): "x" for number in range(MANY)}},
            {f"x{number}": 1 for number in range(MANY)},
        )),
        *((ChatRequest, {"messages": HI} | fields) for fields in (
            {"messages": [{}] * MANY}, {"messages": [user([{}] * MANY)]}, {"tools": [{}] * MANY},
            {"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]},
        )),
        (TokenizeRequest, {"messages": [{}] * MANY}),
        (DetokenizeRequest, {"tokens": [-1] * MANY}),
    ],
)  # fmt: skip
def test_a_body_with_many_faults_is_refused_at_the_first_ones(model, body):
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    assert 0 < refused.value.error_count() <= 4  # one per union member


LONG = "x" * 20_000


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [function_tool("f", description=LONG)]},
        {"messages": [{"role": "assistant", "reasoning_content": LONG}]},
        {"messages": [{"role": "user", "content": "x", "name": LONG}]},
        {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "c", "function": {"name": "f", "arguments": f'{{"x": "{LONG}"}}'}}]}]},
        {"chat_template_kwargs": {"x": LONG}},
    ],
)  # fmt: skip
def test_all_that_the_chat_template_is_given_counts_for_the_longest_prompt(running, more):
    for path in ("/v1/chat/completions", "/tokenize"):
        error = running.error(path, {"messages": HI}, more)
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
        assert str(32 * 512) in error["message"]


def nested(depth):
    value = 1
    for number in range(depth):
        value = {"a": value} if number % 2 else [value]
    return {"a": value}


PLACES = {
    "chat_template_kwargs": lambda value: {"chat_template_kwargs": value},
    "tools[0].function.parameters": lambda value: {
        "tools": [function_tool("f", parameters=value)], "tool_choice": "none",
    },
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_json_is_taken_up_to_a_depth_that_templates_and_the_log_can_bear(place):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{% if a %}{% endif %}"
    with serving({"log_prompts": True}, tokenizer=tokenizer) as running:
        for depth, status in ((98, 200), (100, 400), (500, 400), (900, 400)):
            body = {"messages": HI, "max_tokens": 1} | PLACES[place](nested(depth))
            answer = running.post("/v1/chat/completions", body)
            assert (answer.status_code, answer.json().get("error", {}).get("param", place)) == (status, place)


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/v1/completions", {"prompt": "\ud800"}, "prompt"),
        ("/v1/completions", {"prompt": "a", "stop": ["\ud800"]}, "stop"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["\ud800"]}, "bad_words"),
        ("/tokenize", {"prompt": "a\udfff"}, "prompt"),
        ("/v1/chat/completions", {"messages": [user("\ud800")]}, "messages"),
    ],
)
def test_half_of_a_surrogate_pair_is_no_text(running, path, body, param):
    error = running.error(path, content=json.dumps(body), headers=AS_JSON)
    assert error["param"] == param
    assert all(part in error["message"] for part in ("surrogate", "U+D", "errors='replace'"))
    assert ("messages[0].content holds" in error["message"]) == (param == "messages")


def scope_of(**headers):
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "headers": named, "client": ("10.1.2.3", 4)}


def test_a_client_of_the_intake_is_its_header_its_key_or_its_address():
    keys = ApiKeys(["right", "other"], {"right": "alice"})
    assert client_name(scope_of(authorization="Bearer right"), keys, None) == "alice"
    assert client_name(scope_of(x_api_key="other"), keys, "x-client") == "key-2"
    assert client_name(scope_of(authorization="Bearer right", x_api_key="other"), keys, None) == "alice"
    assert client_name(scope_of(authorization="Bearer right", x_client="bob"), keys, "x-client") == "bob"
    assert client_name(scope_of(authorization="Bearer wrong", x_client="bob"), keys, "x-client") == "address 10.1.2.3"
    assert client_name(scope_of(x_client="bob"), ApiKeys([]), "x-client") == "bob"
    assert client_name(scope_of(), ApiKeys([]), None) == "address 10.1.2.3"
    assert len(client_name(scope_of(x_client="b" * 9999), ApiKeys([]), "x-client")) == 256


def test_the_body_of_a_request_that_failed_counts_no_more():
    async def receive():
        return {"type": "http.request", "body": b"x" * 40}

    async def fail(scope, receive, send):
        await receive()
        raise RuntimeError("a defect")

    gate = BodyGate(fail, ApiKeys([]), max_bytes=50, max_client_bytes=60)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a defect"):
            asyncio.run(gate(scope_of() | {"method": "POST"}, receive, None))


def test_the_bodies_of_one_clients_open_requests_are_bounded_together():
    settings = {"api_key": ("one", "two"), "max_client_bytes": 60_000}
    body = {"prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True, "stream": True, "user": "u" * 40_000}
    with serving(settings) as running, running.http() as http, slow_steps(running.engine, 0.01):
        one, two = map(bearer, ("one", "two"))
        with http.stream("POST", "/v1/completions", json=body, headers=one) as first:
            assert first.status_code == 200
            error = running.error("/v1/completions", body, status=429, headers=one)
            assert error["code"] == "too_many_bytes" and "60000 bytes (max_client_bytes)" in error["message"]
            with http.stream("POST", "/v1/completions", json=body, headers=two) as other:
                assert other.status_code == 200
        comes_true(running.is_idle)
        assert running.answer("/v1/completions", body, '{"max_tokens": 1, "stream": false}', headers=one)
