"""Random JSON Schemas, small ones that explode among them: each is compiled and followed, or refused with a reason."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm import StructuredOutput
from nanovllm.features.structured_output import GrammarError
from tests.support.structured import EOS, allowed, grammars

NUM_TOKENS = 6  # of each output
TYPES = ["string", "integer", "number", "object", "array", "boolean", "null"]
COUNTS = st.sampled_from([-1, 0, 1, 2, 40, 5_000, 10**6, 10**30, 1.5, None, "2"])
NUMBERS = st.sampled_from([-(10**30), -1, 0, 1, 3, 7, 101, 103, 997, 1_000_003, 0.5, 0.01, 1e-9, 1e300, True, "7"])
PATTERNS = st.one_of(
    st.builds("a{{{}}}b".format, st.integers(0, 40)),
    st.builds(".*a.{{{}}}b".format, st.integers(0, 40)),
    st.builds("^({}){{{},}}$".format, st.sampled_from(["a|aa", "(x*)*y", ".", "[^a]", "é"]), st.integers(0, 2_000)),
    st.sampled_from(["", "(", "\\", "[z-a]", "(?=a)", "(a)\\1", "\\d+\\w*\\s", "\\p{L}", "(?i)a", "a{99999}", 5]),
)
FORMATS = st.sampled_from(["date-time", "email", "uuid", "ipv6", "hostname", "regex", "unknown", 5])
REFERENCES = st.sampled_from(["#", "#/$defs/a", "#/$defs/none", "#/properties/a", "http://localhost/schema", "", 5])
NAMES = st.sampled_from(["a", "b", "", "é", '"', "\ud800", "$ref"])
VALUES = st.recursive(
    st.sampled_from([None, True, 0, -1, 1.5, 10**40, "", "a", "é\n", "x" * 3_000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)


def of_schemas(inner):
    several = st.lists(inner, max_size=4)
    named = st.dictionaries(NAMES, inner, max_size=3)
    combined = st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), several),
            **dict.fromkeys(("not", "if", "then", "else", "items", "additionalProperties", "contains"), inner),
            **dict.fromkeys(("properties", "patternProperties", "$defs", "dependentSchemas"), named),
            "required": st.lists(NAMES, max_size=3),
        },
    )
    return st.builds(lambda first, second: first | second, plain_schemas(), combined)


def plain_schemas():
    counts = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
    numbers = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from([*TYPES, "unknown", 5]) | st.lists(st.sampled_from(TYPES), max_size=3),
            **dict.fromkeys(counts, COUNTS),
            **dict.fromkeys(numbers, NUMBERS),
            "pattern": PATTERNS,
            "format": FORMATS,
            "$ref": REFERENCES,
            "const": VALUES,
            "enum": st.lists(VALUES, max_size=4),
        },
    )


def bombs():
    """Intersections of one keyword."""
    patterns = st.lists(PATTERNS, min_size=2, max_size=24).map(
        lambda found: {"type": "string", "allOf": [{"pattern": pattern} for pattern in found]}
    )
    divisors = st.lists(st.integers(1, 2_000_000), min_size=1, max_size=5).map(
        lambda found: {"allOf": [{"type": "integer", "multipleOf": divisor} for divisor in found]}
    )
    return patterns | divisors


@pytest.mark.full
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(st.recursive(plain_schemas() | bombs() | st.booleans(), of_schemas, max_leaves=8), st.randoms())
def test_every_schema_is_followed_or_refused_with_a_reason(schema, chance):
    try:
        matcher = grammars().matcher(StructuredOutput(json_schema=schema)).copy()
    except ValueError as error:
        assert str(error).startswith("structured_output.json_schema "), error
        return
    try:
        for _ in range(NUM_TOKENS):
            tokens = allowed(matcher)
            assert tokens
            if (token_id := chance.choice(tokens)) == EOS:
                assert matcher.is_complete()
                return
            matcher.consume(token_id)
    except GrammarError as error:
        assert str(error).startswith("structured_output.json_schema")
