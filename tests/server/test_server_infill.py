"""`suffix` of completions and llama.cpp's /infill, whole and streamed, and their refusals."""

import json
from collections import Counter
from functools import partial

import pytest

from nanovllm.features.infill.infill import MARKERS
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.serving.server.openai.infill import INFILL_MIN_P, InfillRequest
from nanovllm.serving.server.openai.middle_limits import MiddleLimits
from tests.support.llms import comes_true
from tests.support.serving import MODEL, serving
from tests.support.tiny_models import code_tokenizer, tiny_model

MARKS = MARKERS["Qwen Coder"]
PREFIX, SUFFIX = "def add(a, b):\n    ", "\n\nadd(1, 2)\n"
GREEDY = {"temperature": 0, "top_k": 40}


@pytest.fixture(scope="module")
def tokenizer():
    return code_tokenizer()


@pytest.fixture(scope="module")
def running(tokenizer):
    with serving(model=tiny_model(vocab_size=len(tokenizer)), tokenizer=tokenizer) as running:
        yield running


def test_a_suffix_asks_for_the_middle_of_each_prompt(client, tokenizer):
    written = [f"{MARKS.prefix}{prefix}{MARKS.suffix}{SUFFIX}{MARKS.middle}" for prefix in (PREFIX, "x = ")]
    create = partial(client.completions.create, model=MODEL, temperature=0, max_tokens=6)
    stops = {"stop_token_ids": tokenizer.convert_tokens_to_ids([*MARKS.ends])}
    expected = create(prompt=written, extra_body=stops)
    found = create(prompt=[PREFIX, "x = "], suffix=SUFFIX)
    assert [choice.text for choice in found.choices] == [choice.text for choice in expected.choices]
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens
    texts = ["", ""]
    for chunk in create(prompt=[PREFIX, "x = "], suffix=SUFFIX, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in found.choices]


BODY = {"input_prefix": PREFIX, "input_suffix": SUFFIX, **GREEDY}


