"""Tool calls: rendered into the prompt by the chat template, parsed from the answer by model family."""

import json
import random
import re
from types import SimpleNamespace

import jsonschema
import pytest

from nanovllm.outputs import CompletionOutput
from nanovllm.serving.server.answers.answer_format import AnswerFormat, template_text
from nanovllm.serving.server.answers.tool_calls import FORMATS, ToolStream, detect_format
from nanovllm.serving.server.anthropic.messages import EventWriter
from nanovllm.serving.server.openai.responses_items import Items
from tests.support.answer_cuts import cuts, loaded, read
from tests.support.scripted import TOOL_TEMPLATE
from tests.support.serving import MODEL, function_tool, served, thinking_server, user
from tests.support.tiny_models import CHAT_TEMPLATE

TOOL_SCHEMAS = {"weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}, "time": None}
PARIS = {"city": "Paris"}
ONE = [("weather", PARIS)]
TWO = [("weather", PARIS), ("time", {})]
TOOLS = [
    function_tool("weather", parameters={"type": "object", "properties": {}}),
    function_tool("time", description="What time it is."),
]

ANSWERS = [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", ONE),
    ("hermes", 'Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>\n'
               '<tool_call>{"name": "time", "arguments": {}}</tool_call>', "Let me see.", TWO),
    ("hermes", "It is 3 < 4 and <tool> is no call.", "It is 3 < 4 and <tool> is no call.", []),
    ("hermes", "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    ("hermes", 'So. <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>\nAnd '
               '<tool_call> {"name": "time", "arguments": {}}\n</tool_call> Done.', "So. \nAnd  Done.", TWO),
    ("hermes", '\n<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>\n\n'
               '<tool_call>{"name": "time", "arguments": {}}</tool_call>\nDone.\n', "Done.", TWO),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call> \\"}{<tool_call> \\\\"}}'
               '</tool_call>x', "x", [("weather", {"city": '</tool_call> "}{<tool_call> \\'})]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {}}<tool_call>{"name": "time", "arguments": {}} </tool',
               "", [("time", {}), ("time", {})]),
    ("hermes", '<tool_call>{"name": "unknown"}</tool_call> <tool_call>{"name": "time", "arguments": "{}"}</tool_call>',
               '<tool_call>{"name": "unknown"}</tool_call>', [("time", {})]),
    ("hermes", '<tool_call>no<tool_call>{"name": "time"}</tool_call>\n', "<tool_call>no", [("time", {})]),
    ("hermes", " Plain, with space at both ends <tool_call> ", " Plain, with space at both ends <tool_call> ", []),
    ("llama", '{"name": "weather", "parameters": {"city": "Paris"}}<|eot|>', "", ONE),
    ("llama", '\n<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; '
              '{"name": "time", "parameters": {}}', "", TWO),
    ("llama", 'It is {"name": "weather", "parameters": {}}', 'It is {"name": "weather", "parameters": {}}', []),
    ("llama", '{"city": "Paris"}', '{"city": "Paris"}', []),
    ("llama", "Fine.<|eot|>", "Fine.", []),
    ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "time", "arguments": {}}]',
                "", TWO),
    ("mistral", '[TOOL_CALLS]weather{"city": "Paris"}[TOOL_CALLS]time[ARGS]{}', "", TWO),
    ("mistral", "Just text<|eot|>", "Just text", []),
    ("mistral", "[TOOL_CALLS]nonsense", "[TOOL_CALLS]nonsense", []),
    ("qwen_xml", "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
                 "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n"
                 "</function>\n</tool_call>", "Let me see.", [("weather", PARIS | {"days": 3}), ("time", {})]),
    ("qwen_xml", "<tool_call>\n<function=weather>\n<parameter=city>\n<a>\n</function> </parameter> 1\n\n</parameter>\n"
                 "</function>\n</tool_call> Done.", "Done.",
                 [("weather", {"city": "<a>\n</function> </parameter> 1\n"})]),
    ("qwen_xml", '<function=weather>{"city": "Rome"}</function>', '<function=weather>{"city": "Rome"}</function>', []),
    ("seed", "So.\n<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n"
             "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=time>\n"
             "</function>\n</seed:tool_call>", "So.", [("weather", PARIS | {"days": 3}), ("time", {})]),
    ("seed", "<seed:tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
             "</seed:tool_call>", "", [("weather", {"city": "\nParis\n"})]),  # no line breaks of its tags
    ("glm", "So.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>", "So.", [("weather", PARIS | {"days": 3})]),
    ("glm", "<tool_call>time\n</tool_call><tool_call>time</tool_call>", "", [("time", {}), ("time", {})]),
    ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value></tool_call> <b></arg_value>\n</tool_call>", "",
            [("weather", {"city": "</tool_call> <b>"})]),
    ("glm", "<tool_call>weather\n<arg_key>city", "<tool_call>weather\n<arg_key>city", []),
    ("harmony", "<|channel|>final<|message|>It is <b>.<|return|>", "It is <b>.", []),
    ("harmony", "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to="
                'functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>', "Let me see.", ONE),
    ("harmony", ' to=functions.time<|channel|>commentary json<|message|>{}<|call|>', "", [("time", {})]),
    ("harmony", "<|channel|>commentary to=functions.unknown<|message|>{}<|call|>", "{}", []),
    ("harmony", '<|channel|>commentary to=functions.time<|message|>{"x', '{"x', []),
    ("harmony", "No channel at all", "No channel at all", []),
]  # fmt: skip


