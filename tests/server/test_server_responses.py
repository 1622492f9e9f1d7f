"""/v1/responses: OpenAI's own client against a live server, whole and streamed."""

import json
from functools import partial

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from nanovllm import SamplingParams
from tests.support.scripted import (
    END,
    fails_after,
    prompt_of,
    says,
    without_repeats,
)
from tests.support.serving import MODEL, served, thinking_server, user

TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
ANSWER = f"Two and two</think>Let me see.{CALL}"
EVENTS = TypeAdapter(ResponseStreamEvent)
SEALED = ["reasoning.encrypted_content"]


running = served(thinking_server)


@pytest.fixture(scope="module")
def create(client):
    return partial(client.responses.create, model=MODEL, input="Hello")


@pytest.fixture(scope="module")
def stream_of(client):
    return partial(client.responses.stream, model=MODEL, input="Hello")


def test_an_answer_has_items_of_thought_message_and_call(running, monkeypatch, create):
    says(running, monkeypatch, ANSWER)
    answer = create(tools=TOOLS, instructions="Be brief.", metadata={"a": "b"}, include=SEALED)
    Response.model_validate(answer.model_dump(), strict=True)
    thought, message, call = answer.output
    assert (thought.type, thought.summary, thought.content[0].text) == ("reasoning", [], "Two and two")
    assert (message.type, message.content[0].text, answer.output_text) == ("message", "Let me see.", "Let me see.")
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "Paris"}')
    assert (answer.status, answer.incomplete_details, answer.metadata) == ("completed", None, {"a": "b"})
    assert (answer.store, answer.previous_response_id) == (False, None)
    usage = answer.usage
    assert usage.output_tokens == len(running.engine.tokenizer(ANSWER)["input_ids"]) + 1
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_what_a_request_leaves_out_is_told_as_it_was_used(running, monkeypatch, create):
    says(running, monkeypatch, "One.")
    defaults = SamplingParams(temperature=0.25, top_p=0.5)
    monkeypatch.setattr(running.engine, "default_sampling_params", defaults)
    answer = create()
    assert (answer.temperature, answer.top_p) == (0.25, 0.5)
    assert create(top_p=0.75).top_p == 0.75


def test_a_stream_has_the_events_of_the_whole_answer(running, monkeypatch, create, stream_of):
    says(running, monkeypatch, ANSWER)
    options = {"tools": TOOLS, "include": SEALED}
    events = list(create(stream=True, **options))
    for event in events:
        EVENTS.validate_python(event.model_dump(by_alias=True), strict=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    text = "output_item.added content_part.added {0}.delta {0}.done content_part.done output_item.done"
    call = "output_item.added function_call_arguments.delta function_call_arguments.done output_item.done"
    items = [text.format("reasoning_text"), text.format("output_text"), call]
    assert " ".join(without_repeats(kinds)) == " ".join(["created in_progress", *items, "completed"])
    done = [event.item for event in events if event.type == "response.output_item.done"]
    last = events[-1].response
    assert done == last.output
    whole = create(**options)

    def without_ids(response):
        items = [item.model_dump(exclude={"id", "call_id"}, exclude_none=True) for item in response.output]
        return items, response.usage.output_tokens, response.usage.output_tokens_details

    assert without_ids(last) == without_ids(whole)
    with stream_of(**options) as stream:
        for _ in stream:
            pass
        assert without_ids(stream.get_final_response()) == without_ids(whole)


def test_a_conversation_reaches_the_template(running, monkeypatch):
    says(running, monkeypatch, "Fine")
    prompts = prompt_of(running, monkeypatch)
    body = json.loads("""{"input": [
        {"role": "user", "content": [{"type": "input_text", "text": "One"}, {"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "SG0="},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [
            {"type": "output_text", "text": "So", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "f", "call_id": "c", "name": "weather",
         "arguments": "{\\"city\\": \\"Paris\\"}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "Rain"}]},
        {"type": "message", "role": "developer", "content": "Now."}],
        "instructions": "Be brief.", "reasoning": {"effort": "none", "summary": "auto"}, "tool_choice": "auto",
        "store": false, "prompt_cache_key": "k", "text": {"verbosity": "medium"}}""")
    body["tools"] = [*TOOLS, {"type": "web_search"}, {"type": "custom", "name": "x"}]
    answer = running.post("/v1/responses", body)
    assert answer.headers["x-skipped-tools"] == "custom, web_search"
    assert [tool["name"] for tool in answer.json()["tools"]] == ["weather"]
    assert prompts == [
        f"weather <|system|>Be brief.{END}<|user|>One\ntwo{END}<|assistant|><think>Hm</think>So"
        f'[weather {{"city": "Paris"}}]{END}<|tool|>Rain{END}<|system|>Now.{END}<|assistant|>'
        "<think>\n\n</think>\n\n"
    ]


def test_an_answer_that_is_cut_off_is_incomplete(running, monkeypatch, create):
    says(running, monkeypatch, "So.</think>One two three")
    options = {"max_output_tokens": 9}
    whole = create(**options)
    *_, last = create(stream=True, **options)
    for answer in (whole, last.response):
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output[-1].status == "incomplete"
    assert last.type == "response.incomplete"


def test_a_stream_that_fails_ends_as_a_failed_response(running, monkeypatch, create):
    says(running, monkeypatch, "So.</think>One two three four five six")
    fails_after(running, monkeypatch, 5)
    *_, last = create(stream=True)
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    monkeypatch.undo()
    assert create(max_output_tokens=5).error is None


@pytest.mark.parametrize(
    "body, param, named",
    [
        ('{"previous_response_id": "resp_1"}', "previous_response_id", "send the whole conversation"),
        ('{"store": true}', "store", "nothing is stored"),
        ('{"conversation": "c"}', "conversation", "nothing is stored"),
        ('{"input": []}', "input", "empty"),
        ('{"input": [{"type": "item_reference", "id": "x"}]}', "input[0].type", "item_reference"),
        ({"input": [user([{"type": "input_file"}])]}, "input[0].content[0].type", "input_text"),
        ('{"input": [{"type": "function_call_output", "output": "x"}]}', "input[0].call_id", "required"),
        ('{"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": 1}]}',
         "input[0].arguments", ""),
        ('{"input": [{"type": "reasoning", "encrypted_content": "??"}]}', "input", "at least 1"),
        ('{"tools": [{"type": "function"}]}', "tools[0].name", "required"),
        ('{"tool_choice": "required"}', "tool_choice", "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "time"}}, "tool_choice", "'time'"),
        ('{"text": {"format": {"type": "json_schema", "name": "x"}}}', "text.format.schema", "required"),
        ('{"reasoning": {"effort": "enormous"}}', "reasoning.effort", "low"),
        ('{"max_output_tokens": 0}', "max_output_tokens", "1"),
        ('{"include": ["message.output_text.logprobs"]}', "include", "encrypted_content"),
        ('{"zzz": 1}', "zzz", "unknown field"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(running, body, param, named):
    running.refuses("/v1/responses", param, named, {"input": "Hello"}, body)
