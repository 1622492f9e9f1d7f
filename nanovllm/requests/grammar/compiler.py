"""Compiles structured outputs for one tokenizer, by llguidance: tried elsewhere, within limits, and once each."""

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
from nanovllm.requests.grammar.trial_process import resident_bytes
from nanovllm.requests.grammar.trials import TRIALS, TrialVocabulary
from nanovllm.requests.grammar.vocabulary import makes_markers, open_vocabulary, vocabulary_text

MAX_CACHED_BYTES = 2**30  # of one tokenizer's compiled grammars
# For each of them: what the states of its lexer may take that its samples meet, measured at up to 0.5 kB each.
STATES_BYTES = 10 * 2**20
# llguidance's limits, and what they bound: some 20 ms for the first token's expressions and 15 ms for any other's;
# 0.5 to 2 kB of memory for each state of the lexer.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
}


class GrammarCompiler:
    """Makes the matchers of one engine's requests; any thread may call it.

    Args:
        tokenizer: of the `tokenizers` library, which llguidance reads in `prepare`, or when the first grammar is
            compiled: a second for a vocabulary of 49,152.
        num_logits: tokens that can be sampled.
        eos_token_ids: they may be drawn where the output is complete.
    """

    def __init__(self, tokenizer: Any, num_logits: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._num_logits = num_logits
        self._eos_token_ids = list(eos_token_ids)
        self._reading = threading.Lock()  # of the vocabulary
        self._cache = GrammarCache()

    def prepare(self, *, is_tried: bool = False) -> None:
        """Do now what the first form would wait for: read the vocabulary, here and where grammars are tried.

        Args:
            is_tried: as in `matcher`.

        Raises ValueError if this model cannot have structured outputs.
        """
        with self._reading:
            if not is_tried:
                TRIALS.start(self._source)
            _ = self.vocabulary, self._is_forced

    def is_known(self, form: StructuredOutput) -> bool:
        """Whether `matcher` answers at once."""
        return form in self._cache

    def matcher(self, form: StructuredOutput, *, is_tried: bool = False) -> Matcher:
        """A matcher before the first token, which several requests may hold: each sample copies it.

        Args:
            is_tried: another process has compiled it, so that it is no longer tried here.

        Raises ValueError that names the field and what is wrong with it, or why this model cannot have any.
        """
        found = self._cache.get(form)
        if isinstance(found, str):
            raise ValueError(found)
        if found is not None:
            return found
        with self._reading:
            vocabulary, is_forced, source = self.vocabulary, self._is_forced, self._source
        # Without a lock, which a large one would hold too long.
        try:
            num_bytes = 0 if is_tried else TRIALS.compile(source, form, is_forced=is_forced)
            before = resident_bytes()
            matcher = compile_form(form, vocabulary, is_forced)
        except ValueError as error:
            self._cache.put(form, str(error), 0)
            raise
        if is_tried:
            num_bytes = max(0, resident_bytes() - before)
        self._cache.put(form, matcher, num_bytes + STATES_BYTES)
        return matcher

    @cached_property
    def _source(self) -> TrialVocabulary:
        """What the vocabulary is read from."""
        if not self._eos_token_ids:
            raise ValueError(
                "structured_output needs an end-of-sequence token, by which an output ends, and the model names none. "
                "Set eos_token_id in its generation_config.json."
            )
        try:
            text = vocabulary_text(self._tokenizer, self._eos_token_ids)
            return TrialVocabulary((text, max(self._num_logits, len(self._tokenizer)), self._eos_token_ids))
        except Exception as error:
            raise self._unreadable(error) from error

    @cached_property
    def vocabulary(self) -> Any:
        """llguidance's `LLTokenizer`."""
        source = self._source.source
        try:
            return open_vocabulary(*source)
        except Exception as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> ValueError:
        return ValueError(
            f"structured_output needs a tokenizer that llguidance can read, one of the tokenizers library; of this "
            f"{type(self._tokenizer).__name__} it says: {shortened(str(error))}"
        )

    @cached_property
    def _is_forced(self) -> bool:
        """Whether text without alternatives comes in the tokenizer's own tokens, and not in any that spell it."""
        return not makes_markers(self.vocabulary, self._tokenizer)


class GrammarCache:
    """Matchers, or the reasons why there are none, by their forms: the least recently used go first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[StructuredOutput, tuple[Matcher | str, int]] = OrderedDict()
        self._num_bytes = 0

    def __contains__(self, form: StructuredOutput) -> bool:
        with self._lock:
            return form in self._entries

    def get(self, form: StructuredOutput) -> Matcher | str | None:
        """What is known of a form, unless its samples have met as many states as its lexer may have."""
        with self._lock:
            found = self._entries.get(form, (None, 0))[0]
            if found is None:
                return None
            self._entries.move_to_end(form)
        if isinstance(found, Matcher) and not _is_usable(found):
            with self._lock:
                if self._entries.get(form, (None, 0))[0] is found:
                    self._remove(form)
            return None
        return found

    def put(self, form: StructuredOutput, found: Matcher | str, num_bytes: int) -> None:
        num_bytes += sum(len(str(value)) for value in form.to_dict().values())
        with self._lock:
            if form in self._entries:  # compiled twice at a time
                self._remove(form)
            self._entries[form] = found, num_bytes
            self._num_bytes += num_bytes
            while self._num_bytes > MAX_CACHED_BYTES and len(self._entries) > 1:
                self._remove(next(iter(self._entries)))

    def _remove(self, form: StructuredOutput) -> None:
        self._num_bytes -= self._entries.pop(form)[1]


def _is_usable(matcher: Matcher) -> bool:
    """Whether its lexer, which all of its copies share, still works."""
    try:
        matcher.copy().fill(np.zeros(matcher.num_words, np.int32))
    except GrammarError:
        return False
    return True


def load_library() -> None:
    """Import llguidance, which takes a tenth of a second."""
    import llguidance  # noqa: F401


def compile_form(form: StructuredOutput, vocabulary: Any, is_forced: bool) -> Matcher:
    """Compile a form in this thread, however long that takes; ValueError that names the field.

    Args:
        vocabulary: llguidance's.
        is_forced: whether text without alternatives comes in the tokenizer's own tokens.
    """
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


def grammar_problem(grammar: str) -> str | None:
    """What llguidance says is wrong with a grammar, of whatever vocabulary, however long it takes to find out."""
    from llguidance import LLMatcher, LLParserLimits

    message = LLMatcher.validate_grammar(grammar, limits=LLParserLimits(**LIMITS, verbose_errors=False))
    return message if message and not message.startswith("WARNING") else None


def _problem(name: str, grammar: str) -> ValueError | None:
    try:
        message = TRIALS.check(name, grammar)
    except ValueError as error:
        return error
    return None if message is None else _refusal(name, message)


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