def answer(form, parts):
    """Content and calls of an answer in parts."""
    special = frozenset(["<|eot|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"])
    stream = AnswerFormat(None, FORMATS[form], special).stream(TOOL_SCHEMAS, is_open=False)
    thought, content, calls = read(stream, parts)
    assert not thought
    return content, loaded(calls)


@pytest.mark.parametrize("form, text, content, calls", ANSWERS)
def test_an_answer_is_parsed_the_same_wherever_its_chunks_are_cut(form, text, content, calls):
    for parts in cuts(text, random.Random(text)):  # within special tokens too: stop strings do so
        assert answer(form, parts) == (content, calls), parts


def test_a_stream_gives_a_tool_call_when_it_has_ended_and_text_behind_it_at_once():
    stream = ToolStream(FORMATS["hermes"], TOOL_SCHEMAS)
    assert stream.add('Now: <tool_call>{"name": "time"', is_last=False) == ["Now:"]
    (call,) = stream.add("}</tool_call>", is_last=False)
    assert call["function"] == {"name": "time", "arguments": "{}"}
    assert stream.add(" It is", is_last=False) == ["  It is"]
    assert stream.add(" late.", is_last=True) == [" late."]


@pytest.mark.parametrize(
    "form, text",
    [
        ("hermes", 'One <tool_call>{"name": "time", "arguments": {}}</tool_call> two'),
        ("harmony", "<|channel|>commentary<|message|>One<|end|><|channel|>commentary to=functions.time<|message|>{}"
                    "<|call|><|channel|>final<|message|> two"),
    ],
)  # fmt: skip
def test_a_delta_of_text_around_a_call_keeps_their_order_in_every_protocol(form, text):
    def delta():
        return AnswerFormat(None, FORMATS[form]).stream(TOOL_SCHEMAS, is_open=False).add(text, is_last=True)

    assert ["text" if isinstance(part, str) else "call" for part in delta().parts] == ["text", "call", "text"]
    items = Items(seals=False)
    list(items.add(delta(), end="completed"))
    assert [item["type"] for item in items.output] == ["message", "function_call", "message"]
    completion = CompletionOutput(0, text, [1], "stop", None, None)
    answer = SimpleNamespace(read=lambda *_, **__: delta(), num_calls=1)
    job = SimpleNamespace(turn=SimpleNamespace(answer=lambda *_: answer), head=dict)
    writer, details = EventWriter(job), {"cached_tokens": 0}
    tally = SimpleNamespace(
        usage=lambda: {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": details}
    )
    events = b"".join(writer.add(None, completion, tally)).decode()
    assert re.findall('"content_block":{"type":"([a-z_]+)"', events) == ["text", "tool_use", "text"]


OPTIONAL = '{"anyOf": [{"type": "string"}, {"type": "null"}]}'  # as Pydantic writes it
ROOT = {"$defs": {"zip": {"type": "string"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]}}}
# What is written, and which value it is, by the schema of the parameter.
VALUES = {
    OPTIONAL: {
        **{text: text for text in ("02139", "5551234", "1e5", "true", "False", '{"a": [1]}')},
        "null": None, "None": None, '"5551234"': "5551234",  # as a constrained answer has it
    },
    '{"type": ["string", "null"]}': {"5551234": "5551234", "null": None},
    '{"type": ["null", "string"], "enum": ["1", "2", null]}': {"1": "1"},
    '{"enum": ["1", "2", null]}': {"2": "2"},
    '{"enum": [1, "2"]}': {"2": "2"},
    '{"const": "1"}': {"1": "1"},
    '{"oneOf": [{"const": "1"}, {"type": "boolean"}]}': {"1": "1", "true": True},
    '{"$ref": "#/$defs/zip"}': {"12345": "12345"},
    '{"anyOf": [{"$ref": "#/$defs/zip"}, {"type": "null"}]}': {"12345": "12345"},
    '{"allOf": [{"$ref": "#/$defs/zip"}]}': {"12345": "12345"},
    '{"type": ["string", "boolean"]}': {"1": "1"},
    '{"type": ["string", "integer"]}': {"1": 1, "1.5": "1.5"},
    '{"type": ["string", "number"]}': {"1.5": 1.5},
    '{"anyOf": [{"type": "string"}, {"type": "array"}]}': {"[1]": [1]},
    '{"type": "integer"}': {"1": 1},
    "{}": {"1": 1},
    '{"$ref": "#/$defs/loop"}': {"1": 1},
}  # fmt: skip


