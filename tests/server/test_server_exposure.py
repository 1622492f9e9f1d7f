"""Hosts, origins and priorities that a server accepts, and a port already in use."""

import asyncio
import logging

import pytest

from nanovllm.cli.main import main
from nanovllm.serving.server.hosts import HostGate, log_exposure
from nanovllm.serving.server.settings import ServerSettings
from tests.support.command_line import words
from tests.support.serving import serving, user

BODY = {"prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0}
PATHS = ("/", "/health", "/metrics", "/v1/models", "/nowhere", "/ui/events", "/openapi.json")


def test_a_host_that_is_no_address_of_this_machine_is_named(capsys):
    assert main(words("serve --host 192.0.2.1 --port 0")) != 0
    error = capsys.readouterr().err
    assert "192.0.2.1:0" in error and "--host" in error


def test_a_server_on_the_loopback_answers_to_no_other_name():
    with serving({"api_key": ("right",)}) as running:
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example:80"):
            for path in PATHS:
                answer = running.get(path, headers={"Host": host})
                assert (answer.status_code, answer.json()["error"]["code"]) == (421, "unknown_host"), (host, path)
            headers = {"Host": host, "Authorization": "Bearer right"}
            assert "--allowed-hosts" in running.error("/v1/completions", BODY, status=421, headers=headers)["message"]
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]", "[::1]:8000", "localhost."):
            assert running.get("/health", headers={"Host": host}).status_code == 200, host


def test_each_of_several_host_headers_is_checked():
    sent = []

    async def send(message):
        sent.append(message)

    hosts = [(b"host", b"localhost"), (b"host", b"evil.example")]
    asyncio.run(HostGate(None, frozenset({"localhost"}))({"type": "http", "headers": hosts}, None, send))
    assert sent[0]["status"] == 421


@pytest.mark.parametrize(
    "settings, statuses",
    [
        ({"allowed_hosts": ("model.example",)}, {"Model.example:8000": 200, "evil.example": 421, "localhost": 200}),
        ({"allowed_hosts": ("*",)}, {"evil.example": 200}),
        ({"host": "0.0.0.0"}, {"model.example": 200}),
        ({"host": "0.0.0.0", "allowed_hosts": ("other.example",)}, {"model.example": 421}),
    ],
    ids=["one more", "any", "elsewhere any", "elsewhere one"],
)
def test_further_names_are_answered_to_when_allowed(settings, statuses):
    with serving(settings) as running:
        found = {host: running.get("/health", headers={"Host": host}).status_code for host in statuses}
    assert found == statuses


@pytest.mark.parametrize(
    "settings, has_keys, levels",
    [
        ({}, False, []),
        ({"host": "localhost"}, False, []),
        ({"host": "0.0.0.0"}, False, ["WARNING", "INFO"]),
        ({"host": "::"}, True, ["INFO"]),
        ({"host": "0.0.0.0", "allowed_hosts": ("a",)}, True, []),
    ],
)
def test_what_others_can_reach_is_logged(caplog, settings, has_keys, levels):
    caplog.set_level(logging.INFO, logger="nanovllm")
    log_exposure(ServerSettings(**settings), has_keys=has_keys)
    assert [record.levelname for record in caplog.records] == levels
    if "WARNING" in levels:
        assert "API key" in caplog.text


def test_a_page_may_send_what_the_clients_of_javascript_send():
    """Preflight requests name headers of the client library, such as x-stainless-os."""
    names = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-retry-count"
    preflight = {
        "Origin": "https://example.org",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": names,
    }
    with serving({"cors_origin": ("https://example.org",)}) as running:
        answer = running.options("/v1/chat/completions", headers=preflight)
        assert answer.status_code == 200, answer.text
        allowed = {name.strip().lower() for name in answer.headers["access-control-allow-headers"].split(",")}
        assert set(names.split(",")) <= allowed


def test_no_client_overtakes_the_others_unless_the_server_allows_it():
    path, chat = "/v1/completions", {"messages": [user("x")], "max_tokens": 1}
    with serving() as running:
        for priority in (-1, -(2**31) + 1):
            running.refuses("/v1/chat/completions", "priority", "--min-priority", chat, {"priority": priority})
            running.refuses(path, "priority", str(priority), BODY, {"priority": priority})
        assert [running.post(path, BODY | {"priority": priority}).status_code for priority in (0, 5)] == [200, 200]
    with serving({"min_priority": -3}) as running:
        assert [running.post(path, BODY | {"priority": p}).status_code for p in (-3, -4)] == [200, 400]
        schema = running.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]
        assert schema["properties"]["priority"]["minimum"] == -3
