"""Strings of tool calls that stand between tags without quotes: constrained by their schemas as those in JSON are."""

import json
import random
import re

import jsonschema
import llguidance
import pytest

from nanovllm.features.grammar.ascii_classes import ascii_regex
from nanovllm.serving.server.answers.grammar import AnswerConstraints
from nanovllm.serving.server.answers.rules import Rules
from nanovllm.serving.server.answers.string_formats import FORMATS
from nanovllm.serving.server.answers.text_values import text_value
from tests.support.answer_grammars import setting_of
from tests.support.serving import function_tool

TAGGED = [(name, as_tokens) for name in ("qwen_xml", "seed", "glm") for as_tokens in (True, False)]
WRITTEN = {
    "qwen_xml": "<tool_call>\n<function=f>\n<parameter=x>\n%s\n</parameter>\n</function>\n</tool_call>",
    "seed": "<seed:tool_call>\n<function=f>\n<parameter=x>%s</parameter>\n</function>\n</seed:tool_call>",
    "glm": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
}


def taking(schema, *, strict=True):
    """A tool that takes one argument x."""
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}
    return function_tool("f", parameters=parameters, strict=strict)


STRINGS = [
    ('{"format": "date"}', ["2024-02-29"], ["some day", "2024-02-30", "2024-02-29 "]),
    ('{"pattern": "^[A-Z]{3}$", "maxLength": 3}', ["ABC"], ["hello world", "AB", "ABCD"]),
    ('{"pattern": "^a|b$", "maxLength": 3}', ["a", "axx", "xxb", "b"], ["xax", "bx", "axxx", ""]),
    ('{"pattern": "\\\\d/\\\\$", "minLength": 4}', ["x1/$", "\n1/$."], ["1/$", "1/x."]),
    ('{"minLength": 1}', ["1", "<a>", "größe\n"], [""]),
    ('{"maxLength": 2}', ["", "äö", "<\n"], ["abc"]),
    ('{"enum": ["C", "F", null]}', ["C", "F"], ["null", "K", ""]),
    ('{"enum": ["C", 1, "C/F"]}', ["C", "C/F"], ["1", "C/"]),
    ('{"enum": ["", "ab", "b"], "pattern": "^b|^$"}', ["", "b"], ["ab", "c"]),
    ('{"const": "C"}', ["C"], ["F"]),
]


@pytest.mark.parametrize("name, as_tokens", TAGGED)
@pytest.mark.costly
def test_strings_between_tags_keep_to_their_schemas(name, as_tokens):
    setting = setting_of(name, as_tokens=as_tokens)
    for schema, good, bad in STRINGS:
        for strict in (True, False):
            tool = taking({"type": "string", **json.loads(schema)}, strict=strict)
            constraints = AnswerConstraints(tools=[tool], must_call=True)
            for text in good:
                assert setting.accepts(constraints, WRITTEN[name] % text), (schema, text)
            for text in bad:
                assert not setting.accepts(constraints, WRITTEN[name] % text), (schema, text)


@pytest.mark.parametrize("name, as_tokens", TAGGED)
@pytest.mark.costly
def test_whatever_is_generated_between_tags_is_valid(name, as_tokens):
    setting, chance = setting_of(name, as_tokens=as_tokens), random.Random(3)
    for own in ({"pattern": "b", "maxLength": 8}, {"minLength": 2, "maxLength": 6}, {"pattern": "^[a-c<]{2,9}$|^/"}):
        tool = taking({"type": "string", **own})
        texts = [
            setting.generate(AnswerConstraints(tools=[tool], must_call=True, is_parallel=False), chance)
            for _ in range(4)
        ]
        for text in filter(None, texts):
            (call,) = setting.read(text, {"f": tool["function"]["parameters"]}).calls
            jsonschema.validate(json.loads(call["function"]["arguments"]), tool["function"]["parameters"])
        assert sum(text is not None for text in texts) >= 2


@pytest.mark.parametrize("name", ["qwen_xml", "seed", "glm"])
def test_a_string_between_tags_does_not_hold_its_closing_tag(name):
    setting, tag = setting_of(name, as_tokens=False), WRITTEN[name].partition("%s")[2].split()[0]
    constraints = AnswerConstraints(tools=[taking({"type": "string", "minLength": 30})], must_call=True)
    assert setting.accepts(constraints, WRITTEN[name] % ("a" * 30))
    assert not setting.accepts(constraints, WRITTEN[name] % f"a{tag}{'a' * 30}")


