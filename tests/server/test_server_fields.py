"""Fields that clients send and that cannot change an answer; unknown ones; the error of a prompt that is too long."""

import json

import anthropic
import openai
import pytest

from nanovllm.serving.server.openai import neutral
from nanovllm.serving.server.openai.protocol import ChatRequest, CompletionRequest
from nanovllm.serving.server.settings import ServerSettings
from tests.support.serving import MODEL, function_tool, serving, user

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOL = function_tool("f", parameters={"type": "object", "properties": {}})
MESSAGES = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    user([{"type": "text", "text": "Hello"}]),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "c1"},
]
CACHED = {"cache_control": {"type": "ephemeral"}}
# The same conversation as agents and gateways send it.
DECORATED = [
    *({**message, "content": [message["content"][0] | CACHED]} | CACHED for message in MESSAGES[:2]),
    MESSAGES[2] | CACHED | {"tool_calls": [CALL | {"index": 0}], "annotations": [{"a": "b"}]},
    MESSAGES[3] | CACHED,
]
HARMLESS = json.loads("""{"metadata": {"trace": "7"}, "store": true, "service_tier": "flex", "user": "u1",
    "safety_identifier": "u1", "prompt_cache_key": "k", "prompt_cache_retention": "24h", "top_logprobs": 0,
    "prompt_cache_options": {"mode": "auto"}, "verbosity": "medium", "modalities": ["text"],
    "prediction": {"type": "content", "content": "x"}}""")
# LiteLLM recognises an error for a too long prompt by this text; aider asks LiteLLM.
LITELLM = "this model's maximum context length is"


def test_what_cannot_change_an_answer_is_taken_and_changes_none(running):
    with running.client() as client:
        options = {"model": MODEL, "seed": 3, "max_tokens": 8, "tools": [TOOL]}
        plain = client.chat.completions.create(messages=MESSAGES, **options)
        other = client.chat.completions.create(messages=DECORATED, **(options | {"tools": [TOOL | CACHED]}), **HARMLESS)
        chunks = client.chat.completions.create(
            messages=DECORATED, **options, stream=True,
            stream_options={"include_usage": True, "include_obfuscation": True},
        )  # fmt: skip
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert other.choices[0].message == plain.choices[0].message
        assert other.usage == plain.usage.model_copy(
            update={"prompt_tokens_details": other.usage.prompt_tokens_details}
        )
        assert text == (plain.choices[0].message.content or "")


@pytest.mark.parametrize("padding", [0, 40_000])  # a large body is read in another thread
def test_unknown_fields_are_left_out_and_logged_once_where_the_server_is_told_to(caplog, padding):
    settings = {"unknown_fields": "warn", "max_prompt_chars": 100_000}
    body = {"messages": [*MESSAGES, {"role": "user", "content": "x", "mood": 1}], "max_tokens": 2, "tempratur": 9,
            "other": 1, "seed": 3}  # fmt: skip
    with serving(settings) as running:
        known = {"messages": [*MESSAGES, user("x")], "max_tokens": 2, "seed": 3}
        padded = body | {"metadata": {"pad": " " * padding}}
        _, answer, expected = (running.answer("/v1/chat/completions", given) for given in (padded, padded, known))
        assert answer["choices"] == expected["choices"]
        assert running.error("/v1/chat/completions", known, '{"logit_bias": {"x": 1}}')  # a bad value of a known field
    logged = [line for line in caplog.messages if "is ignored" in line]
    names = ("ChatRequest.tempratur", "ChatRequest.other", "UserMessage.mood")
    assert len(logged) == 3 and all(any(name in line for line in logged) for name in names)


def test_the_switch_has_two_positions():
    with pytest.raises(ValueError, match="unknown_fields is 'drop'; it must be one of refuse, warn"):
        ServerSettings(unknown_fields="drop")


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(running):
    with running.client() as client:
        long = [user("word " * 1000)]
        for create, given in (
            (client.completions.create, {"prompt": [5] * 600}),
            (client.completions.create, {"prompt": "x" * 20_000}),
            (client.chat.completions.create, {"messages": long}),
        ):
            with pytest.raises(openai.BadRequestError, match=f"(?i){LITELLM}") as refused:
                create(model=MODEL, **given)
            assert refused.value.code == "context_length_exceeded"
    too_long = pytest.raises(anthropic.BadRequestError, match=f"prompt is too long: (?i:.*{LITELLM})")
    with running.anthropic() as client, too_long:
        client.messages.create(model=MODEL, messages=long, max_tokens=4)