def streamed(running, fields):
    """The events of a streamed middle."""
    lines = running.post("/infill", BODY | fields | {"stream": True}).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def test_a_middle_as_llama_cpps_server_answers_it(running):
    editor = """{"samplers": ["top_k", "top_p", "infill"], "t_max_prompt_ms": 1, "t_max_predict_ms": 60000,
        "n_indent": 0, "cache_prompt": true, "response_fields": [], "input_extra": [], "prompt": "",
        "id_slot": 0, "stop": [], "n_cmpl": 1, "n_predict": 6}"""
    suffixed = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 6}
    expected = running.answer("/v1/completions", suffixed, GREEDY)
    answer = running.answer("/infill", BODY, editor)
    assert answer["content"] == expected["choices"][0]["text"]
    assert (answer["stop"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 6)
    assert answer["tokens_evaluated"] == expected["usage"]["prompt_tokens"]
    assert answer["timings"]["predicted_n"] == 6 and answer["timings"]["predicted_ms"] > 0
    events = streamed(running, {"n_predict": 6})
    assert "".join(event["content"] for event in events) == answer["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]


def test_an_answer_has_the_response_fields_alone_by_their_paths(running):
    fields = ["content", "timings/predicted_n", "timings/prompt_per_token_ms", "timings/none", "none"]
    body = {"n_predict": 3, "response_fields": fields}
    for answer in (running.answer("/infill", BODY, body), streamed(running, body)[-1]):
        assert set(answer) == set(fields[:3]) and answer["timings/predicted_n"] == 3


@pytest.mark.parametrize("text, seconds, indent, elapsed, middle", [
    ("a\n  b\nc", None, 2, 9, "a\n  b\n"),
    ("a\n\tb\n\td", None, 1, 9, None),
    ("a\n\n  b", None, 2, 9, "a\n"),  # a blank line
    ("a\nb\n", 1.0, 0, 0.9, None),
    ("a\nb\n", 1.0, 0, 1.1, "a\n"),
    ("one line", 1.0, 0, 1.1, None),
    ("a\nb", None, 0, 9, None),
])  # fmt: skip
def test_a_middle_ends_at_a_line_with_less_indentation_and_at_the_first_line_after_its_time(
    text, seconds, indent, elapsed, middle
):
    for size in (1, 2, 3, len(text)):
        limits, found = MiddleLimits(seconds, indent), ""
        for first in range(0, len(text), size):
            piece = text[first : first + size]
            if (end := limits.end_in(piece, elapsed)) is not None:
                assert found + piece[:end] == middle
                break
            found += piece
        else:
            assert middle is None, size


def test_a_limit_ends_the_request_whole_and_streamed(running, monkeypatch):
    """The tiny model writes no lines: the limit here is the second piece of text."""
    body = {"n_predict": 200, "n_indent": 4, "ignore_eos": True}
    counts = Counter()

    def end_in(limits, text, elapsed):
        counts[id(limits)] += 1
        return 1 if counts[id(limits)] == 3 else None

    full = running.answer("/infill", BODY, body, {"n_indent": 0})["content"]
    monkeypatch.setattr(MiddleLimits, "end_in", end_in)
    answer = running.answer("/infill", BODY, body)
    assert full.startswith(answer["content"]) and (answer["stop"], answer["stop_type"]) == (True, "limit")
    assert 3 <= answer["tokens_predicted"] == answer["timings"]["predicted_n"] < 200
    events = streamed(running, body)
    assert full.startswith("".join(event["content"] for event in events)) and events[-1]["stop_type"] == "limit"
    comes_true(running.is_idle)


def test_filters_that_samplers_leave_out_are_off():
    given = {"input_prefix": "", "input_suffix": "", "top_k": 40, "top_p": 0.9}
    defaults = SamplingParams(min_p=0.1)

    def filters(**fields):
        return InfillRequest.model_validate(given | fields).filters(defaults)

    assert filters() == {}
    assert filters(samplers=["top_k", "top_p"]) == {"top_k": 40, "top_p": 0.9, "min_p": 0.0}
    assert filters(samplers=[]) == {"top_k": SamplingParams().top_k, "top_p": 1.0, "min_p": 0.0}
    assert filters(samplers=["top_k", "infill"]) == {"top_k": 40, "top_p": 1.0, "min_p": INFILL_MIN_P}


def test_other_files_and_the_begin_of_a_line_are_part_of_the_prompt(running):
    files = [{"filename": "f.py", "text": "x = 1", "time": [1764, 51]}]  # Vim's time
    plain, longer = (
        running.answer("/infill", BODY, {"n_predict": 1}, more)["tokens_evaluated"]
        for more in ({}, {"input_extra": files, "prompt": "return"})
    )
    assert longer > plain + 5


def test_an_editor_may_warm_the_cache(running):
    body = {"input_prefix": "y = " * 60, "input_suffix": SUFFIX}
    warmed = running.answer("/infill", body, {"n_predict": 0})
    assert (warmed["content"], warmed["tokens_predicted"]) == ("", 0)
    assert running.answer("/infill", body, {"n_predict": 1})["tokens_cached"] > 100


@pytest.mark.parametrize("body, param, said", [
    ('{"n": 2}', "n", "one middle"),
    ('{"mirostat": 2}', "mirostat", "top_p"),
    ('{"n_cmpl": 2}', "n_cmpl", "one middle"),
    ('{"samplers": ["dry"]}', "samplers[0]", "'infill'"),
    ('{"samplers": ["top_p", "top_k"]}', "samplers", "in the order"),
    ('{"t_max_predict_ms": -2}', "t_max_predict_ms", "-1"),
    ({"input_prefix": "x" * 17_000}, "input_prefix", "max_prompt_chars"),
    ('{"input_extra": [{"txt": 1}]}', "input_extra[0].text", "required"),
])  # fmt: skip
def test_a_bad_request_is_refused_by_name(running, body, param, said):
    running.refuses("/infill", param, said, {"input_prefix": PREFIX, "input_suffix": SUFFIX}, body)


def test_a_suffix_is_needed_by_a_middle_and_excludes_an_echo(running):
    running.refuses("/infill", "input_suffix", "required", {"input_prefix": PREFIX})
    body = '{"prompt": "x", "suffix": "y", "echo": true}'
    running.refuses("/v1/completions", "suffix", "Leave one out", body)


def test_a_tokenizer_without_markers_is_named():
    with serving() as running:
        for path, body, param in (
            ("/v1/completions", '{"prompt": "x", "suffix": "y"}', "suffix"),
            ("/infill", '{"input_prefix": "x", "input_suffix": "y"}', "input_suffix"),
        ):
            error = running.error(path, body)
            assert (error["param"], error["code"]) == (param, "no_infill") and "the tokenizer of" in error["message"]
