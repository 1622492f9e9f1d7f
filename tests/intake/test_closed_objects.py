"""Closed objects of a schema: documents are those of `unevaluatedProperties: false`, by the jsonschema library."""

from __future__ import annotations

import copy
import functools
import itertools
import json

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from nanovllm.features.grammar.closed_objects import with_closed_objects


def of(**properties):
    """An object of these properties."""
    return {"type": "object", "properties": properties}


NUMBER = {"type": "integer"}
A, B = of(a=NUMBER), of(b=NUMBER)
REF = {"$ref": "#/$defs/B"}
# Each with properties in alphabetical order; documents have theirs so too.
SCHEMAS = {
    "one object": of(a=NUMBER, b=NUMBER),
    "objects within": of(a=B, b={"type": "array", "items": A}),
    "an object or null": {"type": ["object", "null"], "properties": {"a": {"anyOf": [B, {"type": "null"}]}}},
    "all of": {"allOf": [A, B]},
    "all of beside properties": {"allOf": [A]} | of(b=B),
    "any of, what is required": A | {"anyOf": [{"required": ["a"]}, {"properties": {"b": NUMBER}, "required": ["b"]}]},
    "one of, by a constant": {"oneOf": [
        of(a={"const": 1}, b=NUMBER) | {"required": ["a"]}, of(a={"const": {}}, z=NUMBER) | {"required": ["a"]}]},
    "a definition": {"$defs": {"B": B}} | of(a=REF),
    "a definition with a slash in its name": {"$defs": {"B/C": B}} | of(a={"$ref": "#/$defs/B~1C"}),
    "a definition, alone and combined": {"$defs": {"B": A}, "allOf": [REF]} | of(b=REF),
    "a definition beside a note and a type": {"$defs": {"B": B}} | of(a=REF | {"type": "object", "description": "b"}),
    "a chain of definitions": {
        "$defs": {"C": {"allOf": [A, REF]}, "B": B}, "type": "array", "items": {"$ref": "#/$defs/C"}},
    "a tree": {"$defs": {"B": of(a=REF, b=NUMBER)}} | REF,
    "itself": of(a={"$ref": "#"}, b=NUMBER),
    "a property that is required only": A | {"required": ["a"]},
    "a pattern": A | {"patternProperties": {"^b$": NUMBER}},
    "a union of a definition, a constant and null": {
        "$defs": {"B": B}, "anyOf": [REF, {"const": 1}, {"type": "null"}]},
    "a definition or any strings": {
        "$defs": {"B": B},
        "anyOf": [REF, {"type": "object", "additionalProperties": {"type": "null"}}]},
}  # fmt: skip
# Schemas that say otherwise, or nothing, of properties: they stay as they are.
OPEN = [
    {"type": "object"}, of(), A | {"additionalProperties": True},
    A | {"additionalProperties": NUMBER}, A | {"additionalProperties": False}, A | {"unevaluatedProperties": True},
    {"allOf": [A, {"additionalProperties": NUMBER}]}, A | {"enum": [{"a": 1, "z": 2}]}, A | {"minProperties": 2},
    {"enum": [1, "a"]}, {"type": "string"}, True, {"$ref": "#elsewhere"}, {"allOf": [A, {"$ref": "other.json"}]},
    of(a={"$id": "https://example.org/a", **B}),
]  # fmt: skip
INNER = [
    1,
    None,
    {},
    {"a": 1},
    {"b": 1},
    {"z": None},
    {"a": {"z": 1}},
    {"a": {"b": 2}},
    [{"a": 1}],
    [{"z": 1}],
]
TOKENIZER = LLTokenizer("byte")


def documents():
    """Values of a few properties, alone and in lists."""
    names = [names for size in range(4) for names in itertools.combinations(("a", "b", "z"), size)]
    filled = [dict.fromkeys(given, 1) for given in names]
    filled += [{name: value} for name in ("a", "b", "z") for value in INNER]
    filled += [{"a": left, "b": right} for left in INNER for right in INNER]
    return [1, None, *filled, *([value] for value in filled[:40])]


