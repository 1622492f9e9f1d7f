"""Reasoning: thought split from content by the chat template's markers, efforts, and variables of the template."""

import random
from types import SimpleNamespace

import pytest

from nanovllm.serving.server.answers.answer_format import AnswerFormat, answer_format
from nanovllm.serving.server.answers.reasoning import REASONING_FORMATS
from nanovllm.serving.server.answers.template_options import effort_options, known_options, template_variables
from nanovllm.serving.server.answers.thought_count import num_thought_tokens
from nanovllm.serving.server.answers.tool_calls import FORMATS
from nanovllm.serving.server.anthropic.protocol import MessagesRequest
from nanovllm.serving.server.anthropic.translation import as_chat, renamed
from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.openai.protocol import ChatRequest
from nanovllm.serving.server.openai.translated import translated
from tests.support.answer_cuts import cuts, read
from tests.support.scripted import THINKING_TEMPLATE, says, thinking_tokenizer
from tests.support.serving import MODEL, function_tool, served, serving, thinking_server, user
from tests.support.tiny_models import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

ASK = [user("Hello")]
TOOLS = [function_tool("weather", parameters={"type": "object"})]
CALL = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'

# format, whether the template left the thought open, text, thought, content, names of the tools called
ANSWERS = [
    ("think", False, "<think>\nSo it is.\n</think>\n\nFour.", "So it is.", "Four.", []),
    ("think", True, "So it is.\n</think>\n\nFour.", "So it is.", "Four.", []),
    ("think", True, "<a> </b> </think>Four. </think>", "<a> </b>", "Four. </think>", []),
    ("think", True, "It never ends </thin", "It never ends </thin", "", []),
    ("think", False, "\n <think></think>\n\nFour.", "", "Four.", []),
    ("think", False, "Four. <think>no</think>", "", "Four. <think>no</think>", []),
    ("think", False, " <thin", "", " <thin", []),
    ("think", False, "<think>I call " + CALL + "</think>" + CALL, "I call " + CALL, "", ["weather"]),
    ("mistral", False, "[THINK]So.[/THINK]Four.<|eot|>", "So.", "Four.", []),
    ("seed", False, "<seed:think>So.</seed:think>Four.", "So.", "Four.", []),
    ("kimi", True, "So.◁/think▷Four.", "So.", "Four.", []),
    ("cohere", False, "<|START_THINKING|>So.<|END_THINKING|>Four.<|eot|>", "So.", "Four.", []),
    ("gemma4", False, "<|channel>thought\nSo it is.\n<channel|>Four.<|eot|>", "So it is.", "Four.", []),
    ("gemma4", True, "\nSo it is.<channel|>\nFour.", "So it is.", "Four.", []),
    ("gemma4", False, "<|channel>thought\n<channel|>Four.", "", "Four.", []),
    ("gemma4", False, "<|channel>So.<channel|>Four.", "So.", "Four.", []),
    ("gemma4", False, "<|channel>though", "though", "", []),
    ("gemma4", False, "<|channel>thought\nI call " + CALL + "<channel|>" + CALL, "I call " + CALL, "", ["weather"]),
    ("gemma4", False, "Four. <|channel>thought<channel|>", "", "Four. <|channel>thought<channel|>", []),
    ("harmony", False, "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Four."
                       "<|return|>", "So.", "Four.", []),
    ("harmony", False, "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary "
                       "to=functions.weather <|constrain|>json<|message|>{}<|call|>", "So.", "", ["weather"]),
    ("harmony", False, "<|channel|>analysis<|message|>It never ends", "It never ends", "", []),
    ("harmony", False, "assistant is a role in chats.", "", "assistant is a role in chats.", []),
    ("harmony", False, "<|start|>assistant", "", "", []),
    ("harmony", False, "Hi. Use the <|channel|> marker.", "", "Hi. Use the <|channel|> marker.", []),
    ("harmony", False, " to=functions.weather", "", "", []),
    ("none", False, "<think>So.</think>Four.", "", "<think>So.</think>Four.", []),
]  # fmt: skip


