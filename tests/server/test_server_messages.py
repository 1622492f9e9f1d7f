"""/v1/messages: Anthropic's own client against a live server, whole and streamed."""

import json
from functools import partial

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from nanovllm.serving.server.anthropic.protocol import MessagesRequest
from nanovllm.serving.server.anthropic.translation import as_chat
from tests.support.scripted import (
    END,
    fails_after,
    prompt_of,
    says,
    without_repeats,
)
from tests.support.serving import MODEL, served, serving, thinking_server, user
from tests.support.tiny_models import tiny_tokenizer

ASK = [user("Hello")]
TOOLS = json.loads("""[{"name": "weather", "description": "The weather.", "cache_control": {"type": "ephemeral"},
    "input_schema": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}},
                     "required": ["city"], "additionalProperties": false}}]""")
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
ANSWER = f"Two and two</think>Let me see.{CALL}"
EVENTS = TypeAdapter(RawMessageStreamEvent)


running = served(thinking_server)


@pytest.fixture(scope="module")
def client(running):
    with running.anthropic() as client:
        yield client


@pytest.fixture(scope="module")
def create(client):
    return partial(client.messages.create, model=MODEL, messages=ASK)


@pytest.fixture(scope="module")
def stream_of(client):
    return partial(client.messages.stream, model=MODEL, messages=ASK)


def test_an_answer_is_a_message_of_thought_text_and_tool_use(running, monkeypatch, create):
    says(running, monkeypatch, ANSWER)
    answer = create(max_tokens=200, tools=TOOLS)
    Message.model_validate(answer.model_dump(), strict=True)
    thought, text, call = answer.content
    assert (thought.type, thought.thinking, len(thought.signature)) == ("thinking", "Two and two", 64)
    assert (text.type, text.text) == ("text", "Let me see.")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Paris"})
    assert call.id.startswith("toolu_") and answer.id.startswith("msg_")
    ends = (answer.stop_reason, answer.stop_sequence, answer.role, answer.model)
    assert ends == ("tool_use", None, "assistant", MODEL)
    num_said = len(running.engine.tokenizer(ANSWER)["input_ids"]) + 1
    assert answer.usage.output_tokens == num_said


def test_a_stream_has_the_events_of_the_whole_answer(running, monkeypatch, create, stream_of):
    says(running, monkeypatch, ANSWER)
    events = list(create(max_tokens=200, tools=TOOLS, stream=True))
    for event in events:
        EVENTS.validate_python(event.model_dump(), strict=True)
    kinds = [event.type for event in events]
    blocks = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert without_repeats(kinds) == ["message_start", *blocks, *blocks, *blocks, "message_delta", "message_stop"]
    starts = [event for event in events if event.type == "content_block_start"]
    assert [event.index for event in starts] == [0, 1, 2]
    assert [event.content_block.type for event in starts] == ["thinking", "text", "tool_use"]
    with stream_of(max_tokens=200, tools=TOOLS) as stream:
        joined = stream.get_final_message()
    whole = create(max_tokens=200, tools=TOOLS)

    def without_ids(message):
        given = message.model_dump(exclude={"id", "usage"}, exclude_none=True)
        return given | {"content": [{**block, "id": "" if "id" in block else None} for block in given["content"]]}

    assert without_ids(joined) == without_ids(whole)
    assert joined.usage.output_tokens == whole.usage.output_tokens


def test_an_agent_makes_several_calls_without_a_malformed_event(running, client, monkeypatch, stream_of):
    says(running, monkeypatch, 'So.</think><tool_call>{"name": "weather"}</tool_call>')
    messages = list(ASK)
    for number in range(6):
        with stream_of(max_tokens=100, messages=messages, tools=TOOLS) as stream:
            for event in stream:
                assert event.type
            answer = stream.get_final_message()
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        assert (answer.stop_reason, call.input) == ("tool_use", {})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": f"{number}"}]}
        content = [block.model_dump(exclude_none=True) for block in answer.content]
        messages = [messages[0], {"role": "assistant", "content": content}, user([result])]
    # The last conversation again, except the result.
    assert answer.usage.cache_read_input_tokens > 0
    count = client.messages.count_tokens(model=MODEL, messages=messages, tools=TOOLS).input_tokens
    assert answer.usage.cache_read_input_tokens + answer.usage.input_tokens == count


def test_a_conversation_reaches_the_template(running, client, monkeypatch, create):
    says(running, monkeypatch, "Fine")
    prompts = prompt_of(running, monkeypatch)
    messages = json.loads("""[
        {"role": "user", "content": [{"type": "text", "text": "One", "cache_control": {"type": "ephemeral"}},
                                     {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "x"}, {"type": "text", "text": "So"},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "Rain", "is_error": true},
            {"type": "text", "text": "And now?"}]}]""")
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    body = {"messages": messages, "system": system, "thinking": {"type": "disabled"}}
    create(max_tokens=9, **body)
    assert prompts == [
        f"<|system|>Be brief.{END}<|user|>One\ntwo{END}<|assistant|><think>Hm</think>So"
        f'[weather {{"city": "Paris"}}]{END}<|tool|>Error: Rain{END}<|user|>And now?{END}<|assistant|>'
        "<think>\n\n</think>\n\n"
    ]
    counted = client.messages.count_tokens(model=MODEL, **body)
    assert counted.input_tokens == len(tiny_tokenizer()(prompts[0])["input_ids"])


