"""Fields that clients send of their own accord and that have no effect; parts of a conversation that are left out."""

import json
import logging
import typing

import anthropic.types.beta
import openai.types.chat.completion_create_params
import openai.types.responses.response_create_params
import pytest
from anthropic.types.beta import message_create_params

from nanovllm.serving.server import hints
from nanovllm.serving.server.anthropic.protocol import MessagesRequest, OtherBlock, Tool
from nanovllm.serving.server.openai.protocol import ChatRequest
from nanovllm.serving.server.openai.responses_protocol import FunctionTool, OtherItem, ResponsesRequest
from tests.support.pages import TEXTS, inline_code, tables
from tests.support.serving import MODEL, served, serving, user
from tests.support.structured import model

ASK = [user("Hello")]
USED = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
VALUES = [True, "x", [1], {"type": "x"}]
# Bodies with each place of a table, in JSON; NEW stands for the fields that it has.
OPENAI = {
    "": '"messages": ASK, NEW',
    "stream_options": '"messages": ASK, "stream": true, "stream_options": {NEW}',
    "messages[]": '"messages": [{"role": "user", "content": "x", NEW}, {"role": "assistant", "content": "y", NEW}]',
    "messages[].content[]": '"messages": [{"role": "user", "content": [{"type": "text", "text": "x", NEW}]}]',
    "messages[].tool_calls[]":
        '"messages": [{"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", '
        '"arguments": "{}"}, NEW}]}, {"role": "tool", "tool_call_id": "c1", "content": "z"}]',
    "response_format.json_schema":
        '"messages": ASK, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": '
        '{"enum": [1]}, NEW}}',
    "tools[]":
        '"messages": ASK, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", '
        '"properties": {}}}, NEW}]',
}  # fmt: skip
RESPONSES = {
    "": '"input": "x", NEW',
    "text": '"input": "x", "text": {NEW}',
    "reasoning": '"input": "x", "reasoning": {NEW}',
    "stream_options": '"input": "x", "stream": true, "stream_options": {NEW}',
    "input[]": '"input": [{"role": "user", "content": "x", NEW}]',
    "input[].content[]": '"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", NEW}]}]',
    "tools[]": '"input": "x", "tools": [{"type": "function", "name": "f", NEW}]',
}
ANTHROPIC = {
    "": '"messages": ASK, NEW',
    "thinking": '"messages": ASK, "thinking": {"type": "adaptive", NEW}',
    "messages[].content[]":
        '"system": [{"type": "text", "text": "x", NEW}], "messages": [{"role": "user", "content": [{"type": "text", '
        '"text": "x", NEW}]}, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": '
        '{}, NEW}]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "z", NEW}]}]',
    "tools[]": '"messages": ASK, "tools": [{"name": "f", "input_schema": {"type": "object"}, NEW}]',
}  # fmt: skip
OLLAMA = {
    "": '"messages": ASK, "stream": false, NEW',
    "options": '"messages": ASK, "stream": false, "options": {"num_predict": 2, NEW}',
}
APIS = {
    "openai": ("/v1/chat/completions", hints.OPENAI, OPENAI, {"max_tokens": 2}),
    "responses": ("/v1/responses", hints.RESPONSES, RESPONSES, {"max_output_tokens": 2}),
    "anthropic": ("/v1/messages", hints.ANTHROPIC, ANTHROPIC, {"max_tokens": 2}),
    "ollama": ("/api/chat", hints.OLLAMA, OLLAMA, {"options": {"num_predict": 2}}),
    "pooling": ("/v1/embeddings", hints.POOLING, {"": '"input": "x", NEW'}, {}),
}
TABLES = [
    ("`/v1/chat/completions`", hints.OPENAI), ("`/v1/responses`", hints.RESPONSES), ("`/v1/embeddings`", hints.POOLING),
    ("`/v1/messages`", hints.ANTHROPIC), ("`/api/chat`", hints.OLLAMA),
]  # fmt: skip


running = served(lambda: serving(model=model()))


@pytest.mark.parametrize("api", APIS)
def test_a_field_without_effect_passes_at_any_value(running, api):
    path, table, places, size = APIS[api]
    assert set(table) == set(places)
    for place, fields in table.items():
        for value in VALUES:
            new = json.dumps(dict.fromkeys(fields, value))[1:-1]
            body = places[place].replace("ASK", json.dumps(ASK)).replace("NEW", new)
            answer = running.post(path, {"model": MODEL, **size} | json.loads(f"{{{body}}}"))
            assert answer.status_code == 200, (place, value, answer.text)


def test_the_log_says_once_that_a_field_has_no_effect(caplog):
    body = {"model": MODEL, "max_tokens": 2, "messages": ASK, "speed": "fast", "metadata": {"user_id": "u"}}
    caplog.set_level(logging.INFO, logger="nanovllm")
    with serving() as running:
        for _ in range(2):
            assert running.answer("/v1/messages", body)
    logged = [line for line in caplog.messages if "has no effect" in line]
    assert len(logged) == 2
    assert "'MessagesRequest.speed' has no effect, here and in later requests: there is one engine" in logged[1]


def test_the_page_has_every_field_without_effect_and_its_reason():
    found = {rows[0][0].partition(",")[0]: rows[1:] for rows in tables(TEXTS["docs/guide/clients.md"])}
    for head, table in TABLES:
        shown = {name: why for names, why in found[head] for name in inline_code(names)}
        assert shown == {
            f"{place}.{name}".lstrip("."): why for place, fields in table.items() for name, why in fields.items()
        }


