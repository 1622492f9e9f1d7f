"""`suffix` of completions and llama.cpp's /infill, whole and streamed, and their refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm.requests.infill import MARKERS
from tests.support.serving import MODEL, Serving, serving
from tests.support.tiny_models import code_tokenizer, tiny_model

MARKS = MARKERS["Qwen Coder"]
PREFIX, SUFFIX = "def add(a, b):\n    ", "\n\nadd(1, 2)\n"
GREEDY = {"temperature": 0, "top_k": 40}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return code_tokenizer()


@pytest.fixture(scope="module")
def running(tokenizer) -> Iterator[Serving]:
    with serving(model=tiny_model(vocab_size=len(tokenizer)), tokenizer=tokenizer) as running:
        yield running


def test_a_suffix_asks_for_the_middle_of_each_prompt(running, tokenizer):
    written = [f"{MARKS.prefix}{prefix}{MARKS.suffix}{SUFFIX}{MARKS.middle}" for prefix in (PREFIX, "x = ")]
    with running.client() as client:
        options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 6}
        expected = client.completions.create(
            prompt=written, extra_body={"stop_token_ids": tokenizer.convert_tokens_to_ids([*MARKS.ends])}, **options
        )
        found = client.completions.create(prompt=[PREFIX, "x = "], suffix=SUFFIX, **options)
        assert [choice.text for choice in found.choices] == [choice.text for choice in expected.choices]
        assert found.usage.prompt_tokens == expected.usage.prompt_tokens
        chunks = client.completions.create(prompt=[PREFIX, "x = "], suffix=SUFFIX, stream=True, **options)
        texts = ["", ""]
        for chunk in chunks:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [choice.text for choice in found.choices]


def test_a_middle_as_llama_cpps_server_answers_it(running):
    body = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 6, **GREEDY}
    editor = {"samplers": ["top_k", "top_p", "infill"], "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "n_indent": 0,
              "cache_prompt": True, "response_fields": ["content"], "input_extra": [], "prompt": ""}  # fmt: skip
    with running.http() as http:
        suffixed = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 6, **GREEDY}
        expected = http.post("/v1/completions", json=suffixed).json()
        answer = http.post("/infill", json=body | editor).json()
        assert answer["content"] == expected["choices"][0]["text"]
        assert (answer["stop"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 6)
        assert answer["tokens_evaluated"] == expected["usage"]["prompt_tokens"]
        assert answer["timings"]["predicted_n"] == 6 and answer["timings"]["predicted_ms"] > 0
        streamed = http.post("/infill", json=body | {"stream": True}).text
        events = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line]
        assert "".join(event["content"] for event in events) == answer["content"]
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]


def test_other_files_and_the_begin_of_a_line_are_part_of_the_prompt(running):
    body = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 1}
    with running.http() as http:
        plain = http.post("/infill", json=body).json()
        more = body | {"input_extra": [{"filename": "f.py", "text": "x = 1"}], "prompt": "return"}
        longer = http.post("/infill", json=more).json()
        assert longer["tokens_evaluated"] > plain["tokens_evaluated"] + 5


def test_an_editor_may_warm_the_cache(running):
    body = {"input_prefix": "y = " * 60, "input_suffix": SUFFIX}
    with running.http() as http:
        warmed = http.post("/infill", json=body | {"n_predict": 0}).json()
        assert (warmed["content"], warmed["tokens_predicted"]) == ("", 0)
        assert http.post("/infill", json=body | {"n_predict": 1}).json()["tokens_cached"] > 100


@pytest.mark.parametrize(("body", "param", "said"), [
    ({"input_prefix": PREFIX}, "input_suffix", "required"),
    ({"input_prefix": PREFIX, "input_suffix": SUFFIX, "n": 2}, "n", "one middle"),
    ({"input_prefix": PREFIX, "input_suffix": SUFFIX, "mirostat": 2}, "mirostat", "top_p"),
    ({"input_prefix": "x" * 17_000, "input_suffix": SUFFIX}, "input_prefix", "max_prompt_chars"),
    ({"input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": [{"txt": 1}]}, "input_extra[0].text", "required"),
])  # fmt: skip
def test_a_bad_request_is_refused_by_name(running, body, param, said):
    with running.http() as http:
        answer = http.post("/infill", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param and said in answer.json()["error"]["message"]


def test_echo_and_suffix_exclude_one_another(running):
    with running.http() as http:
        error = http.post("/v1/completions", json={"prompt": "x", "suffix": "y", "echo": True}).json()["error"]
        assert error["param"] == "suffix" and "Leave one out" in error["message"]


def test_a_tokenizer_without_markers_is_named():
    with serving() as running, running.http() as http:
        for path, body, param in (
            ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
            ("/infill", {"input_prefix": "x", "input_suffix": "y"}, "input_suffix"),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code == 400, path
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == (param, "no_infill") and "the tokenizer of" in error["message"]
