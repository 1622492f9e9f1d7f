"""Random bodies for every endpoint, those of no schema too: an answer or a named refusal, never a server error."""

import json
import os
import random
import re

import pytest
from fastapi.routing import APIRoute

from nanovllm.serving.server.app import create_app
from nanovllm.serving.server.settings import ServerSettings
from tests.support.serving import MODEL, function_tool, served, serving, user
from tests.support.structured import model

# Bodies for each endpoint; the environment variable FUZZ_EXAMPLES raises it.
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))
VALUES = [
    None, True, False, 0, 1, -1, 1.5, 1e308, 10**30, "", "x", "\x00", "\ud800", MODEL, "json", "5m", [], {}, [[]], [{}],
    {"": None}, [None], [""], ["x", "x"], [0], [-1], {"type": "object"}, {"type": "x"}, {"num_predict": 1},
    [{"role": "tool", "content": "x"}], [{"role": "assistant", "content": None}], [user([{}])],
    [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "", "arguments": {}}}]}],
    [function_tool("f")], [{"function": {"parameters": {"properties": {"a": 1}}}}],
]  # fmt: skip
GOOD = {
    "model": MODEL, "messages": [user("x")], "prompt": "x", "input": "x", "max_tokens": 2,
    "max_output_tokens": 2, "options": {"num_predict": 2}, "stream": False, "query": "q", "documents": ["a"],
    "text_1": "a", "text_2": "b", "input_prefix": "a", "input_suffix": "b", "n_predict": 2, "tokens": [5],
}  # fmt: skip
BROKEN = [b"", b"null", b"[]", b'"x"', b"{", b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"a":' * 200 + b"1" + b"}" * 200]
KINDS = ["application/json", "application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x", ""]


running = served(lambda: serving(model=model()))


def routes(app):
    """Routes of an app, and of the routers that it includes."""
    for route in app.routes:
        for each in getattr(getattr(route, "original_router", None), "routes", [route]):
            if isinstance(each, APIRoute):
                yield each


@pytest.mark.full
def test_no_body_is_a_server_error(running):
    failed, answered = [], 0
    for route in routes(running.app):
        for method in route.methods - {"GET"}:
            draw = random.Random(f"{method} {route.path}")
            for _ in range(EXAMPLES):
                path, body, kind = drawn_path(draw, route), drawn_body(draw, route), draw.choice(KINDS)
                answer = running.request(method, path, content=body, headers={"content-type": kind} if kind else {})
                answered += answer.status_code == 200
                if answer.status_code >= 500 or "see its log" in answer.text:
                    failed.append((method, path, body[:300], answer.text))
    assert not failed and answered > 5 * EXAMPLES


def drawn_path(draw, route):
    return re.sub(r"\{[^}]+\}", lambda _: draw.choice([MODEL, "a%20b", "%00", "%ff", "blobs", "pull"]), route.path)


def drawn_body(draw, route):
    if route.body_field is None or draw.random() < 0.1:
        return draw.choice(BROKEN)
    names = route.body_field.field_info.annotation.names()
    body = {name: value for name, value in GOOD.items() if name in names}
    for _ in range(draw.randint(0, 3)):
        body[draw.choice(names)] = draw.choice(VALUES)
    if draw.random() < 0.15 and body:
        del body[draw.choice(list(body))]
    return json.dumps(body).encode()


def test_every_endpoint_of_the_app_is_tried(running):
    """The walk above finds the routes that the description has, and more."""
    paths = {route.path.replace(":path}", "}") for route in routes(running.app)}
    described = create_app(running.engine, ServerSettings(served_model_name=(MODEL,))).openapi()["paths"]
    assert set(described) <= paths and {"/api/chat", "/api/embed"} <= paths
