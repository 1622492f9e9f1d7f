"""Compiles structured outputs for one tokenizer with llguidance: each once, after a trial in another process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from nanovllm.features.extras import check_extra
from nanovllm.features.grammar.compilation import compile_form, grammar_text, refusal
from nanovllm.features.grammar.matcher import Matcher, shortened
from nanovllm.features.grammar.trial_process import resident_bytes
from nanovllm.features.grammar.trials import TRIALS, TrialVocabulary
from nanovllm.features.grammar.vocabulary import makes_markers, open_vocabulary, vocabulary_text
from nanovllm.features.intake.intake import form_turn
from nanovllm.features.structured_output import StructuredOutput

MAX_CACHED_BYTES = 2**30  # limit for one tokenizer's compiled grammars
# Allowance per grammar for lexer states that its samples add, measured at up to 0.5 kB each.
STATES_BYTES = 10 * 2**20


def check_library() -> None:
    """Raise MissingLibraryError without llguidance."""
    check_extra("structured_output", "structured", "llguidance")


class GrammarCompiler:
    """Makes matchers for one engine's requests; thread-safe.

    Args:
        tokenizer: tokenizer of the `tokenizers` library; llguidance reads it in `prepare` or for the first grammar,
            in one second for a vocabulary of 49,152.
        num_logits: number of tokens that can be sampled.
        eos_token_ids: tokens allowed where the output is complete.
    """

    def __init__(self, tokenizer: Any, num_logits: int, eos_token_ids: Iterable[int]) -> None:
        check_library()
        self._tokenizer = tokenizer
        self._num_logits = num_logits
        self._eos_token_ids = list(eos_token_ids)
        self._reading = threading.Lock()  # one thread reads the vocabulary
        self._cache = GrammarCache()

    def prepare(self, *, is_tried: bool = False) -> None:
        """Read the vocabulary ahead of the first form, here and in the process for trials.

        Args:
            is_tried: True if forms arrive already tried by another process: this one then starts no trials.

        Raises ValueError if this model cannot have structured outputs.
        """
        with self._reading:
            if not is_tried:
                TRIALS.start(self._source)
            _ = self.vocabulary, self._is_forced

    def is_known(self, form: StructuredOutput) -> bool:
        """Whether `matcher` returns without compiling."""
        return form in self._cache

    def matcher(self, form: StructuredOutput, *, is_tried: bool = False) -> Matcher:
        """A matcher at the start of the output, shared by requests: each sample copies it.

        Args:
            is_tried: another process has compiled the form, so the trial is skipped.

        Raises ValueError that names the field and its error, or the reason why this model has no structured outputs.
        """
        found = self._cache.get(form)
        if isinstance(found, str):
            raise ValueError(found)
        if found is not None:
            return found
        with form_turn():
            return self._compiled(form, is_tried=is_tried)

    def _compiled(self, form: StructuredOutput, *, is_tried: bool) -> Matcher:
        if isinstance(known := self._cache.get(form), Matcher):  # another request compiled it meanwhile
            return known
        with self._reading:
            vocabulary = self.vocabulary
            is_forced = self._is_forced
            source = self._source
        # Without the lock, which a large form would hold too long.
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

        def compile_state() -> Any:
            self._cache.add_bytes(form, num_bytes + STATES_BYTES)
            return compile_form(form, vocabulary, is_forced).state

        matcher.lexers.compile_state = compile_state
        return matcher

    @cached_property
    def _source(self) -> TrialVocabulary:
        """The vocabulary as arguments of `open_vocabulary`; raises ValueError if there is none."""
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
        """Whether forced text is tokenised with the tokenizer; if not, every token that matches it is allowed."""
        return not makes_markers(self.vocabulary, self._tokenizer)


class GrammarCache:
    """LRU cache of matchers or errors by form, limited to MAX_CACHED_BYTES."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[StructuredOutput, tuple[Matcher | str, int]] = OrderedDict()
        self._num_bytes = 0

    def __contains__(self, form: StructuredOutput) -> bool:
        with self._lock:
            return form in self._entries

    def get(self, form: StructuredOutput) -> Matcher | str | None:
        """The matcher or error of a form; None if unknown or no longer usable (`Matcher.is_usable`)."""
        with self._lock:
            found = self._entries.get(form, (None, 0))[0]
            if found is None:
                return None
            self._entries.move_to_end(form)
        if isinstance(found, Matcher) and not found.is_usable:
            with self._lock:
                if self._entries.get(form, (None, 0))[0] is found:
                    self._remove(form)
            return None
        return found

    def put(self, form: StructuredOutput, found: Matcher | str, num_bytes: int) -> None:
        num_bytes += sum(len(str(value)) for value in form.to_dict().values())
        with self._lock:
            if form in self._entries:  # two threads compiled it
                self._remove(form)
            self._entries[form] = found, num_bytes
            self._num_bytes += num_bytes
            self._limit()

    def add_bytes(self, form: StructuredOutput, num_bytes: int) -> None:
        """Count another lexer of a form, unless it was removed meanwhile."""
        with self._lock:
            if form in self._entries:
                found, before = self._entries[form]
                self._entries[form] = found, before + num_bytes
                self._num_bytes += num_bytes
                self._limit()

    def _limit(self) -> None:
        while self._num_bytes > MAX_CACHED_BYTES and len(self._entries) > 1:
            self._remove(next(iter(self._entries)))

    def _remove(self, form: StructuredOutput) -> None:
        self._num_bytes -= self._entries.pop(form)[1]


def schema_problem(name: str, schema: Any) -> ValueError | None:
    """The error of a schema with any vocabulary, or None.

    Args:
        name: name of the field, for the message.
    """
    check_library()
    from llguidance import LLMatcher

    return _problem(name, LLMatcher.grammar_from_json_schema(schema))


def check_form(form: StructuredOutput) -> None:
    """Raise ValueError for a form that cannot be compiled for any tokenizer; reads no vocabulary."""
    check_library()
    name = f"structured_output.{form.kind}"
    try:
        problem = _problem(name, grammar_text(form))
    except Exception as error:  # any error may come, as in `compilation.py`
        raise ValueError(f"{name} cannot be compiled: {shortened(str(error))}") from error
    if problem is not None:
        raise problem


def _problem(name: str, grammar: str) -> ValueError | None:
    try:
        message = TRIALS.check(name, grammar)
    except ValueError as error:
        return error
    return None if message is None else refusal(name, message)
