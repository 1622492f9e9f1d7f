"""Ollama's API: chats, completions, embeddings and the model, whole and as JSON lines, and what is refused."""

import json
import logging
from datetime import datetime

import numpy as np
import pytest

from nanovllm.models.default_model import DEFAULT_MODEL
from nanovllm.serving.server.ollama import catalogue
from nanovllm.serving.server.ollama.catalogue import ModelFacts, model_facts
from nanovllm.serving.server.ollama.protocol import ChatBody
from nanovllm.serving.server.ollama.translation import chat_of
from tests.support.scripted import ending_model, says, thinking_tokenizer
from tests.support.serving import MODEL, function_tool, serving, user
from tests.support.tiny_models import code_tokenizer, save_tiny, tiny_model

ASK = [user("How is the weather in Rome?")]
GREEDY = {"temperature": 0, "num_predict": 8}
SCHEMA = json.loads("""{"type": "object", "properties": {"days": {"enum": [1, 2, 3]}}, "required": ["days"],
    "additionalProperties": false}""")
TOOL = function_tool("weather", description="The weather.", parameters=SCHEMA)


@pytest.fixture(scope="module")
def running():
    tokenizer = code_tokenizer()
    with serving(model=tiny_model(vocab_size=len(tokenizer)), tokenizer=tokenizer) as running:
        yield running


def post(running, path, **body):
    return running.answer(path, {"model": MODEL, "stream": False}, body)


def lines(running, path, **body):
    """The lines of a stream, which is the default."""
    answer = running.post(path, {"model": MODEL} | body)
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


PLAIN = {"temperature": 0, "max_tokens": 8}


def openai_text(running, **body):
    return running.answer("/v1/chat/completions", PLAIN, {"messages": ASK}, body)["choices"][0]["message"]["content"]


def completed(running, **body):
    return running.answer("/v1/completions", PLAIN, body)["choices"][0]["text"]


def test_a_chat_answers_as_the_chat_endpoint_of_openai(running):
    answer = post(running, "/api/chat", messages=ASK, options=GREEDY)
    assert answer["message"] == {"role": "assistant", "content": openai_text(running)}
    assert (answer["model"], answer["done"], answer["done_reason"]) == (MODEL, True, "length")
    assert answer["eval_count"] == 8 and answer["prompt_eval_count"] > 8 and answer["load_duration"] == 0
    assert 0 < answer["eval_duration"] < answer["total_duration"]
    datetime.fromisoformat(answer["created_at"])


def test_streams_are_the_default_and_have_a_json_object_a_line(running):
    *parts, last = lines(running, "/api/chat", messages=ASK, options=GREEDY)
    assert "".join(part["message"]["content"] for part in parts) == openai_text(running)
    assert all(part["done"] is False and part["model"] == MODEL for part in parts)
    assert last["done"] is True and last["message"]["content"] == "" and last["eval_count"] == 8