@pytest.mark.parametrize(
    "form, text",
    [
        ("qwen_xml", "<function=f>\n<parameter=x>\n%s\n</parameter>\n</function>"),
        ("seed", "<seed:tool_call>\n<function=f>\n<parameter=x>%s</parameter>\n</function>\n</seed:tool_call>"),
        ("glm", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"),
    ],
)
def test_what_looks_like_json_stays_a_string_where_the_schema_allows_no_other(form, text):
    for schema, values in VALUES.items():
        root = {"type": "object", "properties": {"x": json.loads(schema)}, **ROOT}
        for written, value in values.items():
            (call,) = ToolStream(FORMATS[form], {"f": root}).add(text % written, is_last=True)
            arguments = json.loads(call["function"]["arguments"])
            assert repr(arguments) == repr({"x": value}), (schema, written)
            if "loop" not in schema:
                jsonschema.validate(arguments, root)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5}, {"type": ["text", 5]}, {"enum": 5}, {"anyOf": 5}, {"anyOf": [5, "x"]}, {"$ref": 5},
        {"$ref": "#/$defs/none"}, {"$ref": "#/$defs/zip/" + "9" * 5000}, {"$ref": "other.json"}, 5, True,
    ],
    ids=lambda schema: str(schema)[:30],
)  # fmt: skip
def test_a_parameter_whose_schema_says_nothing_is_read_as_json(schema):
    root = {"properties": {"x": schema}, **ROOT}
    text = "<function=f>\n<parameter=x>\n12\n</parameter>\n</function>"
    (call,) = ToolStream(FORMATS["qwen_xml"], {"f": root}).add(text, is_last=True)
    assert json.loads(call["function"]["arguments"]) == {"x": 12}


def test_space_at_the_end_is_content_once():
    stream = ToolStream(FORMATS["hermes"], TOOL_SCHEMAS)
    assert stream.add("Hello.\n\n", is_last=True) == ["Hello.", "\n\n"]
    assert stream.add("", is_last=True) == []


