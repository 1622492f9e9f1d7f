"""Limits on request bodies, and large bodies that are accepted."""

import json
import threading

import pytest

from nanovllm.serving.server import body_limits
from nanovllm.serving.server.errors import ApiError
from tests.support.async_llms import OPTIONS
from tests.support.serving import function_tool, served, serving, user
from tests.support.tiny_models import tiny_model

AS_JSON = {"content-type": "application/json"}
EMPTY = user("")
TOOL = function_tool("f")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


running = served(lambda: serving({"max_prompts": 8, "max_messages": 2000}))


@pytest.mark.parametrize("spaces", [0, 3, 70_000])  # of strings with quotes, backslashes and commas
def test_every_value_of_a_body_counts_and_no_text_does(running, spaces):
    limits = running.app.state.body_limits
    text = '"\\,[{' * 40_000 + "\\" * (spaces % 5)
    limits.check_size(json.dumps({"prompt": text, "user": " " * spaces + text}).encode())
    strings = json.dumps([text[:6]] * (limits.max_items + 1)).encode()
    for body in (strings, b"[" * (limits.max_items + 1), b"[{}" + b",{}" * limits.max_items + b"]"):
        with pytest.raises(ApiError, match=r"the body holds .* strings, arrays and objects; the server takes 65552"):
            limits.check_size(body)
    numbers = b"[1" + b",1" * limits.max_values + b"]"
    with pytest.raises(ApiError, match=f"the server takes {limits.max_values}, enough for 8 prompts"):
        limits.check_size(numbers)
    limits.check_size(b"[1" + b",1" * (limits.max_values - 2) + b"]")


@pytest.mark.parametrize("value", ["1.5", "1e5", "1E5", "-2.5e-3", "null", "true", "false", "NaN", "-Infinity"])
def test_values_that_are_scanned_without_a_pause_count_as_items(running, value):
    limits = running.app.state.body_limits
    with pytest.raises(ApiError, match=r"\d+ fractions, booleans and nulls; the server takes 65552: max_body_items"):
        limits.check_size(f"[{value}{f',{value}' * limits.max_items}]".encode())
    limits.check_size(f"[{value}{f',{value}' * 20_000}]".encode())
    limits.check_size(json.dumps([value] * 20_000).encode())


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 5, 64])
def test_a_body_counts_the_same_in_pieces_of_any_size(monkeypatch, piece_bytes):
    body = json.dumps({'"\\': ["\\", '\\"', 'a"b,[\\\\"', "é😀\n", {"": None}, [], 1.5, True, -3, "\\" * 9]}).encode()
    monkeypatch.setattr(body_limits, "PIECE_BYTES", piece_bytes)
    assert b"".join(body_limits._pieces(body)) == body
    assert body_limits._count(body) == (7 + 4, 3, 14)  # 7 strings


def test_fractions_pass_through_python_where_threads_can_switch(running, monkeypatch):
    seen = []
    monkeypatch.setattr(body_limits, "_fraction", lambda digits: seen.append(digits) or float(digits))
    assert running.error(COMPLETIONS, {"prompt": [0.5] * 20_000}) and len(seen) == 20_000


@pytest.mark.parametrize("bad", [-1, "x", True])
def test_the_wrong_one_of_many_token_ids_is_named(running, bad):
    assert running.error(COMPLETIONS, {"prompt": [[5] * 70_000 + [bad]]})["param"] == "prompt[0][70000]"


@pytest.mark.parametrize(
    "body, said",
    [
        (b'{"prompt": "' + b"\xed\xa0\x80" * 20_000 + b'"}', "the body is not UTF-8"),
        (('{"user": "' + '\\"' * 10_000 + '", "prompt": [5]}').encode("utf-16-le"), "utf-16-le; send UTF-8"),
    ],
    ids=["no text", "another encoding"],
)
def test_a_large_body_that_is_not_utf_8_is_refused(running, body, said):
    error = running.error(COMPLETIONS, content=body, headers=AS_JSON)
    assert error["code"] == "invalid_json" and said in error["message"]