@pytest.mark.full
def test_options_are_those_of_the_other_endpoints(running):
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 5, "num_predict": 8}
    more = {"repeat_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "stop": ["zz"]}
    without_effect = {"num_ctx": 512, "num_thread": 4, "num_gpu": 99, "use_mmap": True, "mirostat": 0, "tfs_z": 1.0}
    answer = post(running, "/api/chat", messages=ASK, options=options | more | without_effect, keep_alive="5m")
    renamed = {"max_tokens": 8, "repetition_penalty": 1.2}
    expected = {
        name: value for name, value in (options | more).items() if name not in ("num_predict", "repeat_penalty")
    }
    assert answer["message"]["content"] == openai_text(running, **(expected | renamed))
    assert post(running, "/api/chat", messages=ASK, options={"num_predict": -1, "temperature": 0})["eval_count"] > 100


@pytest.mark.costly
@pytest.mark.parametrize("form", [SCHEMA, "json"], ids=["schema", "json"])
def test_a_format_constrains_the_answer(form):
    with serving(model=ending_model()) as running:
        for path, key in (("/api/chat", {"messages": ASK}), ("/api/generate", {"prompt": "x"})):
            answer = post(running, path, **key, format=form, options={"temperature": 0, "num_predict": 200})
            text = answer["message"]["content"] if path == "/api/chat" else answer["response"]
            if form == "json":  # a tiny model may not find its end
                assert text.lstrip().startswith("{")
            else:
                assert json.loads(text)["days"] in (1, 2, 3) and answer["done_reason"] == "stop"


def test_tools_are_called_and_their_results_are_read(monkeypatch):
    with serving({"tool_format": "hermes"}, model=ending_model(), tokenizer=thinking_tokenizer()) as running:
        call = '{"name": "weather", "arguments": {"days": 2}}'
        says(running, monkeypatch, f"</think>Let me see. <tool_call>{call}</tool_call>")
        options = {"num_predict": 100, "temperature": 0}
        message = post(running, "/api/chat", messages=ASK, tools=[TOOL], options=options)["message"]
        (found,) = message["tool_calls"]
        assert found["function"] == {"index": 0, "name": "weather", "arguments": {"days": 2}} and found["id"]
        assert message["content"] == "Let me see."
        *parts, last = lines(running, "/api/chat", messages=ASK, tools=[TOOL], options=options)
        (called,) = [part["message"]["tool_calls"] for part in parts if "tool_calls" in part["message"]]
        assert called[0]["function"] == found["function"] and last["done_reason"] == "stop"


def translated(messages, **body):
    """The messages of the chat that a chat of Ollama becomes."""
    return chat_of(ChatBody.model_validate({"model": MODEL, "messages": messages} | body)).messages


def test_results_find_their_calls_by_name_or_order():
    function = {"name": "weather", "arguments": {"days": 1}}
    calls = [{"function": function}, {"function": {"name": "time", "arguments": {}}}]
    results = [{"role": "tool", "content": "noon", "tool_name": "time"}, {"role": "tool", "content": "rain"}]
    turns = [*ASK, {"role": "assistant", "tool_calls": calls, "thinking": "hm"}, *results]
    _, answer, time, weather = translated(turns)
    assert [call.id for call in answer.tool_calls] == [weather.tool_call_id, time.tool_call_id]
    assert json.loads(answer.tool_calls[0].function.arguments) == {"days": 1} and answer.reasoning_content == "hm"


def test_results_of_one_tool_come_in_the_order_of_its_calls_and_no_limit_is_none():
    calls = [{"function": {"name": "f", "arguments": {}}}] * 2
    results = [{"role": "tool", "content": "1", "tool_name": "f"}] * 2
    turns = [*ASK, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    body = ChatBody.model_validate({"model": "m", "messages": turns, "options": {"num_predict": -1}})
    given = chat_of(body)
    assert [message.tool_call_id for message in given.messages[2:]] == ["call_1_0", "call_1_1"]
    assert given.max_tokens is None


def test_calls_come_back_as_open_webui_sends_them():
    """0.12: the index and the id beside the function, the result by the call's id."""
    call = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": {"days": 1}}}
    turns = [*ASK, {"role": "assistant", "tool_calls": [call], "content": ""},
             {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]  # fmt: skip
    *_, answer, result = translated(turns, stream=True, options={}, tools=[TOOL], keep_alive="5m")
    assert answer.tool_calls[0].id == result.tool_call_id == "call_1"


def test_a_prompt_goes_through_the_chat_template_unless_it_is_raw(running):
    answer = post(running, "/api/generate", prompt=ASK[0]["content"], options=GREEDY)
    assert answer["response"] == openai_text(running) and answer["done"] is True
    system = [{"role": "system", "content": "Be brief."}, *ASK]
    answer = post(running, "/api/generate", prompt=ASK[0]["content"], system="Be brief.", options=GREEDY)
    assert answer["response"] == openai_text(running, messages=system)
    raw = post(running, "/api/generate", prompt="The sea is", raw=True, options=GREEDY)
    assert raw["response"] == completed(running, prompt="The sea is")
    *parts, last = lines(running, "/api/generate", prompt="The sea is", raw=True, options=GREEDY)
    assert "".join(part["response"] for part in parts) == raw["response"] and last["done_reason"] == "length"


def test_a_suffix_asks_for_the_middle(running):
    middle = {"prompt": "def f(x):", "suffix": "return x"}
    assert post(running, "/api/generate", **middle, options=GREEDY)["response"] == completed(running, **middle)


def test_logprobs_are_those_of_the_chat_endpoint(running):
    asked = {"messages": ASK, "logprobs": True, "top_logprobs": 2}
    answer = post(running, "/api/chat", **asked, options=GREEDY)
    (choice,) = running.answer("/v1/chat/completions", PLAIN, asked)["choices"]
    expected = choice["logprobs"]["content"]
    assert [entry["token"] for entry in answer["logprobs"]] == [entry["token"] for entry in expected]
    assert len(answer["logprobs"][0]["top_logprobs"]) == 2


def test_thought_is_a_field_of_the_message_and_may_be_turned_off(running):
    tokenizer = thinking_tokenizer(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if enable_thinking %}<think>{% endif %}"
    )
    with serving({"reasoning_format": "think"}, tokenizer=tokenizer) as thinking:
        message = post(thinking, "/api/chat", messages=ASK, think=True, options=GREEDY)["message"]
        assert message["thinking"] and message["content"] == ""
        message = post(thinking, "/api/chat", messages=ASK, think=False, options=GREEDY)["message"]
        assert "thinking" not in message and message["content"]
        *parts, _ = lines(thinking, "/api/generate", prompt="x", think="low", options=GREEDY)
        assert "".join(part["thinking"] for part in parts) and not any(part["response"] for part in parts)
    assert running.error("/api/chat", {"model": MODEL, "messages": ASK, "think": True}).startswith("think")
    assert post(running, "/api/chat", messages=ASK, think=False, options=GREEDY)["done"] is True


def test_embeddings_are_those_of_openais_endpoint(running):
    texts = ["The sea", "The sun is hot"]
    answer = running.answer("/api/embed", {"model": MODEL, "input": texts})
    expected = [entry["embedding"] for entry in running.answer("/v1/embeddings", {"input": texts})["data"]]
    np.testing.assert_allclose(answer["embeddings"], expected, atol=1e-5)
    assert answer["prompt_eval_count"] > 4 and answer["total_duration"] > 0
    assert (
        len(
            running.answer("/api/embed", '{"model": "tiny", "input": "x", "dimensions": 8, "truncate": true}')[
                "embeddings"
            ][0]
        )
        == 8
    )
    older = running.answer("/api/embeddings", {"model": MODEL, "prompt": texts[0]})
    np.testing.assert_allclose(older["embedding"], expected[0], atol=1e-5)


def test_the_model_is_listed_shown_and_loaded(running):
    (listed,) = running.get("/api/tags").json()["models"]
    (loaded,) = running.get("/api/ps").json()["models"]
    assert listed["name"] == listed["model"] == loaded["model"] == MODEL and len(listed["digest"]) == 64
    assert loaded["context_length"] == 512
    shown = running.answer("/api/show", {"model": MODEL})
    assert {"completion", "insert", "embedding"} <= set(shown["capabilities"])
    assert shown["model_info"]["model.context_length"] == 512 and "messages" in shown["template"]
    assert int(running.get("/api/version").json()["version"].split(".")[1]) >= 6  # an editor's smallest version
    assert running.head("/").status_code == 200
    for path in ("/api/chat", "/api/generate"):
        assert post(running, path, keep_alive=0)["done_reason"] == "load"
    assert post(running, "/api/chat", model=f"{MODEL}:latest", messages=ASK, options=GREEDY)["done"] is True


def test_facts_of_files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "tiny-Q4_K_M.gguf").write_bytes(b"1234")
    for name, config, found in (
        ("", '{"model_type": "qwen3", "dtype": "bfloat16"}', ("safetensors", 5, "BF16")),
        ("", '{"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}', ("safetensors", 5, "FP8")),
        ("tiny-Q4_K_M.gguf", "{}", ("gguf", 4, "Q4_K_M")),
    ):
        (tmp_path / "config.json").write_text(config)
        facts = model_facts(tmp_path / name)
        assert (facts.format, facts.size, facts.quantization) == found
    for unknown in ("not/here", "not/here:Q4_K_M", "~/not/here", "/not/here"):
        assert model_facts(unknown).details()["families"] == []


def test_facts_of_the_embedded_model_and_of_one_in_the_hubs_cache(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "model", "qwen3")
    monkeypatch.setattr(catalogue, "default_folder", lambda: folder)
    monkeypatch.setattr(catalogue, "try_to_load_from_cache", lambda *_: str(folder / "config.json"))
    for name in (DEFAULT_MODEL, "org/model"):
        facts = model_facts(name)
        assert (facts.family, facts.quantization) == ("qwen3", "F32") and facts.size > 100_000
        assert facts.num_weights == tiny_model("qwen3").num_parameters()
    sizes = [ModelFacts(num_weights=number).details()["parameter_size"] for number in (134_515_008, 7_610_000_000, 0)]
    assert sizes == ["135M", "7.6B", ""]


@pytest.mark.parametrize("path, body, status, said", [
    ("chat", {"messages": ASK, "model": "other"}, 404, "'other' does not exist here"),
    ("chat", '{"messages": [{"role": "user", "content": "x", "images": ["AAAA"]}]}', 400, "engine reads text alone"),
    ("chat", {"messages": ASK, "options": {"temperatur": 1}}, 400, "options.temperatur: unknown field"),
    ("chat", {"messages": ASK, "options": {"temperature": -1}}, 400, "options.temperature"),
    ("chat", {"messages": ASK, "options": {"stop": ["x" * 17_000]}}, 400, "options.stop: 17000 characters"),
    ("chat", {"messages": ASK, "format": {"type": "strin"}}, 400, "format"),
    ("chat", {"messages": ASK, "format": "xml"}, 400, "format"),
    ("chat", {"messages": [user("x " * 2000)]}, 400, "max_model_len"),
    ("generate", '{"prompt": "x", "context": [1, 2]}', 400, "/api/chat"),
    ("generate", '{"prompt": "x", "template": "{{ .Prompt }}"}', 400, "raw"),
    ("generate", '{"prompt": "x", "raw": true, "system": "y"}', 400, "system is given with raw"),
    ("pull", '{}', 403, "/api/pull is not served"),
    ("copy", '{"source": "a", "destination": "b"}', 403, "/api/copy is not served"),
    ("blobs/sha256:00", '{}', 403, "/api/blobs is not served"),
    ("web_search", '{"query": "x"}', 404, "no /api/web_search"),
])  # fmt: skip
def test_refusals_have_ollamas_form(running, path, body, status, said):
    assert said in running.error(f"/api/{path}", {"model": MODEL}, body, status=status)


@pytest.mark.parametrize("headers, status", [
    ({}, 200), ({"Content-Type": "text/plain"}, 200), ({"Origin": "https://example.org"}, 400),
    ({"Origin": "https://example.org", "Content-Type": "text/plain"}, 400),
])  # fmt: skip
def test_a_body_is_json_whatever_its_type_unless_a_browser_sends_it(running, headers, status):
    """LiteLLM names no type, and curl a form's; a page of another origin could do the same."""
    body = json.dumps({"model": MODEL, "messages": ASK, "options": GREEDY, "stream": False})
    assert running.post("/api/chat", content=body, headers=headers).status_code == status


def test_nothing_is_deleted(running):
    answer = running.request("DELETE", "/api/delete", {"model": MODEL})
    assert answer.status_code == 403 and "/api/delete is not served" in answer.json()["error"]


def test_a_silent_stream_has_lines_without_text():
    """A comment would break clients, which parse each line."""
    with serving({"keep_alive_interval": 0.02}) as slow:
        found = lines(slow, "/api/chat", messages=ASK, options={"num_predict": 300, "temperature": 0})
        assert found[-1]["done"] is True and all("message" in line for line in found)


# The requests of Ollama's documentation (its api.md), without images and without those that change models.
DOCUMENTED = [
    ("generate", '"prompt": "Why is the sky blue?"'),
    ("generate", '"prompt": "Why is the sky blue?", "stream": false'),
    ("generate", '"prompt": "[INST] why is the sky blue? [/INST]", "raw": true, "stream": false'),
    ("generate", '"prompt": "Why is the sky blue?", "options": {"seed": 123}'),
    ("generate", '''"prompt": "Why is the sky blue?", "stream": false, "options": {
        "num_keep": 5, "seed": 42, "num_predict": 100, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "typical_p": 0.7,
        "repeat_last_n": 33, "temperature": 0.8, "repeat_penalty": 1.2, "presence_penalty": 1.5,
        "frequency_penalty": 1.0, "mirostat": 1, "mirostat_tau": 0.8, "mirostat_eta": 0.6, "penalize_newline": true,
        "stop": ["\\n", "user:"], "numa": false, "num_ctx": 1024, "num_batch": 2, "num_gpu": 1, "main_gpu": 0,
        "low_vram": false, "vocab_only": false, "use_mmap": true, "use_mlock": false, "num_thread": 8}'''),
    ("generate", ""),
    ("generate", '"keep_alive": 0'),
    ("chat", '"messages": [{"role": "user", "content": "why is the sky blue?"}], "stream": false'),
    ("chat", '''"messages": [{"role": "user", "content": "why is the sky blue?"},
        {"role": "assistant", "content": "due to rayleigh scattering."},
        {"role": "user", "content": "how is that different than mie scattering?"}]'''),
    ("chat", '"messages": [{"role": "user", "content": "Hello!"}], "options": {"seed": 101, "temperature": 0}'),
    ("chat", '''"messages": [{"role": "user", "content": "What is the weather today in Paris?"}], "stream": false,
        "tools": [{"type": "function", "function": {
            "name": "get_current_weather", "description": "Get the current weather for a location",
            "parameters": {"type": "object", "required": ["location", "format"], "properties": {
                "location": {"type": "string", "description": "e.g. San Francisco, CA"},
                "format": {"type": "string", "enum": ["celsius", "fahrenheit"]}}}}}]'''),
    ("chat", '"messages": []'),
    ("chat", '"messages": [], "keep_alive": 0'),
    ("show", ""),
    ("embed", '"input": "Why is the sky blue?"'),
    ("embed", '"input": ["Why is the sky blue?", "Why is the grass green?"]'),
    ("embeddings", '"prompt": "Here is an article about llamas..."'),
]  # fmt: skip


def test_documented_requests_are_answered_as_curl_sends_them(monkeypatch):
    form = {"content-type": "application/x-www-form-urlencoded"}
    with serving(model=ending_model()) as running:
        says(running, monkeypatch, "Blue.")
        for path, body in DOCUMENTED:
            answer = running.post(f"/api/{path}", content=f'{{"model": "{MODEL}"{body and ","} {body}}}', headers=form)
            assert answer.status_code == 200, (path, body, answer.text)
            assert all("error" not in json.loads(line) for line in answer.text.splitlines())


def test_head_is_answered_as_get_is(running):
    for path in ("/", "/api/version", "/api/tags", "/api/ps"):
        assert (running.head(path).status_code, running.head(path).content) == (200, b"")
    assert running.head("/api/blobs/sha256:00").status_code == 404


def test_a_context_above_the_servers_is_taken_for_that_and_logged(caplog):
    caplog.set_level(logging.INFO, logger="nanovllm")
    with serving() as running:
        for _ in range(2):
            assert post(running, "/api/chat", messages=ASK, options={"num_ctx": 131072, "num_predict": 2})["done"]
    (line,) = (record.getMessage() for record in caplog.records if "num_ctx" in record.getMessage())
    assert line.startswith("'options.num_ctx 131072' has no effect") and "--max-model-len" in line


def test_a_window_of_no_tokens_turns_penalties_off():
    penalties = {"repeat_penalty": 1.1, "presence_penalty": 1.5, "frequency_penalty": 1.0}
    for window, expected in ((64, 1.1), (-1, 1.1), (0, None)):
        options = penalties | {"repeat_last_n": window}
        chat = chat_of(ChatBody.model_validate({"model": MODEL, "messages": ASK, "options": options}))
        assert chat.repetition_penalty == expected and (chat.presence_penalty is None) == (expected is None)


def test_empty_inputs_have_no_embeddings(running):
    named = {"model": MODEL}
    for body in ('{"input": ""}', '{"input": []}', "{}"):
        assert running.answer("/api/embed", named, body) == named | {"embeddings": []}
    assert running.answer("/api/embeddings", named, {"prompt": ""}) == {"embedding": []}
    assert running.error("/api/embed", named, {"input": [""]}).startswith("the prompt")
