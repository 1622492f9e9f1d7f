"""Names of the model and of endpoints: several, any, and the forms of other servers."""

import pytest

from nanovllm.serving.server.settings import ServerSettings
from tests.support.serving import serving, user

CHAT = {"messages": [user("x")], "max_tokens": 2}
OLLAMA = {"model": "x", "messages": CHAT["messages"], "options": {"num_predict": 2}}


def described_model(running):
    """The field of the model in the description of the API."""
    return running.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]["model"]


def test_a_model_has_several_names_and_answers_with_the_first():
    with serving({"served_model_name": ("first", "second")}) as running:
        for name in ("first", "second"):
            assert running.answer("/v1/chat/completions", CHAT, {"model": name})["model"] == "first"
            assert running.get(f"/v1/models/{name}").json()["id"] == name
        assert [model["id"] for model in running.get("/v1/models").json()["data"]] == ["first", "second"]
        assert [model["name"] for model in running.get("/api/tags").json()["models"]] == ["first", "second"]
        error = running.error("/v1/chat/completions", CHAT, {"model": "third"}, status=404)
        assert "'first' or 'second' is served" in error["message"]
        assert described_model(running)["enum"] == ["first", "second", None]


def test_every_name_is_answered_where_the_server_is_told_to():
    with serving({"any_model_name": True}) as running:
        for path in ("/v1/chat/completions", "/v1/messages"):
            running.answer(path, CHAT, {"model": "claude-small"})
        running.answer("/api/chat", OLLAMA | {"stream": False})
        assert running.get("/v1/models/claude-small").json()["id"] == "claude-small"
        assert [model["id"] for model in running.get("/v1/models").json()["data"]] == ["tiny"]
        assert "enum" not in str(described_model(running))


def test_a_request_may_wait_longer_than_the_servers_goals_and_not_less():
    with serving(itl_goal=60.0, ttft_goal=90.0) as running:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x", "max_tokens": 2})):
            running.answer(path, body, {"itl_goal": 70, "ttft_goal": 90.0})
            for goals in ({"itl_goal": 0.05}, {"ttft_goal": 1}):
                assert "a request may only wait longer" in running.error(path, body, goals)["message"]


@pytest.mark.parametrize("given, names", [("x", ("x",)), (["x", "y"], ("x", "y")), (None, ()), ((), ())])
def test_names_are_one_text_or_several(given, names):
    assert ServerSettings(served_model_name=given).served_model_name == names


@pytest.mark.parametrize("given", [("x", ""), "", 7])
def test_other_names_are_refused(given):
    with pytest.raises((TypeError, ValueError), match="served_model_name"):
        ServerSettings(served_model_name=given)


@pytest.mark.parametrize(
    "body, paths, field",
    [
        ({"query": "x", "documents": ["y", "z"]}, ("/v1/rerank", "/rerank", "/v2/rerank"), "results"),
        ({"text_1": "x", "text_2": "y"}, ("/v1/score", "/score"), "data"),
    ],
)
def test_reranking_and_scores_have_the_paths_of_other_servers(running, body, paths, field):
    first, *others = (running.answer(path, body, '{"method": "cosine"}')[field] for path in paths)
    assert all(other == first for other in others)


@pytest.mark.full
def test_a_response_that_fits_may_ask_for_truncation(running):
    for value in ("auto", "disabled", None):
        answer = running.answer("/v1/responses", {"input": "x", "max_output_tokens": 2, "truncation": value})
        assert answer["truncation"] == (value or "disabled")
    long = {"input": "word " * 1000, "truncation": "auto"}
    assert running.error("/v1/responses", long)["code"] == "context_length_exceeded"