@pytest.mark.parametrize(
    "path, body",
    [
        (CHAT, {"messages": [EMPTY] * 30_000}),
        (CHAT, {"messages": [EMPTY], "tools": [TOOL] * 20_000}),
        (COMPLETIONS, {"prompt": [5], "allowed_token_ids": [7] * 300_000}),
        (COMPLETIONS, {"prompt": [5], "logit_bias": {str(number): 0 for number in range(70_000)}}),
    ],
    ids=["messages", "tools", "allowed_token_ids", "logit_bias"],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(running, monkeypatch, path, body):
    monkeypatch.setattr(body_limits, "json", None)  # nothing parses it
    error = running.error(path, body)
    assert error["code"] == "too_many_values"
    assert "max_body_items" in error["message"] or "max_prompts" in error["message"]


@pytest.mark.parametrize(
    "path, body, field, limit",
    [
        (CHAT, {"messages": [EMPTY] * 2001}, "messages", "2001 entries are too many; at most 2000"),
        (CHAT, {"messages": [EMPTY], "tools": [TOOL] * 513}, "tools", "513 entries are too many; at most 512"),
        (COMPLETIONS, {"prompt": [5], "allowed_token_ids": [7] * 2000}, "allowed_token_ids", "2000 entries"),
        (COMPLETIONS, {"prompt": [5], "bad_words": ["ab"] * 200 + ["x" * 16_000]}, "bad_words", "16400 characters"),
        (COMPLETIONS, {"prompt": [5], "stop": "x" * 16_385}, "stop", "16385 characters in all are too many"),
        (COMPLETIONS, {"prompt": [5], "stop": ["x" * 8_000] * 3}, "stop", "24000 characters"),
    ],
)
def test_a_field_that_is_too_long_is_refused_by_name(running, path, body, field, limit):
    running.refuses(path, field, f"{field}: {limit}", body)


def test_the_largest_batch_of_token_ids_is_answered(running):
    prompts = [[token % 200 for token in range(OPTIONS["max_model_len"] - 1)]] * 8
    vocab_size = tiny_model().config.vocab_size
    body = {"prompt": prompts, "max_tokens": 1, "allowed_token_ids": list(range(vocab_size))}
    assert running.answer(COMPLETIONS, body)["usage"]["prompt_tokens"] == 8 * (OPTIONS["max_model_len"] - 1)


@pytest.mark.parametrize("num_spaces", [0, 20_000])
def test_large_bodies_are_parsed_in_a_thread_to_the_same_answers(running, monkeypatch, num_spaces):
    threads = set()
    check = body_limits.BodyLimits.check_fields

    def watched(self, given):
        threads.add(threading.current_thread().name.partition("_")[0])
        check(self, given)

    monkeypatch.setattr(body_limits.BodyLimits, "check_fields", watched)
    padding = " " * num_spaces
    good = '{"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}'
    bodies = [
        '{"prompt": [5], "n": 1.5}',
        '{"prompt": [5, "x"]}',
        '{"prompt": [5], "tempreature": 0}',
        '{"prompt": [5], "suffix": "x"}',
        '{"prompt": [5], "max_tokens": 0}',
        '{"prompt": [5], ',
        '[{"prompt": [5]}]',
        '{"prompt": "\\ud800"}',
        '{"n": 1' + "0" * 5000 + "}",
    ]
    assert running.answer(COMPLETIONS, content=good + padding, headers=AS_JSON)
    errors = [running.error(COMPLETIONS, content=body + padding, headers=AS_JSON) for body in bodies]
    assert [error["param"] for error in errors][:4] == ["n", "prompt", "tempreature", "suffix"]
    assert "did you mean temperature?" in errors[2]["message"] and errors[5]["code"] == "invalid_json"
    assert ("nanovllm-prepare" in threads) == bool(num_spaces)
