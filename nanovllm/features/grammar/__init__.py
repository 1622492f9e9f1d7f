"""Structured outputs: JSON schemas, regular expressions and grammars, as masks of the tokens allowed next."""

NEEDS = ("features.extras", "features.intake", "features.structured_output")