KNOWN_PARAMS = {
    "messages": (message_create_params.MessageCreateParamsBase, MessagesRequest, {"betas"}),  # a header
    "tool": (anthropic.types.beta.BetaToolParam, Tool, set()),
    "chat": (openai.types.chat.completion_create_params.CompletionCreateParamsBase, ChatRequest, set()),
    "responses": (openai.types.responses.response_create_params.ResponseCreateParamsBase, ResponsesRequest, set()),
    "function": (openai.types.responses.FunctionToolParam, FunctionTool, set()),
}


@pytest.mark.parametrize("name", KNOWN_PARAMS)
def test_every_parameter_of_the_clients_is_honoured_refused_by_name_or_without_effect(name):
    params, model, others = KNOWN_PARAMS[name]
    assert set(params.__annotations__) - others <= set(model.names())


def test_calls_and_thought_of_another_server_are_left_out_of_a_conversation(running, monkeypatch):
    kinds = typing.get_args(OtherBlock.model_fields["type"].annotation)
    others = [{"type": kind, "id": "x", "content": [{"any": "thing"}]} for kind in kinds]
    answer = {"role": "assistant", "content": [*others, {"type": "text", "text": "y"}]}
    items = [{"type": kind, "id": "x"} for kind in typing.get_args(OtherItem.model_fields["type"].annotation)]
    sealed = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAAAAB"}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "y"}]}
    plain = {"model": MODEL, "messages": [*ASK, {"role": "assistant", "content": "y"}, *ASK]}
    size = running.answer("/v1/messages/count_tokens", plain)
    assert running.answer("/v1/messages/count_tokens", plain, {"messages": [*ASK, answer, *ASK]}) == size
    given = {"input": [*ASK, *items, sealed, refused, *ASK], "max_output_tokens": 2}
    assert running.answer("/v1/responses", given)["usage"]["input_tokens"] == size["input_tokens"]


def test_a_tool_reference_is_the_name_of_its_tool(running):
    def count(content):
        result = user([{"type": "tool_result", "tool_use_id": "t", "content": content}])
        messages = [*ASK, {"role": "assistant", "content": [USED]}, result]
        return running.answer("/v1/messages/count_tokens", {"model": MODEL, "messages": messages})["input_tokens"]

    assert count([{"type": "tool_reference", "tool_name": "weather"}]) == count("weather")


REFUSED = {
    "a value that is refused": ("/v1/chat/completions", {"messages": ASK, "use_beam_search": True}),
    "a variable of the template": ("/v1/chat/completions", {"messages": ASK, "chat_template_kwargs": {"mood": 1}}),
    "an edit": ("/v1/messages", {"messages": ASK, "context_management": {"edits": [{"type": "compact_20260112"}]}}),
    "a tool of the server": (
        "/v1/messages",
        {"messages": ASK, "tools": [{"type": "web_search_20250305", "name": "w"}]},
    ),
    "details of an answer": ("/v1/responses", {"input": "x", "include": ["message.output_text.logprobs"]}),
    "an option": ("/api/chat", {"messages": ASK, "stream": False, "options": {"main_gpu_x": 1}}),
    "a thread that goes on": ("/v1/messages", {"messages": ASK, "thread": {"type": "continue"}}),
}


@pytest.mark.parametrize("unknown_fields", ["refuse", "warn"])
def test_a_server_that_warns_lets_refused_fields_pass(unknown_fields, caplog):
    sizes = {"/v1/responses": {"max_output_tokens": 2}, "/api/chat": {}}
    with serving({"unknown_fields": unknown_fields}) as running:
        for what, (path, body) in REFUSED.items():
            answer = running.post(path, {"model": MODEL} | sizes.get(path, {"max_tokens": 2}) | body)
            assert answer.status_code == (400 if unknown_fields == "refuse" else 200), (what, answer.text)
    logged = [line for line in caplog.messages if "is ignored" in line]
    assert len(logged) == (0 if unknown_fields == "refuse" else len(REFUSED))


def test_minus_one_truncates_to_the_longest_prompt(running):
    longest = running.engine.config.max_model_len - 1
    long = [5] * (longest + 50)
    for path, body in (
        ("/v1/completions", {"prompt": long, "max_tokens": 1}),
        ("/v1/embeddings", {"input": long, "encoding_format": None}),
    ):
        assert running.answer(path, body, {"truncate_prompt_tokens": -1})["usage"]["prompt_tokens"] == longest
    running.refuses("/v1/completions", "truncate_prompt_tokens", "", '{"prompt": "x", "truncate_prompt_tokens": 0}')


def test_documents_are_cut_to_their_first_tokens(running):
    long = "The sea is blue and wide. " * 4
    ids = running.answer("/tokenize", {"prompt": long, "add_special_tokens": False})["tokens"]
    begun = running.answer("/detokenize", {"tokens": ids[:5]})["prompt"]
    cut, expected = (
        running.answer("/v2/rerank", '{"query": "sea", "method": "cosine"}', given)["results"][0]
        for given in ({"documents": [long], "max_tokens_per_doc": 5}, {"documents": [begun]})
    )
    assert cut["relevance_score"] == expected["relevance_score"] and cut["document"]["text"] == long


def test_a_reranker_without_words_for_its_answers_compares_embeddings(running):
    body = {"query": "sea", "documents": ["The sea", "The sun"]}
    plain, cosine = (running.answer("/v1/rerank", body, more)["results"] for more in ("{}", '{"method": "cosine"}'))
    assert plain == cosine
    assert "spells 'yes'" in running.error("/v1/rerank", body, '{"method": "yes_no"}')["message"]
