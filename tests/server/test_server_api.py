"""The endpoints, driven by OpenAI's own client: the offline engine's tokens, and refusals by name."""

import json
from functools import partial
from types import SimpleNamespace

import openai
import pytest

import nanovllm
from nanovllm import SamplingParams
from nanovllm.outputs import CompletionOutput
from nanovllm.serving.server.openai.completions import CompletionJob
from nanovllm.serving.server.openai.generation import finish_reasons
from nanovllm.serving.server.token_text import TokenText
from tests.support.async_llms import offline
from tests.support.serving import MODEL, function_tool, serving, user
from tests.support.tiny_models import VOCAB_SIZE, tiny_tokenizer

HELLO = [user("Hello")]
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def complete(client):
    return partial(client.completions.create, model=MODEL)


def expected(prompt, **params):
    """The offline engine's output."""
    (output,) = offline().generate([prompt], SamplingParams(**params), use_tqdm=False)
    return output


def chat_prompt(messages):
    return offline().apply_chat_template(messages)[0]


# ----------------------------------------------------------------------------------------------- tokens and their forms


@pytest.mark.parametrize("prompt", ["The capital of France is", [5, 6, 7]], ids=["text", "token ids"])
def test_a_completion_is_the_offline_engines(complete, prompt):
    answer = complete(prompt=prompt, seed=3, max_tokens=20, extra_body=IDS)
    wanted = expected(prompt, seed=3, max_tokens=20)
    (choice,) = answer.choices
    assert choice.token_ids == wanted.outputs[0].token_ids
    assert choice.prompt_token_ids == wanted.prompt_token_ids
    assert (choice.text, choice.finish_reason) == (wanted.outputs[0].text, "length")
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == MODEL
    num_prompt = len(wanted.prompt_token_ids)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (num_prompt, 20, num_prompt + 20)


def test_an_answer_to_a_conversation_is_the_offline_engines(chat):
    answer = chat(seed=3, max_completion_tokens=20)
    wanted = expected(chat_prompt(HELLO), seed=3, max_tokens=20).outputs[0]
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role) == (wanted.text, "assistant")
    assert (choice.finish_reason, answer.object) == ("length", "chat.completion")


