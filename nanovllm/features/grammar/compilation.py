"""Compiles structured outputs with llguidance, without a time limit; `trials` limits time and memory."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from nanovllm.features.grammar.ascii_classes import ascii_lark, ascii_regex, ascii_schema
from nanovllm.features.grammar.matcher import Matcher, shortened
from nanovllm.features.structured_output import GrammarError, StructuredOutput, with_white_space

# llguidance's limits: some 20 ms for the expressions of the first token and 15 ms for later ones; 0.5 to 2 kB of memory
# for each state of the lexer.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
}


def load_library() -> None:
    """Import llguidance (0.1 s)."""
    import llguidance  # noqa: F401


def compile_form(form: StructuredOutput, vocabulary: Any, is_forced: bool) -> Matcher:
    """Compile a form in this thread, without a time limit; raises ValueError that names the field.

    Args:
        vocabulary: an `LLTokenizer` of llguidance.
        is_forced: tokenise forced text with the tokenizer; if False, allow every token that matches it.
    """
    from llguidance import LLMatcher, LLParserLimits

    name = f"structured_output.{form.kind}"
    try:
        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        grammar = grammar_text(form) if is_forced else _unforced(grammar_text(form))
        state = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    except Exception as error:  # llguidance documents errors for invalid JSON only, but raises others
        raise ValueError(f"{name} cannot be compiled: {shortened(str(error))}") from error
    if state.is_error():
        raise refusal(name, state.get_error())
    matcher = Matcher(state, name, -(-vocabulary.vocab_size // 32))
    _try(matcher)
    return matcher


def grammar_problem(grammar: str) -> str | None:
    """llguidance's error for a grammar with any vocabulary, or None; without a time limit."""
    from llguidance import LLMatcher, LLParserLimits

    message = LLMatcher.validate_grammar(grammar, limits=LLParserLimits(**LIMITS, verbose_errors=False))
    return message if message and not message.startswith("WARNING") else None


def grammar_text(form: StructuredOutput) -> str:
    """A form as llguidance's input: Lark text or JSON."""
    from llguidance import LLMatcher

    if form.grammar is not None:
        return str(LLMatcher.grammar_from_lark(ascii_lark(form.grammar)))
    if form.regex is not None:
        return str(LLMatcher.grammar_from_regex(ascii_regex(form.regex)))
    if form.choice:
        return str(LLMatcher.grammar_from_regex("|".join(map(_escaped, form.choice))))
    schema = {"type": "object"} if form.json_schema is None else json.loads(form.json_schema)
    text = json.dumps(with_white_space(ascii_schema(schema)), ensure_ascii=False)
    return str(LLMatcher.grammar_from_json_schema(text))


def _unforced(grammar: str) -> str:
    """The grammar, changed to allow every matching token where only one text is possible."""
    option = '%llguidance {"no_forcing": true}\n'
    if not grammar.lstrip().startswith("{"):
        return option + grammar
    first, *rest = json.loads(grammar)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": f"{option}start: @form"}, first | {"name": "form"}, *rest]})


def _escaped(text: str) -> str:
    """A regex that matches exactly this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def _try(matcher: Matcher) -> None:
    """Compute a new grammar's first mask, which warms its lexer; raises ValueError if no token is possible."""
    mask = np.zeros(matcher.num_words, np.int32)
    try:
        matcher.fill(mask)
        tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if len(tokens):  # a grammar that is too wide fails after its first token
            matcher.copy().consume(int(tokens[0]))
    except GrammarError as error:
        if "NoExtension" in str(error):
            raise ValueError(f"{matcher.name} has no text that satisfies it; allow at least one.") from None
        raise refusal(matcher.name, str(error)) from None
    if not len(tokens):
        raise ValueError(f"{matcher.name} has no text that satisfies it; allow at least one.")


def refusal(name: str, message: str) -> ValueError:
    """The ValueError for llguidance's message about a form."""
    keywords = message.partition("Unimplemented keys: ")[2]
    if keywords:
        return ValueError(
            f"{name} has keywords that are not supported: {shortened(keywords)}. Leave them out, or say it otherwise."
        )
    return ValueError(f"{name} cannot be compiled: {shortened(message)}")