def split(name, is_open, parts):
    """Thought, content and names of the tools called of an answer in parts."""
    special = {"<|eot|>", "[THINK]", "[/THINK]", "<|START_THINKING|>", "<|END_THINKING|>", "<|channel>", "<channel|>"}
    form = AnswerFormat(REASONING_FORMATS[name], FORMATS["hermes"], frozenset(special))
    thought, content, calls = read(form.stream({"weather": {}}, is_open=is_open), parts)
    return thought, content, [called for called, _ in calls]


@pytest.mark.parametrize("name, is_open, text, thought, content, names", ANSWERS)
def test_thought_content_and_calls_are_separated_wherever_an_answer_is_cut(
    name, is_open, text, thought, content, names
):
    for parts in cuts(text, random.Random(text)):  # within special tokens too: stop strings do so
        assert split(name, is_open, parts) == (thought, content, names), parts


def test_an_answer_that_ends_within_the_opening_marker_is_its_text():
    assert split("think", False, ["<thi", ""]) == ("", "<thi", [])


def test_a_special_token_that_is_cut_is_not_shown():
    assert split("mistral", False, ["a<|eo", "t|>b", ""]) == ("", "ab", [])


def test_thought_is_shown_as_it_comes():
    stream = AnswerFormat(REASONING_FORMATS["think"], None).stream(None, is_open=True)
    assert stream.add("One", is_last=False).reasoning == "One"
    assert stream.add(" two <", is_last=False).reasoning == " two"
    assert stream.add("3", is_last=False).reasoning == " <3"


@pytest.mark.parametrize(
    "template, name",
    [
        ("{{ '<think>' }}", "think"),
        ("[THINK] [/THINK]", "mistral"),
        ("<seed:think>", "seed"),
        ("◁think▷", "kimi"),
        ("<|START_THINKING|>", "cohere"),
        ("{{ '<|channel>thought\\n' + text + '<channel|>' }}", "gemma4"),
        ("<|channel|>analysis<|message|>", "harmony"),
        (CHAT_TEMPLATE, None),
        (None, None),
    ],
)
def test_the_format_is_found_in_the_chat_template(template, name):
    form = answer_format(SimpleNamespace(chat_template=template)).reasoning
    assert (None if form is None else form.name) == name


running = served(thinking_server)


def test_a_whole_answer_has_its_thought_apart(running, monkeypatch, chat):
    says(running, monkeypatch, "Two and two\n</think>\n\nFour")
    answer = chat(n=2, temperature=1.0)
    for choice in answer.choices:
        assert (choice.message.reasoning_content, choice.message.content) == ("Two and two", "Four")
        assert choice.finish_reason == "stop"
    tokenizer = running.engine.tokenizer
    num_thought = len(tokenizer("Two and two\n</think>")["input_ids"])
    # The marker is several tokens here, and the last of them also holds the line break.
    assert 2 * num_thought <= answer.usage.completion_tokens_details.reasoning_tokens <= 2 * num_thought + 2


GEMMA_TEMPLATE = (
    "{% for m in messages %}{% if m.reasoning %}{{ '<|channel>thought\\n' + m.reasoning + '\\n<channel|>' }}{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<|channel>thought\n<channel|>{% endif %}"
)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_thought_in_a_channel_by_special_tokens_is_apart(monkeypatch, is_streamed):
    tokenizer = thinking_tokenizer(GEMMA_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel>", "<channel|>"]})
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.convert_tokens_to_ids("<|end|>"))
    with serving(model=model, tokenizer=tokenizer) as running, running.client() as client:
        for text, thought in (("<|channel>thought\nTwo and two\n<channel|>Four", "Two and two"), ("Four", "")):
            says(running, monkeypatch, text)
            thinks = {"chat_template_kwargs": {"enable_thinking": bool(thought)}}
            answer = client.chat.completions.create(
                model=MODEL, messages=ASK, temperature=0, stream=is_streamed, extra_body=thinks
            )
            parts = [chunk.choices[0].delta for chunk in answer] if is_streamed else [answer.choices[0].message]
            assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts) == thought
            assert "".join(part.content or "" for part in parts) == "Four"