def test_text_that_cannot_become_a_marker_is_shown_at_once():
    stream = ToolStream(FORMATS["hermes"], TOOL_SCHEMAS)
    assert stream.add("Hello <", is_last=False) == ["Hello"]
    assert stream.add("b> you", is_last=False) == [" <b> you"]


@pytest.mark.parametrize(
    "template, form",
    [
        ('<tool_call> {"name": , "arguments":', "hermes"),
        ("... [TOOL_CALLS] ...", "mistral"),
        ('... <|python_tag|> "parameters": ...', "llama"),
        ("<tool_call> <function= <parameter=", "qwen_xml"),
        ("<seed:tool_call> <function= <parameter=", "seed"),
        ("<tool_call> <arg_key>", "glm"),
        ("<|channel|>analysis", "harmony"),
        ({"default": "", "tool_use": "[TOOL_CALLS]"}, "mistral"),
        ('... Environment: ipython ... "parameters": ', "llama"),
        ("tool['type'] + '<｜tool▁call▁begin｜>' '<｜tool▁sep｜>' '\\n' + '```json'", "deepseek_v3"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'", "deepseek_v31"),
        ('{% set dsml_token = "｜DSML｜" %} <{{ dsml_token }}function_calls> message.tool_calls', "deepseek_v32"),
        ('{% set dsml_token = "｜DSML｜" %} <{{ dsml_token }}tool_calls>', "deepseek_v4"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2"),
        ("<|im_system|>tool_declare<|im_middle|>", "kimi_k2"),
        ("'<minimax:tool_call>' <invoke name=\"tool-name-1\">", "minimax_m2"),
        ("'<|tool_call>call:' ... '}<tool_call|>' <|channel>", "gemma4"),
        ('<|START_ACTION|>[ {"tool_call_id": arguments', "cohere"),
        # Other families' calls, which share a tag with these.
        ('<tool_call> <invoke name="..."> arguments', "none"),
        ('within <tool_call></tool_call>: <tool_calls>[{"name": , "arguments": }]', "none"),
        ("<function=name>{...}</function> arguments", "none"),
        ("Environment: ipython ... [name(key=value)] arguments", "none"),
        (CHAT_TEMPLATE, "none"),
        (None, "none"),
    ],
)
def test_the_form_is_found_in_the_chat_template(template, form):
    assert detect_format(template_text(SimpleNamespace(chat_template=template))) == form


running = served(lambda: thinking_server(TOOL_TEMPLATE))


def test_the_template_gets_the_tools_unless_tool_choice_is_none(running):
    with running.client() as client:
        for choice, begin in (("auto", "weather time "), ("none", "<|user|>")):
            answer = client.chat.completions.create(
                model=MODEL, messages=[user("Hello")], tools=TOOLS, tool_choice=choice, max_tokens=2,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
            prompt = running.engine.tokenizer.decode(answer.choices[0].prompt_token_ids)
            assert prompt.startswith(begin)


@pytest.mark.parametrize(
    "arguments", ["null", "3", '{"x": NaN}', "[" * 100_000, '{"x": ' * 5_000], ids=lambda text: text[:8]
)
def test_arguments_that_are_no_object_of_json_are_no_call(arguments):
    for text in (f'<tool_call>{{"name": "time", "arguments": {arguments}}}</tool_call>', f"<tool_call>{arguments}"):
        assert answer("hermes", [text]) == (text, [])


def test_half_of_a_surrogate_pair_in_a_call_reaches_the_client(running, monkeypatch):
    found = [{"arguments": "\ud800"}]
    monkeypatch.setattr("nanovllm.serving.server.answers.answer_format.ToolStream.add", lambda *_, **__: found)
    body = {"messages": [user("Hello")], "tools": TOOLS, "max_tokens": 2}
    answer = running.post("/v1/chat/completions", body)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["arguments"] == "\ud800"
