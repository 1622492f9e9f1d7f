"""Arguments of tool calls that stream, in each protocol, and calls that are cut off."""

import json

from tests.support.async_llms import slow_steps
from tests.support.scripted import TOOL_TEMPLATE, says
from tests.support.serving import MODEL, function_tool, served, thinking_server, user

ARGUMENTS = {"path": "/x", "content": 'one "two" three'}
CALLS = (
    'So. <tool_call>{"name": "write", "arguments": ' + json.dumps(ARGUMENTS) + "}</tool_call>"
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
WRITE = {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}}
TOOLS = [
    function_tool("write", parameters=WRITE),
    function_tool("now"),
]
MESSAGES = [user("Hello")]
EXPECTED = [("write", ARGUMENTS), ("now", {})]


running = served(lambda: thinking_server(TOOL_TEMPLATE))


def events(running, path, body):
    """The events of a streamed answer."""
    answer = running.post(path, {"model": MODEL, "stream": True} | body)
    assert answer.status_code == 200, answer.text
    data = (line.removeprefix("data: ") for line in answer.text.splitlines())
    return [json.loads(line) for line in data if line.startswith("{")]


def test_chat_completions_stream_arguments_that_join_to_the_whole_answers(running, monkeypatch):
    says(running, monkeypatch, CALLS)
    calls, content = {}, ""
    num_parts = 0
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 200}
    with slow_steps(running.engine):  # the deltas of a busy front join
        streamed = events(running, "/v1/chat/completions", body)
    for event in streamed:
        (choice,) = event["choices"]
        content += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls", ()):
            assert ("id" in part) == ("name" in part["function"]) == (part["index"] not in calls)
            call = calls.setdefault(part["index"], {"name": part["function"].get("name"), "arguments": ""})
            call["arguments"] += part["function"]["arguments"]
            num_parts += 1
    (whole,) = running.answer("/v1/chat/completions", body)["choices"]
    assert num_parts > 10
    functions = [call["function"] for call in whole["message"]["tool_calls"]]
    assert functions == list(calls.values())
    assert [(own["name"], json.loads(own["arguments"])) for own in functions] == EXPECTED
    assert content == whole["message"]["content"] == "So."
    assert choice["finish_reason"] == whole["finish_reason"] == "tool_calls"
    (text,) = running.answer("/v1/chat/completions", body, {"tool_choice": "none"})["choices"]
    assert (text["finish_reason"], text["message"]["content"]) == ("stop", CALLS) and "tool_calls" not in text[
        "message"
    ]


def test_a_call_that_is_cut_off_is_text_whole_and_stays_incomplete_in_a_stream(running, monkeypatch):
    says(running, monkeypatch, CALLS)
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 60}
    (whole,) = running.answer("/v1/chat/completions", body)["choices"]
    assert whole["finish_reason"] == "length" and "tool_calls" not in whole["message"]
    assert whole["message"]["content"].startswith('So. <tool_call>{"name": "write", "arguments": {"path')
    choices = [event["choices"][0] for event in events(running, "/v1/chat/completions", body)]
    parts = [part for choice in choices for part in choice["delta"].get("tool_calls", ())]
    arguments = "".join(part["function"]["arguments"] for part in parts)
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "So."
    assert choices[-1]["finish_reason"] == "length"
    assert json.dumps(ARGUMENTS).startswith(arguments) and len(arguments) > 5
