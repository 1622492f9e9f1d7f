"""Structured outputs as they come in: exactly one field, limits on size and depth, what only a compiler can tell."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pydantic
import pytest

from nanovllm import SamplingParams, StructuredOutput
from nanovllm.features.composition.input_processor import build_input_processor
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.grammar import compiler
from nanovllm.features.grammar.compiler import GrammarCompiler
from nanovllm.features.grammar.trials import LIMITS_TEXT
from nanovllm.features.structured_output import GrammarError
from nanovllm.requests import RequestLimits
from tests.support.structured import EOS, allowed, assert_equal_masks, grammars, is_document
from tests.support.tiny_models import VOCAB_SIZE, tiny_tokenizer


def new_compiler():
    return GrammarCompiler(tiny_tokenizer(), VOCAB_SIZE, (EOS,))


class Person(pydantic.BaseModel):
    name: str
    age: int


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


ITSELF = {"type": "object"}
ITSELF["properties"] = ITSELF
SHARED = {"type": "string"}  # as text, 2^40 times as much
for _ in range(40):
    SHARED = {"anyOf": [SHARED, SHARED]}


@pytest.mark.parametrize("schema", [
    Person, Person.model_json_schema(), json.dumps(Person.model_json_schema()), {"type": "object"}, True, nested(99),
], ids=["model", "dict", "text", "short", "true", "deep"])  # fmt: skip
def test_a_schema_is_kept_as_text_and_crosses_a_border_as_a_dict(schema):
    form = StructuredOutput(json_schema=schema)
    assert isinstance(form.json_schema, str) and form.kind == "json_schema"
    assert StructuredOutput(**form.to_dict()) == form and hash(form)
    assert SamplingParams(structured_output=form.to_dict()).structured_output == form


def test_properties_keep_their_order():
    names = ["z", "a", "m"]
    form = StructuredOutput(json_schema={"properties": {name: {} for name in names}})
    assert list(json.loads(form.json_schema)["properties"]) == names


@pytest.mark.parametrize(("fields", "kind", "message"), [
    ({}, ValueError, "no field that is set; give exactly one of json_schema, json_object, regex, grammar, choice"),
    ({"regex": "a", "json_object": True}, ValueError, "json_object and regex; give exactly one"),
    ({"choice": []}, ValueError, "no field that is set"),
    ({"choice": ["a", ""]}, ValueError, "choice holds an empty string"),
    ({"choice": [3]}, TypeError, "choice must hold strings, not 3"),
    ({"choice": "abc"}, TypeError, "choice must be a list of strings, not 'abc'"),
    ({"choice": ["a"] * 10_001}, ValueError, "choice has 10001 strings; at most 10000"),
    ({"regex": ""}, ValueError, "regex is empty"),
    ({"regex": 3}, TypeError, "regex must be a string, not 3"),
    ({"grammar": "a\ud800"}, ValueError, "grammar holds half of a surrogate pair"),
    ({"grammar": "x" * 300_000}, ValueError, "grammar has 300000 bytes in UTF-8; at most 262144"),
    ({"grammar": "é" * 200_000}, ValueError, "grammar has 400000 bytes"),
    ({"json_object": "yes"}, TypeError, "json_object must be True or False"),
    ({"json_schema": "{"}, ValueError, "json_schema is not JSON: "),
    ({"json_schema": "[]"}, TypeError, "json_schema must be a dict, JSON text of an object, or a pydantic model class"),
    ({"json_schema": False}, ValueError, "json_schema is false, which no document satisfies"),
    ({"json_schema": {"const": object()}}, ValueError, "json_schema cannot be written as JSON"),
    ({"json_schema": {"const": float("nan")}}, ValueError, "json_schema cannot be written as JSON"),
    ({"json_schema": nested(200)}, ValueError, "json_schema nests objects and arrays deeper than 100 levels"),
    ({"json_schema": "[" * 50_000}, ValueError, "json_schema nests objects and arrays deeper than 100 levels"),
    ({"json_schema": SHARED}, ValueError, "json_schema has more than 262144 bytes in UTF-8; at most 262144"),
    ({"json_schema": ITSELF}, ValueError, r"deeper than 100 levels \(or holds itself\)"),
    ({"json_schema": {"enum": ["x" * 300_000]}}, ValueError, "json_schema has .* bytes in UTF-8; at most 262144"),
])  # fmt: skip
def test_a_bad_field_is_named_with_its_limit(fields, kind, message):
    with pytest.raises(kind, match=message):
        StructuredOutput(**fields)


def test_the_parameter_takes_nothing_else():
    with pytest.raises(TypeError, match="structured_output must be a StructuredOutput or None, not 'json'"):
        SamplingParams(structured_output="json")
    with pytest.raises(ValueError, match="structured_output has no field 'schema'; it has json_schema"):
        SamplingParams(structured_output={"schema": {}})
    with pytest.raises(ValueError, match="ignore_eos is set beside structured_output"):
        SamplingParams(structured_output={"regex": "a"}, ignore_eos=True)


@pytest.mark.parametrize(("fields", "message"), [
    ({"regex": "(a"}, r"regex cannot be compiled: .*unclosed group"),
    ({"regex": r"(a)\1"}, "regex cannot be compiled: .*backreferences are not supported"),
    ({"regex": r"(?=a)b"}, "regex cannot be compiled: .*look-around"),
    ({"regex": r"[^\s\S]"}, "regex has no text that satisfies it"),
    ({"grammar": 'start: "a'}, "grammar cannot be compiled: .*lexer error"),
    ({"grammar": "start: b"}, 'grammar cannot be compiled: .*unknown name: "b"'),
    ({"grammar": "start: start"}, "grammar has no text that satisfies it"),
    ({"json_schema": {"not": {"type": "string"}}}, r'json_schema has keywords that are not supported: \["not"\]'),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, r'json_schema has .* not supported: \["uniqueItems"\]'),
    ({"json_schema": {"$ref": "#/$defs/none"}}, "json_schema cannot be compiled: .*/\\$defs/none"),
    ({"json_schema": {"$ref": "https://example.com/a"}}, "json_schema cannot be compiled: .*example.com"),
    ({"json_schema": {"$ref": "#"}}, "json_schema has no text that satisfies it"),
    ({"json_schema": {"type": "string", "enum": [3]}}, "json_schema cannot be compiled: Unsatisfiable schema"),
    ({"json_schema": {"type": 5}}, "json_schema cannot be compiled"),
])  # fmt: skip
def test_what_only_a_compiler_can_tell_is_an_error_of_the_request_that_names_the_field(fields, message):
    with pytest.raises(ValueError, match=f"structured_output.{message}"):
        grammars().matcher(StructuredOutput(**fields))


WIDE = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1200)}}
PATHOLOGICAL = {
    "every property optional": {"json_schema": WIDE},
    "any of many": {"json_schema": {"anyOf": [{"properties": {f"p{n}": {"type": "string"}}} for n in range(1200)]}},
    "a product": {"json_schema": {"allOf": [
        {"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(3)]} for i in range(9)
    ]}},
    "many alternatives": {"grammar": "start: " + " | ".join(json.dumps(f"choice {n}") for n in range(8000))},
}  # fmt: skip


@pytest.mark.parametrize("name", PATHOLOGICAL)
def test_a_form_that_grows_beyond_the_limits_is_refused_before_a_step_sees_it(name):
    # A slow machine meets the limit of time first.
    limits = rf"cannot be compiled: .*(limit|max is|too large|size)|{LIMITS_TEXT}"
    with pytest.raises(ValueError, match=rf"structured_output\.\w+ ({limits})"):
        grammars().matcher(StructuredOutput(**PATHOLOGICAL[name]))


def test_a_large_choice_is_none_of_them():
    choices = [f"choice {number} (of many)" for number in range(5000)]
    matcher = grammars().matcher(StructuredOutput(choice=choices)).copy()
    for token_id in tiny_tokenizer().encode(choices[4321], add_special_tokens=False):
        matcher.consume(token_id)
    assert allowed(matcher) == [EOS] and matcher.is_complete()


def test_a_matcher_goes_on_back_and_apart():
    tokenizer = tiny_tokenizer()
    first, second = (tokenizer.encode(text)[0] for text in "ab")
    matcher = grammars().matcher(StructuredOutput(regex="ab|a")).copy()
    begin = allowed(matcher)
    matcher.consume(first)
    other = matcher.copy()
    assert set(allowed(matcher)) == {second, EOS} and matcher.num_tokens == 1
    other.consume(second)
    assert allowed(other) == [EOS] and set(allowed(matcher)) == {second, EOS}
    matcher.rollback(1)
    assert allowed(matcher) == begin and matcher.num_tokens == 0
    with pytest.raises(ValueError, match="2 tokens cannot be taken back of 0"):
        matcher.rollback(2)
    with pytest.raises(GrammarError, match=r"structured_output\.regex cannot be followed any further"):
        matcher.consume(second)


def test_every_end_of_sequence_and_no_token_without_a_logit_is_allowed():
    compiled = GrammarCompiler(tiny_tokenizer(), VOCAB_SIZE + 40, (EOS, 2))
    matcher = compiled.matcher(StructuredOutput(regex="(?s:.)*"))
    assert {EOS, 2} <= set(allowed(matcher)) <= set(range(VOCAB_SIZE)) - {0, 1}


def test_a_grammar_names_special_tokens_and_frees_a_text_before_its_form():
    form = StructuredOutput(grammar='start: thought <|user|> %json {"enum": [1, 2]}\nthought[lazy]: /(.|\\n)*;/\n')
    matcher, tokenizer = grammars().matcher(form).copy(), tiny_tokenizer()
    for token_id in tokenizer.encode("let me see, 17; "[:-1]):
        matcher.consume(token_id)
    assert allowed(matcher) == tokenizer.encode("<|user|>")


def test_compiled_grammars_are_kept_and_the_least_recently_used_go(monkeypatch):
    monkeypatch.setattr(compiler, "MAX_CACHED_BYTES", 3 * compiler.STATES_BYTES - 1)
    own = new_compiler()
    forms = [StructuredOutput(regex=regex) for regex in "abc"]
    first, second = own.matcher(forms[0]), own.matcher(forms[1])
    assert own.matcher(StructuredOutput(regex="a")) is first
    own.matcher(forms[2])
    assert own.matcher(forms[0]) is first and own.matcher(forms[1]) is not second


@pytest.mark.parametrize(
    "form",
    [
        {"regex": r"(?s:.){12,}"},
        {"regex": r"[^\n]{0,40}"},
        {"json_schema": {"type": "array", "items": {"type": "string", "maxLength": 12}}},
        {"grammar": 'start: before "x"\nbefore[lazy]: /(.|\\n)*<b>/\n'},
    ],
    ids=lambda form: next(iter(form)),
)
def test_sets_of_tokens_that_are_allowed_at_once_change_no_mask(form):
    own, plain = (new_compiler() for _ in range(2))
    plain.__dict__["vocabulary"] = own.vocabulary.with_slices([])
    assert_equal_masks((own, plain), StructuredOutput(**form), num_texts=3, most=30)


INDENTED = '{\n                "a": 1\n}'
SPACED = [
    ({}, ['{"a":1}', '{"a": 1}', INDENTED], ['{\n\n"a":1}', '{"a":' + " " * 25 + "1}"]),
    ({"x-guidance": {"whitespace_flexible": False}}, ['{"a":1}'], ['{ "a":1}', INDENTED]),
    ({"x-guidance": {"whitespace_pattern": "\n*"}}, ['{\n\n\n"a":1}'], ['{ "a":1}']),
    ({"x-guidance": {"lenient": True}}, [INDENTED], ['{\n\n"a":1}']),
]


@pytest.mark.parametrize("is_object", [True, False], ids=["json_object", "json_schema"])
@pytest.mark.parametrize(("more", "good", "bad"), SPACED)
def test_white_space_has_an_end_unless_the_schema_says_otherwise(more, good, bad, is_object):
    form = StructuredOutput(json_object=True) if is_object and not more else StructuredOutput(
        json_schema={"type": "object", "properties": {"a": {"type": "integer"}}} | more
    )  # fmt: skip
    assert all(is_document(form, text) for text in good) and not any(is_document(form, text) for text in bad)


def test_white_space_of_any_document_has_an_end_too():
    form = StructuredOutput(json_schema=True)
    assert is_document(form, INDENTED) and is_document(form, "[1, 2]")
    assert not is_document(form, '{\n\n"a":1}') and not is_document(form, "[" + " " * 25 + "1]")


def test_threads_compile_side_by_side():
    own = new_compiler()
    forms = [StructuredOutput(regex=f"[a-z]{{{number % 4 + 1}}}") for number in range(16)]
    with ThreadPoolExecutor(16) as threads:
        matchers = threads.map(lambda form: own.matcher(form).copy(), forms)
        assert all(map(allowed, matchers))


class Slow:
    """A tokenizer that llguidance cannot read."""

    def __len__(self):
        return VOCAB_SIZE


def process(prompts, form, tokenizer=None, eos_token_ids=(EOS,)):
    """Prompts of one call with this form, as an engine with this tokenizer takes them."""
    limits = RequestLimits(VOCAB_SIZE, VOCAB_SIZE, "Tiny", eos_token_ids=eos_token_ids)
    processor = build_input_processor(tokenizer, EngineConfig(max_model_len=64), limits)
    return processor.process(prompts, SamplingParams(structured_output=form), request_ids="01"[: len(prompts)])


def test_what_a_model_or_its_tokenizer_lacks_is_named():
    without_template = tiny_tokenizer()
    without_template.chat_template = None
    for tokenizer, eos_token_ids, said in (
        (None, (EOS,), "structured_output need a tokenizer, and the engine was built without one"),
        (Slow(), (EOS,), "needs a tokenizer that llguidance can read, .* of this Slow it says"),
        (without_template, (), "structured_output needs an end-of-sequence token"),
    ):
        with pytest.raises(ValueError, match=said):
            process([[1, 2]], {"regex": "a"}, tokenizer, eos_token_ids)


def test_prompts_of_one_call_share_what_was_compiled():
    one, two = process([[1], [2]], {"choice": ["a"]}, tiny_tokenizer())
    assert one.matcher is two.matcher is not None