# Further fields of other servers at values without effect; neutral.py's tables have the rest.
NEUTRAL = json.loads("""{"seed": -1, "best_of": 1, "length_penalty": 1, "request_id": "r1", "min_p": 0, "top_k": -1,
    "repeat_penalty": 1.0, "mirostat_tau": 5.0, "dry_multiplier": 0.0, "dry_base": 1.75, "keep_alive": "5m",
    "dry_sequence_breakers": ["\\n"], "guided_decoding_backend": "xgrammar", "stop": [], "logit_bias": {},
    "bad_words": []}""")
OF_CHAT = json.loads("""{"echo": false, "documents": [], "add_special_tokens": false, "include_reasoning": true,
    "max_tokens": -1, "max_completion_tokens": 8, "functions": [], "chat_template": null, "parse_tool_calls": true}""")
PATHS = {"/v1/completions": {"prompt": [5, 6], "max_tokens": 8}, "/v1/chat/completions": {"messages": MESSAGES[:2]}}


@pytest.mark.parametrize("path", PATHS)
def test_neutral_values_of_other_servers_change_nothing(running, path):
    plain = PATHS[path] | {"temperature": 0}
    tables = {"/v1/completions": neutral.COMPLETION, "/v1/chat/completions": neutral.CHAT}
    given = {name: values[0] for name, (values, _) in tables[path].items() if isinstance(values, tuple) and values}
    given |= NEUTRAL | (OF_CHAT if "chat" in path else {"echo": False, "add_special_tokens": True, "suffix": ""})
    expected = running.answer(path, plain, {"max_completion_tokens": 8} if "chat" in path else {})
    assert running.answer(path, given, plain)["choices"] == expected["choices"]


@pytest.mark.parametrize("table", [neutral.COMPLETION, neutral.CHAT], ids=["completions", "chat"])
def test_other_values_of_these_fields_are_refused_by_name(running, table):
    path = "/v1/chat/completions" if table is neutral.CHAT else "/v1/completions"
    for name, (_, reason) in table.items():
        running.refuses(path, name, reason, PATHS[path], {name: {"a": 1}})


def test_null_is_a_neutral_value_of_each_field_that_is_refused():
    ask = [{"role": "user", "content": "a"}]
    for model, given in ((CompletionRequest, {"prompt": [5]}), (ChatRequest, {"messages": ask})):
        model.model_validate(given | dict.fromkeys(model.refused))


def test_a_chat_reports_its_prompt_as_vllm_does(running):
    body = {"messages": MESSAGES[:2], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    answer = running.answer("/v1/chat/completions", body, {"prompt_logprobs": 2})
    ids = answer["choices"][0]["prompt_token_ids"]
    (scored,) = running.answer("/v1/completions", '{"echo": true, "logprobs": 2, "max_tokens": 0}', {"prompt": ids})[
        "choices"
    ]
    expected = scored["logprobs"]
    first, *others = answer["prompt_logprobs"]
    assert first is None and len(others) == len(ids) - 1
    for token_id, entry, text, logprob in zip(
        ids[1:], others, expected["tokens"][1:], expected["token_logprobs"][1:], strict=True
    ):
        assert entry[str(token_id)]["decoded_token"] == text
        assert entry[str(token_id)]["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert {1, 2} <= {theirs["rank"] for theirs in entry.values()}
    for wrong, said in (
        ({"prompt_logprobs": 21}, "at most 20"),
        ({"prompt_logprobs": 1, "stream": True}, "a stream"),
    ):
        running.refuses("/v1/chat/completions", "prompt_logprobs", said, body, wrong)


@pytest.mark.parametrize("path, field, kind, word", [
    ("/v1/chat/completions", "messages", "input_audio", "audio"),
    ("/v1/responses", "input", "input_file", "a file"),
    ("/v1/messages", "messages", "document", "a file"),
])  # fmt: skip
def test_media_that_are_not_read_are_named(running, path, field, kind, word):
    content = [{"type": "input_text" if field == "input" else "text", "text": "What is this?"}, {"type": kind}]
    message = running.error(path, {"model": MODEL, "max_tokens": 2, field: [user(content)]})["message"]
    assert f"{field}[0].content[1].type" in message
    assert f"{kind!r} is {word}, and the engine reads text and images" in message
