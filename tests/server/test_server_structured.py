"""Constrained answers of a live server: forms, required and strict tools, budgets of thought, through real clients."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field

from nanovllm.features.grammar.compiler import GrammarCompiler
from nanovllm.features.intake.intake import form_turn
from nanovllm.serving.server.answers.answer_format import AnswerFormat
from nanovllm.serving.server.answers.grammar import build_form
from nanovllm.serving.server.answers.tool_calls import FORMATS
from nanovllm.serving.server.openai import turn
from nanovllm.serving.server.openai.forms import constraints_of
from nanovllm.serving.server.openai.protocol import ChatRequest
from tests.support.scripted import THINKING_TEMPLATE, ending_model, thinking_tokenizer
from tests.support.serving import MODEL, function_tool, served, serving, user
from tests.support.tiny_models import tiny_model, tiny_tokenizer

ASK = [user("Hello")]
ARGUMENTS = json.loads("""{"type": "object", "required": ["city", "days"], "additionalProperties": false,
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}}}""")
SCHEMAS = {"weather": ARGUMENTS, "time": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [function_tool(name, parameters=schema, strict=True) for name, schema in SCHEMAS.items()]


class Weather(BaseModel):
    """A document of bounded length: the model draws at random."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=0, le=9)


class Days(BaseModel):
    """The same without bounds of numbers, which Anthropic's client keeps from the server and checks by itself."""

    city: Literal["Paris", "Rome"]
    days: Literal[3, 5, 7]


running = served(lambda: serving(model=ending_model()))


def test_openais_parse_gives_the_model_of_a_chat_and_of_a_response(client):
    for _ in range(2):
        chat = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Weather)
        assert isinstance(chat.choices[0].message.parsed, Weather)
        response = client.responses.parse(model=MODEL, input="Hello", text_format=Weather)
        assert isinstance(response.output_parsed, Weather)
    with client.chat.completions.stream(model=MODEL, messages=ASK, response_format=Weather) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)


def test_anthropics_parse_gives_the_model(running):
    with running.anthropic() as client:
        parsed = client.messages.parse(model=MODEL, max_tokens=200, messages=ASK, output_format=Days)
        assert isinstance(parsed.parsed_output, Days)