def test_a_streamed_answer_has_its_thought_apart(running, monkeypatch, chat):
    says(running, monkeypatch, "Two and two</think>Four" + CALL)
    chunks = list(chat(tools=TOOLS, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Two and two"
    assert "".join(delta.content or "" for delta in deltas) == "Four"
    assert [call.function.name for delta in deltas for call in delta.tool_calls or [] if call.id] == ["weather"]
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert 0 < chunks[-1].usage.completion_tokens_details.reasoning_tokens < chunks[-1].usage.completion_tokens


CONTINUED = {
    "messages": [*ASK, {"role": "assistant", "content": "<think>Two and"}],
    "add_generation_prompt": False, "continue_final_message": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "text, body, thought, content",
    [
        ("Four", {"reasoning_effort": "none"}, None, "Four"),
        ("Four", {"chat_template_kwargs": {"enable_thinking": False}}, None, "Four"),
        ("<think>So.</think>Four", {"chat_template_kwargs": {"waits": True}}, "So.", "Four"),
        (" two</think>Four", CONTINUED, "two", "Four"),
        ("Twotwotwo", {"max_tokens": 1}, "T", ""),
    ],
    ids=["no effort", "closed", "the model opens it", "continued", "cut off"],
)
def test_thought_is_where_the_prompt_left_it(running, monkeypatch, text, body, thought, content):
    says(running, monkeypatch, text)
    answer = running.answer("/v1/chat/completions", {"messages": ASK}, body)
    (choice,) = answer["choices"]
    found = choice["message"].get("reasoning_content")
    assert (found and found[: len(thought)], choice["message"]["content"]) == (thought, content)
    assert choice["finish_reason"] == ("stop" if content else "length")
    assert thought or answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_earlier_thought_and_the_effort_reach_the_template(running):
    messages = [*ASK, {"role": "assistant", "content": "4", "reasoning_content": "2+2"}, *ASK]
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, "reasoning_effort": "low"}
    (choice,) = running.answer("/v1/chat/completions", body)["choices"]
    prompt = running.engine.tokenizer.decode(choice["prompt_token_ids"])
    assert prompt.startswith("effort low ") and "<think>2+2</think>4<|end|>" in prompt


def test_a_conversation_has_the_tokens_that_its_answer_begins_from(running):
    bodies = [
        {}, {"tools": TOOLS}, {"chat_template_kwargs": {"enable_thinking": False}},
        CONTINUED | {"continue_final_message": False}, CONTINUED,
    ]  # fmt: skip
    seen = []
    for body in ({"messages": ASK} | each for each in bodies):
        more = {"max_tokens": 1, "return_token_ids": True}
        (choice,) = running.answer("/v1/chat/completions", body, more)["choices"]
        found = running.answer("/tokenize", body, {"add_special_tokens": False})
        assert (found["tokens"], found["count"]) == (choice["prompt_token_ids"], len(found["tokens"]))
        seen.append(found["tokens"])
    assert len(set(map(tuple, seen))) == len(bodies)


def test_variables_that_the_template_does_not_have_are_refused(running):
    for path in ("/tokenize", "/v1/chat/completions"):
        for name, hint in (("enable_thinkin", "did you mean enable_thinking"), ("wait", "waits"), ("zzz", "no such")):
            body = {"messages": ASK, "chat_template_kwargs": {name: True}}
            running.refuses(path, f"chat_template_kwargs.{name}", hint, body)
    body = {"messages": ASK, "chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "low"}
    running.refuses("/v1/chat/completions", "reasoning_effort", "", body)


def test_an_effort_is_said_in_the_variables_of_the_template():
    variables = template_variables(THINKING_TEMPLATE)
    assert {"reasoning_effort", "enable_thinking", "waits"} <= variables
    for effort, known, options in (
        ("high", variables, {"reasoning_effort": "high", "enable_thinking": True}),
        ("none", variables, {"enable_thinking": False}),
        ("none", {"reasoning_effort"}, {"reasoning_effort": "none"}),
        ("none", {"enable_thinking"}, {"enable_thinking": False}),
        ("low", {"thinking"}, {"thinking": True}),
    ):
        assert effort_options(effort, known, can_think=True) == options
    assert effort_options("none", {"messages"}, can_think=False) == {}
    for can_think in (True, False):  # a hint, which changes nothing here
        assert effort_options("low", {"messages"}, can_think=can_think) == {}
    with pytest.raises(ValueError, match=r"reasoning_effort asks for no thought, .* has no switch for it"):
        effort_options("none", {"messages"}, can_think=True)


def test_a_template_without_a_switch_is_told_by_the_field_that_asks_for_one():
    body = MessagesRequest(
        model="m", max_tokens=9, messages=[user("Hello")], thinking={"type": "disabled"},
        output_config={"effort": "high"},
    )  # fmt: skip
    with pytest.raises(ApiError) as found, translated(renamed(body), ChatRequest.names()):
        effort_options(as_chat(body).reasoning_effort, {"messages"}, can_think=True)
    assert found.value.param == "thinking.type" and found.value.message.startswith("thinking.type")


def test_a_switch_that_the_template_lacks_is_left_out_where_it_changes_nothing():
    variables = {"messages", "enable_thinking"}
    kept = known_options({"enable_thinking": False, "thinking": True}, variables, (), can_think=True)
    assert kept == {"enable_thinking": False}
    for name, value in (("enable_thinking", False), ("thinking", False), ("reasoning_effort", "none")):
        assert known_options({name: value}, {"messages"}, (), can_think=False) == {}
        with pytest.raises(ValueError, match=rf"chat_template_kwargs.{name}: .* has no such variable"):
            known_options({name: value}, {"messages"}, (), can_think=True)
    with pytest.raises(ValueError, match="did you mean enable_thinking"):
        known_options({"enable_thought": True}, variables, (), can_think=False)


def test_templates_with_tags_of_their_own_are_read():
    template = (
        "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% if x %}{% break %}{% endif %}{% endfor %}"
    )
    assert template_variables(template) == {"messages", "x"}
    assert template_variables("{% nonsense %}") is None


def test_thought_is_counted_by_the_tokens_of_its_markers():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    special = ["<|channel|>", "<|message|>", "<|return|>", "<|channel>", "<channel|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})

    def count(name, text, is_open=False):
        form, ids = REASONING_FORMATS[name], tokenizer(text)["input_ids"]
        return num_thought_tokens(form, tokenizer, ids, is_open=is_open), ids

    for text, is_open in (("<think>Two and two</think>Four", False), ("Two and two</think>Four", True)):
        number, ids = count("think", text, is_open)
        assert tokenizer.decode(ids[:number]) == text.removesuffix("Four")
    assert count("think", "Four</think>")[0] == 0
    number, ids = count("gemma4", "<|channel>thought\nTwo and two<channel|>Four")
    assert tokenizer.decode(ids[:number]) == "<|channel>thought\nTwo and two<channel|>"
    number, ids = count("harmony", "<|channel|>analysis<|message|>Two and two<|end|>"
                        "<|channel|>final<|message|>Four<|return|>")  # fmt: skip
    assert number == len(tokenizer("Two and two<|end|>")["input_ids"])


@pytest.mark.parametrize(
    "template",
    [
        '{% if not x is defined %}{% set x = "1" %}{% endif %}{{ x }}',
        "{% macro build() %}{% if x is not defined %}{% set x = 1 %}{% endif %}{{ x }}{% endmacro %}{{ build() }}",
        "{% set x = x | default(true) %}{{ x }}",
        "{% if x is not defined %}{% set x = 1 %}{% endif %}{% set n = namespace(y=1) %}{% if x %}{{ n.y }}{% endif %}",
    ],
    ids=["set", "macro", "default", "namespace"],
)
def test_variables_that_a_template_gives_a_default_are_its_variables(template):
    assert template_variables(template) == {"x"}