@pytest.mark.parametrize(
    "schema, what",
    [
        ({"not": {"const": "x"}}, 'has keywords that are not supported: ["not"]'),
        ({"pattern": "(?=a)b"}, "cannot be compiled: regex parse error"),
        ({"pattern": "(^a)b"}, "has a pattern, format or length that cannot be kept"),
        ({"pattern": "a(?i)b"}, "the flags (?i) are not supported"),
        ({"pattern": "a", "maxLength": 0}, "Unsatisfiable"),
        ({"format": "color"}, "Unknown format: color"),
        ({"minLength": 100_000}, "has the minLength 100000; at most 2000"),
        ({"maxLength": "3"}, "maxLength"),
        ({"anyOf": [{"pattern": "a"}]}, "has 'anyOf' beside its type"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen_xml", "seed", "glm"])
def test_a_string_that_cannot_be_kept_is_an_error_for_strict_tools_and_free_for_others(name, schema, what):
    setting = setting_of(name)
    with pytest.raises(ValueError, match=f"^tools: the string 'x' of 'f' .*{re.escape(what)}"):
        setting.accepts(AnswerConstraints(tools=[taking({"type": "string", **schema})]), WRITTEN[name] % "x")
    free = taking({"type": "string", **schema}, strict=False)
    assert setting.accepts(AnswerConstraints(tools=[free], must_call=True), WRITTEN[name] % "hello world")


@pytest.mark.parametrize("schema", [{"enum": [1, None]}, {"const": None}, {"enum": []}, {"enum": 5}], ids=str)
@pytest.mark.parametrize("strict", [True, False])
def test_a_string_with_values_of_other_types_alone_is_an_error(schema, strict):
    setting, tool = setting_of("glm"), taking({"type": "string", **schema}, strict=strict)
    with pytest.raises(ValueError, match=r"^tools: the string 'x' of 'f' has .* without a string"):
        setting.accepts(AnswerConstraints(tools=[tool], must_call=True), "")


FORMATTED = """
2024-02-29 2024-02-30 2023-04-31 2024-13-01 2024-1-1 12:34:56Z 12:34:60.5+01:00 24:00:00Z 12:34:56
23:59:59-24:00 2024-02-29T12:00:00Z 2024-02-29t12:00:00.123z 2024-02-29T12:00:00 P1Y P1Y2M3D P1Y3D P1YT1H PT1H5S
PT1M5S P2W P2WT1H P PT P1DT a@b.c a.b+c@d a..b@c a@-b.c a@[1.2.3.4] a@[1.2.3.256] @b a.@b localhost
a-b.example.com -a a- a. a_b 1.2.3.4 01.2.3.4 1.2.3 :: ::1 1:: 1:2:3:4:5:6:7:8 1:2:3:4:5:6:7:: ::2:3:4:5:6:7:8
1:2:3:4::5:6:7:8 1:2:3:4::6:7:8 1::2::3 12345:: ::ffff:1.2.3.4 g:: 123e4567-e89b-12d3-a456-426614174000
123e4567-e89b-12d3-a456-42661417400 http://a.b/c?d=e#f http://[::1]:80/x http://u:p@h:1/ mailto:a@b.c http: a:/
a:/b//c a:// 1a:b a:b%20c a:b%2 http://h:x/ a:?q a:#f#g //a/b http://[v1.a]/ http://é x-y.z+1:abc
"""


FOUND = "a b ab ba xax xbx A xB 7 ٣ $ x$ ( | x| a/b é/b ^ ]"


def accepted(setting, grammar, texts):
    built = llguidance.LLMatcher(setting.guide, grammar)
    assert not built.is_error(), built.get_error()
    found = []
    for text in texts:
        matcher, ids = built.deep_copy(), setting.tokenizer(text)["input_ids"]
        found.append(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
    return found


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_are_those_of_strings_in_json(name):
    setting, texts = setting_of("none"), FORMATTED.split()
    own = accepted(setting, f"start: T\nT: /{ascii_regex(FORMATS[name])}/\n", texts)
    schema = json.dumps({"type": "string", "format": name})
    assert own == accepted(setting, f"start: %json {schema}", [f'"{text}"' for text in texts])
    assert any(own) and not all(own)


@pytest.mark.parametrize(
    "pattern",
    ["a", "^a", "a$", "^a|b$", "^(a|b)$", "a|^$", r"^\d+$", r"\$", r"^[|(^$]$", r"\||^\(", "(?i)^A|B$", r"^\w/\w$", "",
     "^[^]|]$", "(?:a|b){2}"],
)  # fmt: skip
def test_patterns_are_found_as_in_json(pattern):
    setting = setting_of("none")
    texts = ["", *FOUND.split()]
    rules = Rules(setting.tokenizer)
    value = text_value(rules, {"type": "string", "pattern": pattern}, "</tool_call>", "x", is_strict=True)
    own = accepted(setting, rules.text(value), [f"{text}</tool_call>" for text in texts])
    schema = json.dumps({"type": "string", "pattern": pattern})
    assert own == accepted(setting, f"start: %json {schema}", [f'"{text}"' for text in texts])
