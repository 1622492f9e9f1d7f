"""Messages of every API through the templates of many families: no text is lost, none is refused."""

import json

import pytest

from tests.support.scripted import ending_model, prompt_of
from tests.support.serving import MODEL, function_tool, served, serving, user
from tests.support.template_families import FAMILIES

CHATS = "/v1/chat/completions"
QUESTION, ANSWER, RULE, NEXT = "the question", "an answer", "a late rule", "go on"


running = served(lambda: serving(model=ending_model(), max_model_len=2048, num_kv_blocks=400))


def chat_body(kind, *, arguments='{"path": "a.txt"}'):
    """A conversation of one kind for /v1/chat/completions."""
    ask, answer = user(QUESTION), {"role": "assistant", "content": ANSWER}
    tool = function_tool("read")
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name in (("call_1a2b3c", "read"), ("call_4d5e6f", "list"))
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"result {call['id'][-1]}"} for call in calls]
    called = {"role": "assistant", "content": None, "reasoning": "a thought", "tool_calls": calls}
    return {
        "text": {"messages": [{"role": "system", "content": "a rule"}, ask]},
        "parts": {"messages": [user([{"type": "text", "text": QUESTION}])]},
        "tools": {"messages": [ask], "tools": [tool]},
        "history": {"messages": [ask, called, *results, user(NEXT)], "tools": [tool]},
        "late system": {"messages": [ask, answer, {"role": "system", "content": RULE}, user(NEXT)]},
    }[kind]


TEXTS = {
    "text": ["a rule", QUESTION],
    "parts": [QUESTION],
    "tools": [QUESTION],
    "history": [QUESTION, "read", "a.txt", "list", "a.txt", NEXT],
    "late system": [QUESTION, ANSWER, RULE, NEXT],
}


def prompt(running, monkeypatch, family, body, path=CHATS):
    """The prompt that a body becomes with a family's template."""
    monkeypatch.setattr(running.engine.tokenizer, "chat_template", FAMILIES.get(family, family))
    prompts = prompt_of(running, monkeypatch)
    running.answer(path, {"max_tokens": 1} if path == CHATS else {}, body)
    return prompts[0]


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_text_of_a_conversation_is_in_the_prompt(running, monkeypatch, family, kind):
    """Other APIs translate theirs to this one, as the tests of each of them show."""
    shown = prompt(running, monkeypatch, family, chat_body(kind))
    place = 0
    for text in TEXTS[kind]:
        place = shown.find(text, place)
        assert place >= 0, (text, shown)
    if kind == "history":
        assert shown.count("result c") == shown.count("result f") == 1
    assert "'type'" not in shown and '"type": "text"' not in shown


@pytest.mark.parametrize("given", [
    '{"path": ', '{"path": "He said "x""}', "[1]", "null and void", '{"path": "\\ud800"}',
    '{"a": ' * 110 + "1" + "}" * 110,
], ids=["cut", "quotes", "list", "words", "surrogate", "deep"])  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_a_malformed_call_stays_in_the_conversation_as_text(running, monkeypatch, family, given):
    """A client cannot take it back: a refusal would end the conversation for good."""
    body = chat_body("history", arguments=given)
    del body["messages"][1]["tool_calls"][1], body["messages"][3]
    shown = prompt(running, monkeypatch, family, body)
    assert given in shown and shown.index(given) < shown.index("result c") < shown.index(NEXT)


FIRST, SECOND = chat_body("history")["messages"][1]["tool_calls"]
MALFORMED = {"id": "call_7g8h9i", "function": {"name": "copy", "arguments": '{"cut'}}
RESULT = ("tool", "result c", {"tool_call_id": FIRST["id"]})