@functools.cache
def compiled(schema):
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_json_schema(schema))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepted(schema, document):
    matcher = compiled(json.dumps(schema)).deep_copy()
    token_ids = TOKENIZER.tokenize_str(json.dumps(document, separators=(", ", ": ")))
    return matcher.consume_tokens(token_ids) and matcher.is_accepting()


def as_standard(schema, *, is_value=True):
    """The schema with `unevaluatedProperties: false` for each value that it describes."""
    if not isinstance(schema, dict):
        return schema
    made = {name: copy.deepcopy(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict):
        made["properties"] = {name: as_standard(part) for name, part in schema["properties"].items()}
    if "items" in schema:
        made["items"] = as_standard(schema["items"])
    for name in ("allOf", "anyOf", "oneOf"):
        if name in schema:
            made[name] = [as_standard(part, is_value=False) for part in schema[name]]
    if "$defs" in schema:
        made["$defs"] = {name: as_standard(part, is_value=False) for name, part in schema["$defs"].items()}
    return made | {"unevaluatedProperties": False} if is_value else made


@pytest.mark.parametrize("name", SCHEMAS)
def test_documents_of_closed_objects_are_those_of_the_standards_keyword(name):
    schema = SCHEMAS[name]
    before, closed = copy.deepcopy(schema), with_closed_objects(schema)
    validator = jsonschema.Draft202012Validator(as_standard(schema))
    expected = [document for document in documents() if validator.is_valid(document)]
    found = [document for document in documents() if accepted(closed, document)]
    assert found == expected and len(found) > 1
    assert schema == before and any(
        not accepted(closed, document) and accepted(schema, document) for document in documents()
    )


@pytest.mark.parametrize("schema", OPEN, ids=[str(number) for number in range(len(OPEN))])
def test_a_schema_that_says_otherwise_stays_as_it_is(schema):
    assert with_closed_objects(schema) == schema


def test_a_document_has_the_properties_of_one_branch():
    """The standard's keyword counts those of every branch that it fits: invented ones, for a client."""
    closed = with_closed_objects({"anyOf": [A | {"required": ["a"]}, B | {"required": ["b"]}]})
    assert accepted(closed, {"a": 1}) and accepted(closed, {"b": 1})
    assert not accepted(closed, {"a": 1, "b": 1}) and not accepted(closed, {"a": 1, "z": 1})


def test_a_required_property_without_a_schema_stays_possible():
    closed = with_closed_objects(A | {"required": ["a", "z"]})
    assert accepted(closed, {"a": 1, "z": [1]}) and not accepted(closed, {"a": 1, "b": 1, "z": 1})


def test_properties_keep_their_order():
    closed = with_closed_objects({"allOf": [{"properties": {"z": NUMBER}}, {"properties": {"a": NUMBER}}]})
    assert accepted(closed, {"z": 1, "a": 1}) and not accepted(closed, {"a": 1, "z": 1})


def chained(length):
    """Definitions that each take in all after them: the names to collect grow with the square."""
    chain = {f"d{number}": {"properties": {f"p{number}": True}, "allOf": [{"$ref": f"#/$defs/d{number + 1}"}]}
             for number in range(length)}  # fmt: skip
    return {"$defs": chain | {f"d{length}": {}}}


def test_compositions_without_end_are_refused_with_a_remedy():
    for schema, said in (
        (chained(1000) | {"$ref": "#/$defs/d0"}, "through more than 50 others"),
        (chained(40) | {"prefixItems": 300 * [{"allOf": [{"$ref": "#/$defs/d0"}]}]}, "more than 200000 names"),
    ):
        with pytest.raises(ValueError, match=f"{said}.*Set additionalProperties in it, or open_objects"):
            with_closed_objects(schema)


def test_a_long_chain_of_values_is_closed():
    chain = {f"d{number}": {"properties": {"a": {"$ref": f"#/$defs/d{number + 1}"}}} for number in range(2000)}
    closed = with_closed_objects({"$defs": chain | {"d2000": {}}, "$ref": "#/$defs/d0"})
    assert len(closed["$defs"]) == 2001
