"""Compiles structured outputs for one tokenizer, by llguidance; within its limits on size and work, and once each."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

from nanovllm.core.structured_output import GrammarError, StructuredOutput, with_white_space
from nanovllm.requests.grammar.ascii_classes import ascii_lark, ascii_regex, ascii_schema
from nanovllm.requests.grammar.matcher import Matcher, shortened
from nanovllm.requests.grammar.vocabulary import makes_markers, read_vocabulary

MAX_CACHED = 256  # compiled grammars of one tokenizer
# llguidance's limits, and what they bound: some 20 ms for the first token's expressions and 15 ms for any other's;
# memory of 2 kB for each state of the lexer.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}


class GrammarCompiler:
    """Makes the matchers of one engine's requests; any thread may call it.

    Args:
        tokenizer: of the `tokenizers` library, which llguidance reads when the first grammar is compiled: a second for
            a vocabulary of 49,152.
        num_logits: tokens that can be sampled.
        eos_token_ids: they may be drawn where the output is complete.
    """

    def __init__(self, tokenizer: Any, num_logits: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._num_logits = num_logits
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutput, Matcher] = OrderedDict()  # the least recently used first

    def matcher(self, form: StructuredOutput) -> Matcher:
        """A matcher before the first token, which several requests may hold: each sample copies it.

        Raises ValueError that names the field and what is wrong with it, or why this model cannot have any.
        """
        with self._lock:
            vocabulary, is_forced, found = self.vocabulary, self._is_forced, self._compiled.get(form)
            if found is not None:
                self._compiled.move_to_end(form)
                return found
        found = _compile(form, vocabulary, is_forced)  # without the lock, which a large one would hold too long
        with self._lock:
            self._compiled[form] = found
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return found

    @cached_property
    def vocabulary(self) -> Any:
        """llguidance's `LLTokenizer`."""
        if not self._eos_token_ids:
            raise ValueError(
                "structured_output needs an end-of-sequence token, by which an output ends, and the model names none. "
                "Set eos_token_id in its generation_config.json."
            )
        num_tokens = max(self._num_logits, len(self._tokenizer))
        try:
            return read_vocabulary(self._tokenizer, num_tokens, self._eos_token_ids)
        except Exception as error:
            raise ValueError(
                f"structured_output needs a tokenizer that llguidance can read, one of the tokenizers library; of this "
                f"{type(self._tokenizer).__name__} it says: {shortened(str(error))}"
            ) from error

    @cached_property
    def _is_forced(self) -> bool:
        """Whether text without alternatives comes in the tokenizer's own tokens, and not in any that spell it."""
        return not makes_markers(self.vocabulary, self._tokenizer)


def _compile(form: StructuredOutput, vocabulary: Any, is_forced: bool) -> Matcher:
    from llguidance import LLMatcher, LLParserLimits

    name = f"structured_output.{form.kind}"
    try:
        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        grammar = _grammar(form) if is_forced else _unforced(_grammar(form))
        state = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    except Exception as error:  # its constructors promise none but for JSON that is none
        raise ValueError(f"{name} cannot be compiled: {shortened(str(error))}") from error
    if state.is_error():
        raise _refusal(name, state.get_error())
    matcher = Matcher(state, name, -(-vocabulary.vocab_size // 32))
    _try(matcher)
    return matcher


def schema_problem(name: str, schema: Any) -> ValueError | None:
    """What is wrong with a schema, of whatever vocabulary; None if nothing is found.

    Args:
        name: for the error.
    """
    from llguidance import LLMatcher

    return _problem(name, LLMatcher.grammar_from_json_schema(schema))


def check_form(form: StructuredOutput) -> None:
    """Raise ValueError for a form that cannot be compiled for any tokenizer; reads no vocabulary."""
    name = f"structured_output.{form.kind}"
    try:
        problem = _problem(name, _grammar(form))
    except Exception as error:  # as in `_compile`
        raise ValueError(f"{name} cannot be compiled: {shortened(str(error))}") from error
    if problem is not None:
        raise problem


def _problem(name: str, grammar: str) -> ValueError | None:
    from llguidance import LLMatcher, LLParserLimits

    message = LLMatcher.validate_grammar(grammar, limits=LLParserLimits(**LIMITS, verbose_errors=False))
    return _refusal(name, message) if message and not message.startswith("WARNING") else None


def _grammar(form: StructuredOutput) -> str:
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
    """The grammar, which allows every token that fits where its text is without alternatives."""
    option = '%llguidance {"no_forcing": true}\n'
    if not grammar.lstrip().startswith("{"):
        return option + grammar
    first, *others = json.loads(grammar)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": f"{option}start: @form"}, first | {"name": "form"}, *others]})


def _escaped(text: str) -> str:
    """A regex of this very text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def _try(matcher: Matcher) -> None:
    """Take a first step with a new grammar, and leave what its masks need in it; ValueError if there is none."""
    mask = np.zeros(matcher.num_words, np.int32)
    try:
        matcher.fill(mask)
        tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if len(tokens):  # a grammar that is too wide shows it behind its first token
            matcher.copy().consume(int(tokens[0]))
    except GrammarError as error:
        if "NoExtension" in str(error):
            raise ValueError(f"{matcher.name} has no text that satisfies it; allow at least one.") from None
        raise _refusal(matcher.name, str(error)) from None
    if not len(tokens):
        raise ValueError(f"{matcher.name} has no text that satisfies it; allow at least one.")


def _refusal(name: str, message: str) -> ValueError:
    keywords = message.partition("Unimplemented keys: ")[2]
    if keywords:
        return ValueError(
            f"{name} has keywords that are not supported: {shortened(keywords)}. Leave them out, or say it otherwise."
        )
    return ValueError(f"{name} cannot be compiled: {shortened(message)}")
