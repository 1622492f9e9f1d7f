r"""`\d`, `\w` and `\s` mean ASCII in every kind of form, as Python's `re` with re.ASCII has them."""

import json
import re

import pytest

from nanovllm import StructuredOutput
from nanovllm.features.grammar.ascii_classes import ascii_lark, ascii_schema
from tests.support.structured import is_document

CLASSES = [r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"[\d,]", r"[^\w]", r"\\d"]
# A digit, a letter, Thai and N'Ko digits, an accented letter, a no-break space, a tab, punctuation.
CHARACTERS = ["5", "k", "๕", "߅", "é", "\u00a0", "\t", ","]
KINDS = {
    "regex": lambda regex: {"regex": regex},
    "grammar": lambda regex: {"grammar": f'start: "x"? A // "\\w" is /text/ here\nA: /{regex}/\n'},
    "rule": lambda regex: {"grammar": f"start: /{regex}/"},
    "schema": lambda regex: {"json_schema": {"type": "string", "pattern": f"^{regex}$"}},
    "schema in a grammar": lambda regex: {
        "grammar": "start: %json " + json.dumps({"type": "string", "pattern": f"^{regex}$"})
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regex", CLASSES)
def test_a_class_has_the_meaning_of_pythons_re_with_ascii(kind, regex):
    form = StructuredOutput(**KINDS[kind](regex))
    for text in CHARACTERS:
        written = json.dumps(text, ensure_ascii=False) if "schema" in kind else text
        assert is_document(form, written) == bool(re.fullmatch(regex, text, re.ASCII)), (text, form)


def test_keys_of_pattern_properties_are_expressions_and_names_and_data_are_not():
    schema = {
        "properties": {"pattern": {"pattern": r"\d"}, "const": {"pattern": r"\w"}},
        "patternProperties": {r"^\d$": {"type": "integer"}},
        "const": {"pattern": r"\d"},
        "anyOf": [{"pattern": r"\S"}],
    }
    assert ascii_schema(schema) == {
        "properties": {"pattern": {"pattern": "[0-9]"}, "const": {"pattern": "[0-9a-zA-Z_]"}},
        "patternProperties": {"^[0-9]$": {"type": "integer"}},
        "const": {"pattern": r"\d"},
        "anyOf": [{"pattern": r"[^ \t\n\r\f\v]"}],
    }


@pytest.mark.parametrize("grammar", [
    'start: "/\\\\d/" A\nA: /[0-9]/', r"start: A // /\d/",
    "start: A # it's /\\w/\nA: /a\\/b/i", "start: %json {", 'start: "a'
])  # fmt: skip
def test_what_is_no_class_of_an_expression_stays_as_it_is(grammar):
    assert ascii_lark(grammar) == grammar
