"""Arguments of tool calls that stream, in each protocol, and calls that are cut off."""

import json

from tests.support.scripted import TOOL_TEMPLATE, ending_model, says, thinking_tokenizer
from tests.support.serving import MODEL, function_tool, served, serving, user

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


running = served(
    lambda: serving({"tool_format": "hermes"}, tokenizer=thinking_tokenizer(TOOL_TEMPLATE), model=ending_model())
)


def events(running, path, body):
    """The events of a streamed answer."""
    with running.http() as http, http.stream("POST", path, json={"model": MODEL, "stream": True} | body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data.startswith("{"):
                yield json.loads(data)


def test_chat_completions_stream_arguments_that_join_to_the_whole_answers(running, monkeypatch):
    says(running, monkeypatch, CALLS)
    calls = {}
    num_parts = 0
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 200}
    for event in events(running, "/v1/chat/completions", body):
        for part in event["choices"][0]["delta"].get("tool_calls", ()):
            call = calls.setdefault(part["index"], {"name": part["function"].get("name"), "arguments": ""})
            call["arguments"] += part["function"]["arguments"]
            num_parts += 1
    whole = running.post("/v1/chat/completions", {"model": MODEL} | body).json()["choices"][0]
    assert num_parts > 10
    functions = [call["function"] for call in whole["message"]["tool_calls"]]
    assert [{"name": own["name"], "arguments": own["arguments"]} for own in functions] == list(calls.values())
    assert [(own["name"], json.loads(own["arguments"])) for own in functions] == EXPECTED
    assert whole["message"]["content"] == "So."


def test_messages_stream_inputs_as_partial_json(running, monkeypatch):
    says(running, monkeypatch, CALLS)
    blocks = []
    tools = [{"name": "write", "input_schema": WRITE}, {"name": "now", "input_schema": {"type": "object"}}]
    body = {"messages": MESSAGES, "tools": tools, "max_tokens": 200}
    for event in events(running, "/v1/messages", body):
        if event["type"] == "content_block_start":
            blocks.append((event["content_block"], []))
        elif event["type"] == "content_block_delta":
            blocks[event["index"]][1].append(event["delta"].get("partial_json", ""))
    calls = [(block["name"], json.loads("".join(parts))) for block, parts in blocks if block["type"] == "tool_use"]
    assert calls == EXPECTED
    assert len(blocks[1][1]) > 10 and blocks[1][0]["input"] == {}


def test_responses_stream_deltas_of_arguments_and_then_the_whole_item(running, monkeypatch):
    says(running, monkeypatch, CALLS)
    deltas = {}
    done = []
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    for event in events(running, "/v1/responses", {"input": "Hello", "tools": tools, "max_output_tokens": 200}):
        if event["type"] == "response.function_call_arguments.delta":
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
        elif event["type"] == "response.output_item.done" and event["item"]["type"] == "function_call":
            done.append(event["item"])
    assert [(item["name"], json.loads(item["arguments"]), item["status"]) for item in done] == [
        (name, arguments, "completed") for name, arguments in EXPECTED
    ]
    assert {item["id"]: item["arguments"] for item in done} == deltas


def test_ollama_streams_whole_calls(running, monkeypatch):
    says(running, monkeypatch, CALLS)
    body = {"messages": MESSAGES, "tools": TOOLS, "options": {"num_predict": 200}}
    calls = [call for line in events(running, "/api/chat", body) for call in line["message"].get("tool_calls", ())]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == EXPECTED


def test_a_call_that_is_cut_off_is_text_whole_and_stays_incomplete_in_a_stream(running, monkeypatch):
    says(running, monkeypatch, CALLS)
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 60}
    whole = running.post("/v1/chat/completions", {"model": MODEL} | body).json()["choices"][0]
    assert whole["finish_reason"] == "length" and "tool_calls" not in whole["message"]
    assert whole["message"]["content"].startswith('So. <tool_call>{"name": "write", "arguments": {"path')
    arguments, content, reasons = "", "", []
    for event in events(running, "/v1/chat/completions", body):
        choice = event["choices"][0]
        content += choice["delta"].get("content") or ""
        arguments += "".join(part["function"]["arguments"] for part in choice["delta"].get("tool_calls", ()))
        reasons.append(choice["finish_reason"])
    assert (content, reasons[-1]) == ("So.", "length")
    assert json.dumps(ARGUMENTS).startswith(arguments) and len(arguments) > 5