@pytest.mark.parametrize("turns", [
    [("user", QUESTION), ("assistant", "I look", {"tool_calls": [FIRST]}), RESULT, ("user", NEXT)],
    [("user", QUESTION), ("assistant", "I look", {"tool_calls": [FIRST, MALFORMED, SECOND]}), RESULT],
    [("system", "a rule"), ("system", RULE), ("user", QUESTION)],
    [("system", "a rule"), ("user", QUESTION), ("assistant", ANSWER, {"tool_calls": [FIRST]}), RESULT,
     ("system", RULE), ("user", NEXT)],
    [("system", "a rule")],
    [("system", "a rule"), ("assistant", ANSWER), ("user", QUESTION)],
    [("user", QUESTION), ("user", NEXT), ("assistant", ANSWER), ("assistant", "and more"), ("user", "a third")],
], ids=["text and call", "good and malformed", "rules", "late rule", "rule alone", "begun", "twice"])  # fmt: skip
@pytest.mark.parametrize("parts", [False, True], ids=["string", "parts"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_turn_of_an_unusual_conversation_is_lost(running, monkeypatch, family, parts, turns):
    messages, texts = [], []
    for role, text, *fields in turns:
        content = [{"type": "text", "text": "first"}, {"type": "text", "text": text}] if parts else text
        messages.append({"role": role, "content": content} | (fields[0] if fields else {}))
        calls = messages[-1].get("tool_calls", ())
        texts += [text, *("cut" if call is MALFORMED else "a.txt" for call in calls)]
    shown = prompt(running, monkeypatch, family, {"messages": messages})
    assert [text for text in texts if shown.count(text) < texts.count(text)] == [], shown
    assert not parts or shown.count("first") == len(turns)


@pytest.mark.parametrize("family", ["hermes 2", "qwen", "phi 4 mini"])
@pytest.mark.parametrize("schema", [
    True, {}, {"type": ["null", "string"]}, {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    {"type": "array", "items": True},
    {"type": "object", "properties": {"inner": {"type": ["string", "null"]}}},
])  # fmt: skip
def test_any_schema_of_a_parameter_reaches_the_template(running, monkeypatch, family, schema):
    function = {"name": "read", "parameters": {"type": "object", "properties": {"path": schema}}}
    body = chat_body("text") | {"tools": [{"type": "function", "function": function}]}
    shown = prompt(running, monkeypatch, family, body)
    assert all(text in shown for text in ("read", "path", "a rule", QUESTION)), shown


def test_a_template_that_loses_text_in_every_form_is_named_once_in_the_log(running, monkeypatch, caplog):
    template = "{{ messages[-1].content }} of a guard"
    for _ in range(2):
        shown = prompt(running, monkeypatch, template, chat_body("late system"))
        assert NEXT in shown and QUESTION not in shown
    said = "leaves text out of some conversations in every form, such as that of messages[0] (role 'user')"
    assert caplog.text.count(said) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_template_that_refuses_names_the_message_and_its_own_words(running, monkeypatch, path):
    template = (
        "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('no such word') }}{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(running.engine.tokenizer, "chat_template", template)
    items = [user(text) for text in ("good", "bad", "good")]
    field = "input" if "responses" in path else "messages"
    error = running.error(path, {field: items})
    assert error["param"].startswith(field)
    assert all(word in error["message"] for word in (f"{field}[1]", "'user'", "no such word")), error


@pytest.mark.parametrize("failure", [
    "{{ messages.nothing.at_all }}", "{{ 1 + messages }}", "{{ 1 // 0 }}", "{{ messages[0].content.join(1) }}",
])  # fmt: skip
def test_a_template_that_fails_by_itself_is_a_400_too(running, monkeypatch, failure):
    monkeypatch.setattr(running.engine.tokenizer, "chat_template", failure)
    for path in (CHATS, "/v1/responses", "/v1/messages", "/api/chat"):
        field = "input" if "responses" in path else "messages"
        body = {"model": MODEL, field: [user(QUESTION)]} | ({"max_tokens": 1} if path == "/v1/messages" else {})
        assert running.error(path, body), path


def test_what_an_answer_has_beside_its_text_is_taken_back(running, monkeypatch):
    answer = json.loads("""{"role": "assistant", "content": null, "refusal": "I will not.", "tool_calls": [],
        "reasoning_content": "a thought", "reasoning": "a thought", "annotations": [], "audio": null,
        "function_call": null}""")
    parts = {"role": "assistant", "content": [{"type": "refusal", "refusal": "Nor that."}]}
    ask = user(QUESTION)
    empty = {"role": "tool", "tool_call_id": "call_1", "content": None}
    for path, body in {
        CHATS: {"messages": [ask, answer, ask, parts, empty, ask]},
        "/v1/responses": {"input": [ask, {"type": "message", "role": "assistant", "content": [
            {"type": "refusal", "refusal": "I will not."}, {"type": "refusal", "refusal": "Nor that."}]}, ask],
            "max_output_tokens": 1},
    }.items():  # fmt: skip
        shown = prompt(running, monkeypatch, "hermes", body, path)
        assert "I will not." in shown and "Nor that." in shown


def test_ids_of_calls_stay_the_same_from_turn_to_turn(running, monkeypatch):
    """Else no prefix of a conversation would be found in the cache."""
    body = chat_body("history")
    first = prompt(running, monkeypatch, "mistral", body)
    body["messages"].append({"role": "assistant", "content": ANSWER})
    body["messages"].append(user(NEXT))
    second = prompt(running, monkeypatch, "mistral", body)
    assert second.startswith(first.removesuffix("<|assistant|>"))
