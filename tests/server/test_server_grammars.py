"""Grammars of whole answers: llguidance accepts what the readers read, and what it generates is always a valid call."""

import json
import random

import jsonschema
import llguidance
import pytest

from nanovllm.features.grammar.compiler import GrammarCompiler
from nanovllm.features.structured_output import StructuredOutput
from nanovllm.serving.server.answers.grammar import AnswerConstraints, build_form
from nanovllm.serving.server.answers.reasoning import REASONING_FORMATS
from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.openai.forms import named_error
from tests.support.answer_grammars import setting_of
from tests.support.serving import function_tool

WEATHER = json.loads("""{"type": "object", "required": ["city", "unit"], "additionalProperties": false, "properties": {
    "city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
    "unit": {"type": "string", "enum": ["C", "F"]},
    "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2}},
    "$defs": {"tag": {"type": "string", "maxLength": 3}}}""")
TOOLS = [
    function_tool("weather", parameters=WEATHER, strict=True),
    function_tool("time"),
]
MUST_CALL = AnswerConstraints(tools=TOOLS, must_call=True)
SCHEMAS = {"weather": WEATHER, "time": {"type": "object"}}
NUMBER = StructuredOutput(json_schema={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
TEXTS = (  # also with markers of several tokens
    "hermes", "llama", "mistral", "qwen_xml", "seed", "glm", "deepseek_v3", "deepseek_v31", "deepseek_v32",
    "deepseek_v4", "kimi_k2", "cohere", "gemma4", "minimax_m2",
)  # fmt: skip
SETTINGS = [(name, True) for name in (*TEXTS, "mistral_args", "harmony")] + [(name, False) for name in TEXTS]

JSON = '{"city":"Paris","unit":"C"}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>'
QWEN = """<tool_call>
<function=weather>
<parameter=city>
Paris
</parameter>
<parameter=unit>
C
</parameter>
</function>
</tool_call>"""
SEED = """<seed:tool_call>
<function=weather>
<parameter=city>Paris</parameter>
<parameter=unit>C</parameter>
</function>
</seed:tool_call>"""
GLM = """<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
<arg_key>unit</arg_key>
<arg_value>C</arg_value>
</tool_call>"""
LLAMA = f'{{"name": "weather", "parameters": {JSON}}}'
MISTRAL = f'[TOOL_CALLS][{{"name": "weather", "arguments": {JSON}}}]'
ARGS = f"[TOOL_CALLS]weather[ARGS]{JSON}"
HARMONY = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
V4 = """<｜DSML｜tool_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
<｜DSML｜parameter name="unit" string="true">C</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>"""
KIMI = (
    f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{JSON}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)
COHERE = f"""<|START_ACTION|>[
    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {JSON}}}
]<|END_ACTION|>"""
GEMMA = '<|tool_call>call:weather{city:<|"|>Paris<|"|>,unit:<|"|>C<|"|>}<tool_call|>'
MINIMAX = """<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Paris</parameter>
<parameter name="unit">C</parameter>
</invoke>
</minimax:tool_call>"""
CALL = {"deepseek_v3": DEEPSEEK % f"function<｜tool▁sep｜>weather\n```json\n{JSON}\n```",
        "deepseek_v31": DEEPSEEK % f"weather<｜tool▁sep｜>{JSON}",
        "deepseek_v32": V4.replace("tool_calls", "function_calls"),
        "deepseek_v4": V4, "kimi_k2": KIMI, "cohere": COHERE, "gemma4": GEMMA, "minimax_m2": MINIMAX,
        "hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "mistral_args": ARGS, "qwen_xml": QWEN, "seed": SEED,
        "glm": GLM, "harmony": HARMONY}  # fmt: skip


@pytest.mark.parametrize("name, as_tokens", SETTINGS)
def test_required_calls_are_the_tools_calls_and_nothing_else(name, as_tokens):
    setting = setting_of(name, as_tokens=as_tokens)
    written = CALL[name]
    assert setting.accepts(MUST_CALL, written)
    changed = (written.replace(*pair) for pair in (("weather", "whether"), ("city", "town"), ("C", "K")))
    for wrong in (*changed, "Hello", "Hello" + written, written[:-4], ""):
        assert not setting.accepts(MUST_CALL, wrong), wrong
    (call,) = setting.read(written, SCHEMAS).calls
    assert json.loads(call["function"]["arguments"]) == json.loads(JSON)


@pytest.mark.parametrize("name, as_tokens", SETTINGS)
def test_whatever_is_generated_is_a_valid_call(name, as_tokens):
    setting, chance, num_read = setting_of(name, as_tokens=as_tokens), random.Random(7), 0
    for _ in range(8):
        text = setting.generate(MUST_CALL, chance)
        if text is None:
            continue
        found = setting.read(text, SCHEMAS)
        assert found.calls and not found.content, text
        for call in found.calls:
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
        num_read += 1
    assert num_read >= 4


@pytest.mark.parametrize("name, as_tokens", SETTINGS)
def test_strict_tools_leave_text_free_and_calls_valid(name, as_tokens):
    setting, constraints = setting_of(name, as_tokens=as_tokens), AnswerConstraints(tools=TOOLS)
    plain = "<|channel|>final<|message|>It is 3 < 4." if name == "harmony" else "It is 3 < 4."
    before = "<|channel|>commentary<|message|>Well.<|end|><|start|>assistant" if name == "harmony" else "Well. "
    assert setting.accepts(constraints, plain)
    assert setting.accepts(constraints, CALL[name])
    assert not setting.accepts(constraints, CALL[name].replace("city", "town"))
    if name != "llama":  # calls are whole answers there
        assert setting.accepts(constraints, before + CALL[name])
        assert not setting.accepts(constraints, before + CALL[name].replace("city", "town"))


@pytest.mark.parametrize(
    "name, text",
    [
        ("mistral", MISTRAL.replace("[TOOL_CALLS]", "[TOOL_CALLS] ")),
        ("mistral", MISTRAL.replace("}}", '}, "id": "aB3dE6gH9"}')),
        ("mistral_args", ARGS.replace("[ARGS]", "[CALL_ID]aB3dE6gH9[ARGS]")),
        ("harmony", HARMONY.replace("<|constrain|>", "")),
        ("harmony", f" to=functions.weather<|channel|>commentary json<|message|>{JSON}"),
        ("glm", GLM.replace("\n", "")),
        ("glm", GLM.replace("\n<arg_key>unit", "<arg_key>unit")),
    ],
)
def test_calls_may_be_written_as_other_models_of_the_family_do(name, text):
    setting = setting_of(name)
    for must_call in (True, False):
        assert setting.accepts(AnswerConstraints(tools=TOOLS, must_call=must_call), text)
    (call,) = setting.read(text, SCHEMAS).calls
    assert json.loads(call["function"]["arguments"]) == json.loads(JSON)


@pytest.mark.parametrize(
    "name, between",
    [
        *((name, between) for name in ("hermes", "qwen_xml", "seed", "glm") for between in ("", "\n")),
        ("llama", "; "),
        ("mistral_args", ""),
        ("mistral", None),  # a list in one marker
    ],
)
def test_several_calls_unless_they_are_not_wanted(name, between):
    setting, call = setting_of(name), CALL[name]
    text = f"{call[:-1]}, {call.removeprefix('[TOOL_CALLS][')}" if between is None else call + between + call
    assert len(setting.read(text, SCHEMAS).calls) == 2
    for must_call in (True, False):
        assert setting.accepts(AnswerConstraints(tools=TOOLS, must_call=must_call), text)
        if (between, must_call) != (None, False):
            assert not setting.accepts(AnswerConstraints(tools=TOOLS, must_call=must_call, is_parallel=False), text)


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("reasoning", ["think", "kimi", "gemma4"])
def test_thought_is_free_and_what_follows_it_is_not(reasoning, as_tokens):
    setting = setting_of("hermes", reasoning, as_tokens=as_tokens)
    form = REASONING_FORMATS[reasoning]
    thought = f"So <b> {{}} it is.\n{form.close}\n\n"
    for constraints, answer in (
        (AnswerConstraints(shape=NUMBER), '{"n":3}'),
        (MUST_CALL, HERMES),
    ):
        assert setting.accepts(constraints, thought + answer, is_open=True)
        assert setting.accepts(constraints, form.opening + "\n" + thought + answer)
        assert setting.accepts(constraints, answer)
        assert not setting.accepts(constraints, thought + "no", is_open=True)
        assert not setting.accepts(constraints, "So <b>", is_open=False)
        assert not setting.accepts(constraints, answer, is_open=True)
    both = AnswerConstraints(shape=NUMBER, tools=TOOLS)
    assert setting.accepts(both, thought + HERMES, is_open=True) and setting.accepts(both, '{"n":3}')


def test_thought_of_harmony_is_free_and_what_follows_it_is_not():
    setting, number = setting_of("harmony", "harmony"), AnswerConstraints(shape=NUMBER)
    final = '<|channel|>final<|message|>{"n":3}'
    for begin in ("", "<|channel|>analysis<|message|>So it is.<|end|><|start|>assistant"):
        assert setting.accepts(number, begin + final) and not setting.accepts(number, begin + final.replace("3", "x"))
        assert setting.accepts(MUST_CALL, begin + HARMONY) and not setting.accepts(MUST_CALL, begin + final)


@pytest.mark.parametrize("reasoning", ["think", "gemma4", "harmony"])
def test_a_budget_of_thought_forces_its_end(reasoning):
    setting = setting_of("none" if reasoning != "harmony" else "harmony", reasoning)
    begin = "<|channel|>analysis<|message|>" if reasoning == "harmony" else REASONING_FORMATS[reasoning].opening
    close = "<|end|>" if reasoning == "harmony" else REASONING_FORMATS[reasoning].close
    close_id = setting.tokenizer.convert_tokens_to_ids(close)
    matcher = setting.matcher(AnswerConstraints(budget=3), is_open=False)
    assert matcher.consume_tokens(setting.tokenizer(begin)["input_ids"])
    for _ in range(3):
        assert close_id in allowed_by(matcher)
        assert matcher.consume_token(setting.tokenizer("a")["input_ids"][0])
    assert allowed_by(matcher) == [close_id]
    assert matcher.consume_token(close_id)


def allowed_by(matcher):
    return [token_id for token_id, bias in enumerate(matcher.compute_logit_bias()) if bias]


def test_a_budget_needs_an_end_that_is_one_token():
    with pytest.raises(ValueError, match="thinking_token_budget needs an end of thought that is one token"):
        setting = setting_of("none", "think", as_tokens=False)
        build_form(AnswerConstraints(budget=3), setting.form, setting.tokenizer, is_open=True)


@pytest.mark.parametrize(
    "shape, good, bad",
    [
        (StructuredOutput(json_object=True), '{"a":[1]}', "[1]"),
        (StructuredOutput(choice=("yes", 'a "no"\n')), 'a "no"\n', "maybe"),
        (StructuredOutput(regex=r"[a-c]+/\d \/\n?"), "abc/3 /\n", "abd/3"),
        (StructuredOutput(regex="a\\\nb\nc"), "a\nb\nc", "a\\nb"),
        (StructuredOutput(grammar='start: "a" | foo\nfoo: /x}/\n'), "x}", "b"),
        (NUMBER, '{"n":1}', '{"n":"1"}'),
    ],
    ids=["json_object", "choice", "regex", "regex of lines", "grammar", "json_schema"],
)
def test_every_form_may_follow_thought(shape, good, bad):
    setting = setting_of("none", "think")
    assert setting.accepts(AnswerConstraints(shape=shape), "Well.</think>" + good, is_open=True)
    assert not setting.accepts(AnswerConstraints(shape=shape), "Well.</think>" + bad, is_open=True)


def test_a_keyword_that_is_not_supported_is_an_error_for_strict_tools_alone():
    setting = setting_of("hermes")
    odd = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}
    for strict in (True, False):
        tools = [function_tool("f", parameters=odd, strict=strict)]
        built = build_form(
            AnswerConstraints(tools=tools, must_call=True), setting.form, setting.tokenizer, is_open=False
        )
        assert llguidance.LLMatcher(setting.guide, built.grammar).is_error() == strict


def error_of(format_, tools):
    """The error of an answer that these tools constrain, and its message."""
    setting, constraints = setting_of(format_), AnswerConstraints(tools=tools, must_call=True)
    compiler = GrammarCompiler(setting.tokenizer, len(setting.tokenizer), [3])
    with pytest.raises(ValueError) as found:
        compiler.matcher(build_form(constraints, setting.form, setting.tokenizer, is_open=False))
    error = named_error(found.value, constraints, "tools")
    return error, str(getattr(error, "message", error))


@pytest.mark.parametrize("format_", ["hermes", "qwen_xml", "glm"])
def test_the_error_of_a_tool_names_it_and_the_keyword_and_shows_no_grammar_of_ours(format_):
    good = {"type": "object", "properties": {"a": {"type": "string"}}}
    odd = {"type": "object", "properties": {"a": {"type": "object", "not": {"const": "x"}}}}
    tools = [function_tool(name, parameters=schema, strict=True) for name, schema in (("fine", good), ("odd", odd))]
    error, message = error_of(format_, tools)
    assert isinstance(error, ApiError) and error.param == "tools"
    assert "tools: the parameters of 'odd' have keywords that are not supported: [\"not\"]" in message
    assert "%json" not in message and "r0" not in message


def test_arguments_by_name_need_names():
    setting = setting_of("qwen_xml")
    tools = [function_tool("f", parameters={"anyOf": [{}]}, strict=True)]
    with pytest.raises(ValueError, match="parameters of 'f' have 'anyOf' at their root"):
        build_form(AnswerConstraints(tools=tools), setting.form, setting.tokenizer, is_open=False)


# OPEN stands for the properties of an object; the calls that its schema allows, and those that it does not.
OPEN = '{"name": {"type": "string", "maxLength": 5}}'
OBJECTS = [
    ('{"properties": OPEN}', '{"name":"a"}', '{"name":"a","more":1}'),
    ('{"properties": {}}', "{}", '{"more":1}'),
    ('{"properties": {"in": {"type": "array", "items": {"type": "object", "properties": OPEN}}}}',
     '{"in":[{"name":"a"}]}', '{"in":[{"name":"a","more":1}]}'),
    ('{"properties": {"in": {"$ref": "#/$defs/in"}}, "$defs": {"in": {"type": "object", "properties": OPEN}}}',
     '{"in":{"name":"a"}}', '{"in":{"more":1}}'),
    ("{}", '{"more":1}', None),
    ('{"properties": OPEN, "additionalProperties": true}', '{"more":1}', None),
    ('{"properties": OPEN, "additionalProperties": {"type": "integer"}}', '{"name":"a","more":1}', None),
    ('{"properties": OPEN, "required": ["more"]}', '{"more":1}', None),
    ('{"properties": {"x": {"allOf": [{"properties": OPEN}, {"properties": {"more": {}}}]}}}',
     '{"x":{"name":"a","more":1}}', None),
    ('{"$defs": {"in": {"properties": OPEN}}, '
     '"properties": {"x": {"$ref": "#/$defs/in", "properties": {"more": {}}}}}', '{"x":{"name":"a","more":1}}', None),
    ('{"properties": OPEN, "if": {"required": ["name"]}, "then": {"properties": {"more": {}}}}',
     '{"name":"a","more":1}', None),
    ('{"properties": OPEN, "dependentSchemas": {"name": {"properties": {"more": {}}}}}', '{"name":"a","more":1}', None),
]  # fmt: skip


@pytest.mark.parametrize("schema, good, bad", OBJECTS)
def test_objects_that_name_their_properties_take_no_others_in_calls_unless_their_schema_says_so(schema, good, bad):
    setting, tool = setting_of("hermes"), function_tool("f", parameters=json.loads(schema.replace("OPEN", OPEN)))
    constraints = AnswerConstraints(tools=[tool], must_call=True)
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert setting.accepts(constraints, call % good)
    assert bad is None or not setting.accepts(constraints, call % bad)


@pytest.mark.parametrize(
    "schema, what",
    [
        ({"properties": {"a": {}}, "required": 5}, "required"),
        ({"properties": {"a": {}}, "required": [["a"]]}, "required"),
        ({"properties": 5}, "properties"),
    ],
)
@pytest.mark.parametrize("format_", ["hermes", "qwen_xml", "glm"])
def test_parameters_that_are_no_schema_are_named_in_the_error(format_, schema, what):
    _, message = error_of(format_, [function_tool("f", parameters=schema)])
    assert message.startswith("tools: the parameters of 'f'") and what in message