def test_text_behind_a_result_is_a_message_of_its_own():
    call = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
    texts = [{"type": "text", "text": text} for text in "ab"]
    result = {"type": "tool_result", "tool_use_id": "t", "content": "1"}
    turns = [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [texts[0], result, texts[1]]}]
    given = as_chat(MessagesRequest.model_validate({"model": "m", "max_tokens": 5, "messages": turns}))
    found = [(message.role, message.content) for message in given.messages[2:]]
    assert found == [("user", "a"), ("tool", "1"), ("user", "b")]


def test_a_system_message_within_a_conversation_stays_at_its_place(running, monkeypatch):
    says(running, monkeypatch, "Fine")
    prompts = prompt_of(running, monkeypatch)
    late = {"role": "system", "content": [{"type": "text", "text": "In git."}]}
    given = [*ASK, late, {"role": "assistant", "content": "Yes?"}, user("Now")]
    body = {"model": MODEL, "max_tokens": 9, "messages": given, "thinking": {"type": "disabled"}}
    assert running.post("/v1/messages", body).status_code == 200
    assert prompts[0].startswith(f"<|user|>Hello{END}<|system|>In git.{END}<|assistant|>Yes?{END}<|user|>Now{END}")


def test_an_answer_that_is_begun_goes_on(running, monkeypatch, create):
    says(running, monkeypatch, " is four")
    prompts = prompt_of(running, monkeypatch)
    messages = [*ASK, {"role": "assistant", "content": "It"}]
    answer = create(max_tokens=20, messages=messages)
    assert (answer.content[0].text, answer.stop_reason) == (" is four", "end_turn")
    assert prompts[0].endswith("<|assistant|>It")


def test_why_an_answer_ends(running, monkeypatch, create, stream_of):
    says(running, monkeypatch, "So.</think>One two three")
    stopped = create(max_tokens=50, stop_sequences=[" two", "x"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[-1].text) == ("stop_sequence", " two", "One")
    assert create(max_tokens=2).stop_reason == "max_tokens"
    with stream_of(max_tokens=2) as stream:
        assert stream.get_final_message().stop_reason == "max_tokens"


@pytest.mark.parametrize(
    "body, named",
    [
        ('{"max_tokens": 0}', "max_tokens"),
        ('{"messages": []}', "messages"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "messages[0].role"),
        ({"messages": [user([{"type": "document"}])]}, "messages[0].content[0].type"),
        ({"messages": [user([{"type": "text", "text": 3}])]}, "messages[0].content[0].text"),
        ({"messages": [user([{"type": "tool_result"}])]}, "messages[0].content[0].tool_use_id"),
        ('{"tools": [{"input_schema": {}}]}', "tools[0].name"),
        ('{"tools": [{"type": "web_search_20250305", "name": "web_search"}]}', "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "time"}}, "tool_choice names 'time'"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice: name"),
        ('{"tool_choice": {"type": "any"}}', "tool_choice is 'required', but there are no tools"),
        ('{"thinking": {"type": "enabled"}}', "thinking: budget_tokens"),
        ('{"thinking": {"type": "enabled", "budget_tokens": 5}}', "thinking.budget_tokens needs an end of thought"),
        ('{"stop_sequences": [""]}', "stop_sequences"),
        ('{"temperature": -1.0}', "temperature"),
        ('{"container": "x"}', "container: not supported"),
        ('{"context_management": {"edits": [{"type": "compact_20260112"}]}}', "context_management"),
        ('{"context_management": {"edits": 5}}', "context_management: edits must be a list"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools has two functions of the name 'weather'"),
        ('{"zzz": 1}', "zzz: unknown field"),
        ({"messages": [user("x" * 20_000)]}, "max_prompt_chars"),
    ],
)  # fmt: skip
def test_bad_input_is_named_in_anthropics_form(running, body, named):
    whole = {"model": MODEL, "max_tokens": 5, "messages": ASK}
    answer = running.answer("/v1/messages", whole, body, status=400)
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error"), answer
    assert named in answer["error"]["message"]


def test_errors_are_the_clients_own(running, client, monkeypatch, create):
    with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
        client.messages.create(model="other", max_tokens=5, messages=ASK)
    with serving({"api_key": ["secret"]}) as guarded:
        with guarded.anthropic("wrong") as stranger, pytest.raises(anthropic.AuthenticationError):
            stranger.messages.create(model=MODEL, max_tokens=5, messages=ASK)
        with guarded.anthropic("secret") as friend:
            assert friend.messages.create(model=MODEL, max_tokens=5, messages=ASK).usage.output_tokens == 5


def test_a_stream_that_fails_ends_with_an_error_event(running, monkeypatch, create):
    says(running, monkeypatch, "So.</think>One two three four five six")
    fails_after(running, monkeypatch, 5)
    with pytest.raises(anthropic.APIStatusError, match="the request failed in the engine"):
        list(create(max_tokens=50, stream=True))
    monkeypatch.undo()
    assert create(max_tokens=50).stop_reason