def test_chunks_of_a_completion_join_to_the_answer(complete):
    chunks = list(complete(prompt="Once", seed=5, max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected("Once", seed=5, max_tokens=20).outputs[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert {(chunk.usage, chunk.object) for chunk in chunks} == {(None, "text_completion")}


def test_chunks_of_a_conversation_join_to_the_answer_and_end_with_the_usage(chat):
    chunks = list(chat(seed=5, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    *chunks, last = chunks
    assert chunks[0].choices[0].delta.role == "assistant"
    wanted = expected(chat_prompt(HELLO), seed=5, max_tokens=20)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.outputs[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert (last.choices, last.usage.completion_tokens) == ([], 20) and not any(chunk.usage for chunk in chunks)
    assert last.usage.prompt_tokens == len(wanted.prompt_token_ids)


@pytest.mark.costly
@pytest.mark.parametrize(
    "path, own",
    [
        ("completions", {"prompt": [5, 6]}),
        ("chat/completions", {"messages": [user("a")]}),
    ],
)
def test_events_of_text_alone_are_written_as_the_others_are(running, path, own):
    """Only their text is encoded; with a usage in each event every one is encoded whole."""
    body = own | {"model": MODEL, "max_tokens": 60, "n": 2, "seed": 3, "temperature": 1.5, "stream": True}
    found = []
    for options in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        answer = running.post(f"/v1/{path}", body | {"stream_options": options})
        assert answer.headers["content-type"].startswith("text/event-stream")
        *lines, done, end = (line.removeprefix("data: ") for line in answer.text.split("\n\n"))
        assert (done, end) == ("[DONE]", "")
        events = [json.loads(line) for line in lines]
        assert [json.dumps(event, separators=(",", ":")) for event in events] == lines
        texts, shapes, keys = {0: "", 1: ""}, set(), set()
        for event in events:
            event |= {"id": None, "created": None, "usage": None}
            for choice in event["choices"]:
                holder, name = (choice["delta"], "content") if "delta" in choice else (choice, "text")
                if holder.get(name) or choice["finish_reason"]:
                    keys.add(tuple(choice))
                if holder.get(name):
                    texts[choice["index"]] += holder[name]
                    holder[name] = "text"
            if all(choice["finish_reason"] is None for choice in event["choices"]):  # the last text may be empty
                shapes.add(json.dumps(event))
        assert len(keys) == 1, "as in the event of the end"
        found.append((texts, shapes))
    assert found[0] == found[1] and all(found[0][0].values())


def test_continuous_usage_counts_up(complete):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(prompt="Once", temperature=0, max_tokens=5, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 5


def test_several_prompts_and_samples_are_numbered_prompt_by_prompt(complete):
    prompts = [[5, 6, 7], [8, 9]]
    wanted = [sample.token_ids for prompt in prompts for sample in expected(prompt, seed=1, n=2, max_tokens=6).outputs]
    answer = complete(prompt=prompts, seed=1, n=2, max_tokens=6, extra_body=IDS)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.token_ids for choice in answer.choices] == wanted
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 24)

    streamed = [[], [], [], []]
    for chunk in complete(prompt=prompts, seed=1, n=2, max_tokens=6, stream=True, extra_body=IDS):
        streamed[chunk.choices[0].index] += chunk.choices[0].token_ids
    assert streamed == wanted


def test_a_prompt_that_ends_before_the_first_one_is_the_second_in_the_answer():
    with serving(max_num_batched_tokens=32, max_num_seqs=2) as running:
        body = {"prompt": [[5] * 200, [6]], "max_tokens": 1, "temperature": 0}
        choices = running.answer("/v1/completions", body, IDS)["choices"]
    assert [len(choice["prompt_token_ids"]) for choice in choices] == [200, 1]


def test_log_probabilities_of_a_conversation(chat):
    answer = chat(seed=3, max_tokens=8, logprobs=True, top_logprobs=3)
    wanted = expected(chat_prompt(HELLO), seed=3, max_tokens=8, logprobs=3).outputs[0]
    entries = answer.choices[0].logprobs.content
    for entry, token_id, report in zip(entries, wanted.token_ids, wanted.logprobs, strict=True):
        by_rank = sorted(report.values(), key=lambda item: item.rank)[:3]
        given = [entry.logprob, *(top.logprob for top in entry.top_logprobs)]
        assert given == pytest.approx([report[token_id].logprob, *(item.logprob for item in by_rank)], abs=1e-5)
    assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == wanted.text


def test_log_probabilities_of_a_streamed_conversation_come_token_by_token(chat):
    wanted = expected(chat_prompt(HELLO), seed=3, max_tokens=8, logprobs=1).outputs[0]
    chunks = chat(seed=3, max_tokens=8, logprobs=True, top_logprobs=1, stream=True)
    given = [entry.logprob for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    reports = [report[token_id].logprob for token_id, report in zip(wanted.token_ids, wanted.logprobs, strict=True)]
    assert given == pytest.approx(reports, abs=1e-5)


def echoed(complete, **options):
    """Text, tokens, offsets and reports of an echo."""
    answer = complete(temperature=0, echo=True, logprobs=1, **options)
    choices = [chunk.choices[0] for chunk in answer] if options["stream"] else answer.choices
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    tokens, offsets = ([value for part in parts for value in getattr(part, name)] for name in ("tokens", "text_offset"))
    return "".join(choice.text for choice in choices), tokens, offsets, parts


@pytest.mark.parametrize("stream", [False, True])
def test_echo_gives_the_prompt_and_its_log_probabilities(stream, complete):
    text, tokens, offsets, parts = echoed(complete, prompt="The capital", max_tokens=4, stream=stream)
    wanted = expected("The capital", temperature=0.0, max_tokens=4, logprobs=1, prompt_logprobs=1)
    assert text == "The capital" + wanted.outputs[0].text
    first, *logprobs = (value for part in parts for value in part.token_logprobs)
    token_ids = wanted.prompt_token_ids + wanted.outputs[0].token_ids
    reports = wanted.prompt_logprobs + wanted.outputs[0].logprobs
    assert first is None
    assert logprobs == pytest.approx([r[t].logprob for t, r in zip(token_ids[1:], reports[1:], strict=True)], abs=1e-5)
    assert offsets == [sum(map(len, tokens[:number])) for number in range(len(tokens))]
    assert parts[-1].top_logprobs[-1].keys() >= {tokens[-1]}


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_index_the_text_though_characters_span_tokens(stream, complete):
    prompt = "日本 größe the"
    text, tokens, offsets, _ = echoed(complete, prompt=prompt, max_tokens=12, stream=stream)
    assert text.startswith(prompt) and len(tokens) > len(prompt) and offsets == sorted(offsets)
    whole = [number for number, token in enumerate(tokens) if "\ufffd" not in token and not token.startswith("<|")]
    assert len(whole) > 8 and all(text.startswith(tokens[number], offsets[number]) for number in whole)
    assert offsets[:6] == [0, 0, 0, 1, 1, 1]


def test_offsets_of_an_echo_skip_what_the_tokenizer_adds_and_count_special_tokens_of_the_text():
    tokenizer, prompt = tiny_tokenizer(), "<|user|>hi<|end|>the fox"
    own = tokenizer.encode(prompt)
    job = CompletionJob.__new__(CompletionJob)
    job._state = SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer), token_text=TokenText(tokenizer))
    job.body = SimpleNamespace(logprobs=0, truncate_prompt_tokens=None)
    for added in (0, 2):
        token_ids = own[:1] * added + own
        job._params, job._logprobs, job._echoes = SamplingParams(), {}, {}
        reports = {"prompt_token_ids": token_ids, "prompt_logprobs": [None] * len(token_ids)}
        output = SimpleNamespace(request_id="a", prompt=prompt, **reports)
        report = job._echoed_logprobs(0, output)
        assert report["text_offset"][:added] == [0] * added
        for token, offset in zip(report["tokens"][added:], report["text_offset"][added:], strict=True):
            assert prompt.startswith(token, offset)
        assert job._echoed_logprobs(1, output) == report


@pytest.mark.parametrize("name, own", [("complete", {"prompt": "The fox"}), ("chat", {})], ids=["completion", "chat"])
def test_a_streamed_choice_ends_once_however_long_the_others_last(request, name, own):
    ask = partial(request.getfixturevalue(name), n=4, max_tokens=24, seed=3, stop=["e"], temperature=1.0, **own)
    whole, chunks = ask(), list(ask(stream=True))
    given = [choice for chunk in chunks for choice in chunk.choices]
    ended = [choice.index for choice in given if choice.finish_reason]
    assert sorted(ended) == [0, 1, 2, 3] and len({len(choice.model_dump_json()) for choice in whole.choices}) > 1
    for choice in whole.choices:
        reasons = [each.finish_reason for each in given if each.index == choice.index]
        assert reasons == [*[None] * (len(reasons) - 1), choice.finish_reason]


def test_echo_without_new_tokens_scores_the_prompt(complete):
    answer = complete(prompt=[5, 6, 7], max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert (len(choice.logprobs.tokens), answer.usage.completion_tokens, choice.finish_reason) == (3, 0, "length")
    assert choice.text == tiny_tokenizer().decode([5, 6, 7])


def test_a_stop_string_ends_the_answer_and_is_named(complete):
    text = expected("The capital", temperature=0.0, max_tokens=12).outputs[0].text
    stop = text[4:6]
    answer = complete(prompt="The capital", temperature=0, max_tokens=12, stop=[stop])
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text[: text.index(stop)], "stop", stop)


def test_sampling_options_reach_the_engine(complete):
    options = {
        "temperature": 0.7, "top_p": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.25, "seed": 11,
        "max_tokens": 15, "logit_bias": {"17": 4.0},
    }  # fmt: skip
    extensions = {
        "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [3], "bad_words": ["the"], "skip_special_tokens": False, "truncate_prompt_tokens": 2,
        "allowed_token_ids": list(range(10, 300)), "include_stop_str_in_output": True,
    }  # fmt: skip
    answer = complete(prompt=[5, 6, 7], **options, extra_body=extensions | IDS | {"priority": 3})
    wanted = expected([5, 6, 7], **options, **extensions)
    assert answer.choices[0].token_ids == wanted.outputs[0].token_ids
    assert answer.choices[0].prompt_token_ids == [6, 7]


@pytest.mark.full
def test_a_completion_has_16_tokens_by_default_and_a_conversation_what_the_context_leaves(complete, chat):
    assert complete(prompt="Once").usage.completion_tokens == 16
    answer = chat(messages=[user("a " * 240)], extra_body={"ignore_eos": True})
    assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (512, "length")


def test_a_timeout_ends_an_answer_with_what_there_is():
    assert finish_reasons(CompletionOutput(0, "x", [1], "timeout", None)) == ("length", "timeout")


# ---------------------------------------------------------------------------------------------------- small endpoints


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == (MODEL, "model", 512)
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_text_becomes_tokens_and_text_again(running):
    tokens = running.answer("/tokenize", '{"prompt": "The café 你好"}')
    assert tokens["tokens"] == tiny_tokenizer()("The café 你好")["input_ids"]
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 512)
    assert running.answer("/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": "The café 你好"}
    assert running.answer("/detokenize", {"tokens": [5] * 512})
    messages = running.answer("/tokenize", {"messages": HELLO, "return_token_strs": True})
    assert messages["tokens"] == chat_prompt(HELLO)
    assert messages["token_strs"][0] == "<|user|>"
    assert "".join(messages["token_strs"]) == tiny_tokenizer().decode(messages["tokens"])


@pytest.mark.parametrize(
    "path, body, param, named",
    [
        ("tokenize", '{}', None, "give prompt or messages"),
        ("tokenize", {"prompt": "x", "messages": HELLO}, None, "one of the two"),
        ("tokenize", {"prompt": "x", "tools": [function_tool("f")]}, "tools", "Leave it"),
        ("tokenize", '{"prompt": "x", "chat_template_kwargs": {"a": 1}}', "chat_template_kwargs", "only messages"),
        ("tokenize", '{"prompt": "x", "continue_final_message": true, "add_generation_prompt": false}',
         "continue_final_message", "only messages"),
        ("tokenize", '{"prompt": "x", "add_generation_prompt": false}', "add_generation_prompt", "only messages"),
        ("tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens", "from the chat template"),
        ("tokenize", {"messages": HELLO, "continue_final_message": True}, "continue_final_message", "to false"),
        ("tokenize", '{"prompt": "x", "model": "gpt"}', "model", "'gpt' does not exist"),
        ("tokenize", {"prompt": "x" * 20_000}, "prompt", "20000"),
        ("tokenize", '{"prompts": "x"}', "prompts", "did you mean prompt"),
        ("detokenize", '{}', "tokens", "required"),
        ("detokenize", '{"tokens": [5, -1]}', "tokens[1]", "0"),
        ("detokenize", '{"tokens": [5, 512]}', "tokens", "ids are 0 to 511"),
        ("detokenize", '{"tokens": "x"}', "tokens", "array"),
        ("detokenize", {"tokens": [5] * 513}, "tokens", "513"),
    ],
)  # fmt: skip
def test_what_cannot_become_tokens_or_text_is_refused_by_name(running, path, body, param, named):
    running.refuses(f"/{path}", param, named, body, status=404 if param == "model" else 400)


def test_health_and_version(running):
    assert running.get("/health").json() == {"status": "ok"}
    assert running.head("/health").status_code == 200
    assert running.get("/version").json() == {"version": nanovllm.__version__}


# ------------------------------------------------------------------------------------------------------------ refusals

COMPLETION = {"prompt": "Once", "max_tokens": 2}
CHAT = {"messages": HELLO, "max_tokens": 2}


@pytest.mark.parametrize(
    "path, body, param, named",
    [
        ("completions", '{"tempratur": 1}', "tempratur", "did you mean temperature"),
        ("completions", '{"suffix": "x"}', "suffix", "at their end alone"),
        ("completions", '{"best_of": 3}', "best_of", "use n"),
        ("completions", '{"temperature": -1}', "temperature", "-1"),
        ("completions", '{"temperature": "hot"}', "temperature", "number"),
        ("completions", '{"seed": -2}', "seed", "-1"),
        ("completions", '{"n": 0}', "n", "n is 0"),
        ("completions", '{"n": 200}', "n", "at most 128"),
        ("completions", '{"logprobs": 21}', "logprobs", "at most 20"),
        ("completions", '{"logit_bias": {"17": 200}}', "logit_bias", "200"),
        ("completions", '{"logit_bias": {"x": 1}}', None, "logit_bias"),
        ("completions", '{"max_tokens": 0}', "max_tokens", "echo"),
        ("completions", '{"stream_options": {}}', "stream_options", "stream is not true"),
        ("completions", '{"prompt": []}', "prompt", "empty"),
        ("completions", '{"prompt": ""}', "prompt", "empty"),
        ("completions", '{"prompt": ["x", ""]}', "prompt", "prompt 1: the prompt is an empty"),
        ("completions", '{"prompt": [1, "x"]}', "prompt", "token ids"),
        ("completions", {"prompt": [VOCAB_SIZE]}, None, "vocabulary"),
        ("completions", {"prompt": [1] * 512}, None, "max_model_len"),
        ("completions", {"prompt": "x" * 20_000}, "prompt", "16384"),
        ("completions", {"prompt": ["x"] * 129}, "prompt", "at most 128"),
        ("completions", '{"timeout": 0}', "timeout", "above 0"),
        ("completions", '{"prompt": [[5], [6, -1]]}', "prompt[1][1]", ""),
        ("completions", '{"stop": ["x", 1]}', "stop[1]", ""),
        ("completions", '{"body": 1}', "body", ""),
        ("completions", '{"stream": true, "stream_options": {"usage": true}}', "stream_options.usage", ""),
        ("completions", '{"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2}', None,
         "no token is left to draw"),
        ("chat/completions", '{"response_format": {"type": "xml"}}', "response_format.type", "json_schema"),
        ("chat/completions", '{"tools": [], "tool_choice": "required"}', "tool_choice", "no tools"),
        ("chat/completions", '{"top_logprobs": 2}', "top_logprobs", "logprobs is not true"),
        ("chat/completions", '{"max_completion_tokens": 3}', "max_tokens", "differ"),
        ("chat/completions", '{"messages": []}', "messages", "at least 1"),
        ("chat/completions", '{"messages": [{"role": "king", "content": "x"}]}', "messages[0].role", "king"),
        ("chat/completions", '{"chat_template_kwargs": {"tokenize": false}}', "chat_template_kwargs", "tokenize"),
        ("chat/completions", '{"chat_template_kwargs": {"self": 1}}', "chat_template_kwargs", "self"),
        ("chat/completions", '{"functions": [{"name": "f"}]}', "functions", "tools"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(running, path, body, param, named):
    running.refuses(f"/v1/{path}", param, named, CHAT if "chat" in path else COMPLETION, body)


CALL = '{"role": "assistant", "tool_calls": [%s]}'


@pytest.mark.parametrize(
    "message, param",
    [
        ('{"role": "user"}', ".content"),
        ('{"role": "user", "content": 3}', ".content"),
        ('{"role": "user", "content": [{"type": "text", "text": 3}]}', ".content[0].text"),
        (
            '{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}',
            ".content[0].image_url.url",
        ),
        ('{"role": "user", "content": "x", "user": 1}', ".user"),
        ('{"role": "user", "content": "x", "str": 1}', ".str"),
        ('{"role": "assistant", "refusal": 1}', ".refusal"),
        (CALL % '{"id": 3}', ".tool_calls[0].id"),
        (CALL % '{"id": "c", "function": {"name": "f", "arguments": 1}}', ".tool_calls[0].function.arguments"),
        ('{"role": "tool", "content": "x"}', ".tool_call_id"),
        ('{"content": "x"}', ".role"),
        ('"x"', ""),
    ],
)
def test_the_field_of_a_message_that_is_at_fault_is_named_as_openai_names_it(running, message, param):
    for path in ("/v1/chat/completions", "/tokenize"):
        error = running.error(path, {"messages": [*HELLO, json.loads(message)]})
        assert error["param"] == f"messages[1]{param}" and error["message"].startswith(f"messages[1]{param}: ")


def test_another_model_a_wrong_path_and_a_wrong_method_are_errors_of_the_same_form(running, client):
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="gpt", prompt="x")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    for answer, status in ((running.get("/nowhere"), 404), (running.get("/v1/completions"), 405)):
        assert (answer.status_code, set(answer.json()["error"])) == (status, {"message", "type", "param", "code"})


@pytest.mark.parametrize("data", [b"{", b'"x"', b"[]", b"", b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_request_is_refused(running, data):
    headers = {"content-type": "application/json"}
    assert running.error("/v1/completions", content=data, headers=headers)["type"] == "invalid_request_error"


def test_json_under_another_content_type_is_refused_with_the_remedy(running):
    headers = {"content-type": "text/plain"}
    assert (
        "application/json" in running.error("/v1/completions", content=b'{"prompt": "x"}', headers=headers)["message"]
    )