@pytest.mark.parametrize(
    "field, value, matches",
    [
        ("guided_choice", ["yes", "no"], lambda text: text in ("yes", "no")),
        ("guided_regex", r"[a-f]{3}-\d{2}/", lambda text: re.fullmatch(r"[a-f]{3}-\d{2}/", text)),
        ("guided_grammar", 'start: "a" | "b" start', lambda text: re.fullmatch("b*a", text)),
        ("guided_json", json.dumps(ARGUMENTS), lambda text: jsonschema.validate(json.loads(text), ARGUMENTS) is None),
        ("structured_outputs", {"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ("structured_outputs", {"json": ARGUMENTS}, lambda text: Weather.model_validate_json(text)),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "w", "schema": ARGUMENTS}},
         lambda text: Weather.model_validate_json(text)),
    ],
)  # fmt: skip
def test_every_form_is_kept_by_both_endpoints(running, field, value, matches):
    for path, more in (("chat/completions", {"messages": ASK}), ("completions", {"prompt": "Hello"})):
        body = {"max_tokens": 400, "n": 2, "seed": 3, field: value} | more
        for choice in running.answer(f"/v1/{path}", body)["choices"]:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert (choice["finish_reason"], bool(matches(text))) == ("stop", True), text


def test_every_protocol_makes_a_required_call(running, client):
    tool = {"name": "weather", "input_schema": ARGUMENTS}
    with running.anthropic() as other:
        message = other.messages.create(
            model=MODEL,
            max_tokens=200,
            messages=ASK,
            tools=[tool],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
    assert message.stop_reason == "tool_use"
    for block in message.content:
        jsonschema.validate(block.input, ARGUMENTS)
    flat = {"type": "function", "name": "weather", "parameters": ARGUMENTS, "strict": True}
    response = client.responses.create(
        model=MODEL, input="Hello", tools=[flat], tool_choice={"type": "function", "name": "weather"}
    )
    for item in response.output:
        jsonschema.validate(json.loads(item.arguments), ARGUMENTS)


def test_a_budget_ends_the_thought_and_the_document_follows():
    tokenizer = thinking_tokenizer(THINKING_TEMPLATE)
    tokenizer.add_tokens(["<think>", "</think>"])
    model = tiny_model(vocab_size=514, eos_token_id=tokenizer.convert_tokens_to_ids("<|end|>"))
    with serving(model=model, tokenizer=tokenizer) as running:
        body = {"messages": ASK, "max_tokens": 100, "thinking_token_budget": 5, "guided_choice": ["yes", "no"]}
        for more in (*({"seed": seed} for seed in range(4)), {"max_tokens": 20, "guided_choice": None}):
            answer = running.answer("/v1/chat/completions", body, more)
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 6  # the marker is one
            assert "seed" not in more or answer["choices"][0]["message"]["content"] in ("yes", "no")
        with running.anthropic() as client:
            thinking = {"type": "enabled", "budget_tokens": 3}
            message = client.messages.create(model=MODEL, max_tokens=30, messages=ASK, thinking=thinking)
        assert message.content[0].type == "thinking" and message.usage.output_tokens > 4


ODD = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}


@pytest.mark.parametrize(
    "body, param",
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ODD}}},
         "response_format.json_schema.schema"),
        ({"guided_json": ODD}, "guided_json"),
        ('{"guided_json": "{"}', "guided_json"),
        ('{"guided_regex": "(("}', "guided_regex"),
        ('{"guided_grammar": "begin: x"}', "guided_grammar"),
        ('{"structured_outputs": {"grammar": "x"}}', "structured_outputs.grammar"),
        ('{"structured_outputs": {}}', "structured_outputs"),
        ('{"structured_outputs": {"structural_tag": "x"}}', "structured_outputs.structural_tag"),
        ('{"guided_choice": []}', "guided_choice"),
        ('{"guided_choice": ["a"], "guided_regex": "a"}', "guided_regex"),
        ({"tools": [function_tool("f", parameters=ODD, strict=True)],
          "tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "tool_choice": function_tool("x")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ('{"thinking_token_budget": 0}', "thinking_token_budget"),
    ],
)  # fmt: skip
def test_what_cannot_be_constrained_is_refused_by_name(running, body, param):
    running.refuses("/v1/chat/completions", param, "", {"messages": ASK}, body)


@pytest.mark.parametrize("choice", [None, "auto"])
def test_beside_a_document_tools_may_still_be_called(choice):
    document = {"type": "json_schema", "json_schema": {"name": "w", "schema": ARGUMENTS}}
    tools = [function_tool("weather", parameters=ARGUMENTS)]
    given = {"messages": ASK, "tools": tools, "tool_choice": choice, "response_format": document}
    body = ChatRequest.model_validate(given)
    constraints = constraints_of(body, body.callable_tools)
    tokenizer = tiny_tokenizer()
    built = build_form(constraints, AnswerFormat(None, FORMATS["hermes"]), tokenizer, is_open=False)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
    for text in ('{"city":"Rome","days":2}', call):
        matcher = GrammarCompiler(tokenizer, len(tokenizer), [3]).matcher(built).copy()
        for token_id in tokenizer(text)["input_ids"]:
            matcher.consume(token_id)
        assert matcher.is_complete(), text


def test_strict_tools_are_checked_in_threads_of_forms_while_the_server_answers_others(
    running, client, monkeypatch, chat
):
    is_checked, may_go_on, threads = threading.Event(), threading.Event(), []

    def held(*arguments, **options):
        threads.append(threading.current_thread().name)
        with form_turn():  # as a trial of a tool's schema
            is_checked.set()
            may_go_on.wait(60.0)
        return build_form(*arguments, **options)

    monkeypatch.setattr(turn, "build_form", held)
    with ThreadPoolExecutor(1) as elsewhere:
        answer = elsewhere.submit(chat, tools=TOOLS, tool_choice="required")
        try:
            assert is_checked.wait(60.0)
            assert running.get("/health").status_code == 200
            assert chat(max_tokens=4).choices
            assert not answer.done()
        finally:
            may_go_on.set()
        assert answer.result().choices[0].message.tool_calls
    assert all(name.startswith("nanovllm-prepare") for name in threads)
