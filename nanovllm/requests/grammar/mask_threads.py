"""Fills the masks of a step's samples in several threads, across the lexers of their forms."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import perf_counter
from typing import Any, NamedTuple

from nanovllm.core.structured_output import GrammarError
from nanovllm.requests.grammar.matcher import Matcher

MAX_THREADS = 8
ROWS_A_LEXER = 8  # a form with more samples is compiled again
# Replayed in a step by samples that change their lexer, 3 us each; samples with longer outputs keep theirs.
MOVED_TOKENS = 128
# Steps after a slow one that fill masks one by one, because only then is the time of each form known.
MEASURED_STEPS = 16


class MaskRow(NamedTuple):
    """A sample that needs a mask.

    place: index of its mask.
    token_ids: prompt and output.
    start: of the output.
    position: of the token to be drawn.
    """

    place: int
    matcher: Matcher
    token_ids: Sequence[int]
    start: int
    position: int

    @property
    def is_next(self) -> bool:
        """Whether the matcher lacks at most one token, and its form has time left."""
        return self.position - self.start <= self.matcher.num_tokens + 1 and not self.matcher.lexers.budget.is_exceeded


class MaskThreads:
    """llguidance's threads, and the choice of each sample's lexer; Python's lock is free while they work.

    Args:
        num_threads: None for half of the processors that this process may use, at most MAX_THREADS.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        num_processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._num_threads = min(num_processors // 2, MAX_THREADS) if num_threads is None else num_threads
        self._executors: dict[int, Any] = {}  # by number of threads
        self._caller: ThreadPoolExecutor | None = None  # waits for them
        self._num_measured = 0  # steps to come without threads

    def begin(
        self, entries: list[tuple[int, Any, Sequence[int], int, int]], address: int, num_masks: int
    ) -> tuple[list[tuple[int, Any, Sequence[int], int, int]], Callable[[], dict[int, GrammarError]] | None]:
        """Consume the newest token of samples, and start to write their masks to an array [num_masks, num_words].

        Args:
            entries: fields of `MaskRow`.
            address: of the array.

        Returns the entries that are left for `Matcher.follow`, and a function that waits for the masks and returns
        errors by their place; None if no thread is at work. Until then no other call may use the matchers.
        """
        if self._num_threads < 2 or len(entries) <= ROWS_A_LEXER or self._measures(entries):
            return entries, None
        rows = [MaskRow(*entry) for entry in entries]
        if len({id(row.matcher) for row in rows}) < len(rows):  # a sample with drafts has several rows
            return entries, None
        num_lexers = self._spread(rows)
        ready = [row for row in rows if row.is_next]
        left: list[Any] = [row for row in rows if not row.is_next] if len(ready) < len(rows) else []
        failed = _consume(ready)
        filled = [row for row in ready if row.place not in failed] if failed else ready
        if not filled:
            return left, lambda: failed
        filled.sort(key=_lexer_of)  # neighbours go to one thread: several would wait for their lexer
        masks = [(row.matcher.state, row.place) for row in filled]
        arguments = masks, address, 4 * filled[0].matcher.num_words, num_masks
        if self._caller is None:
            self._caller = ThreadPoolExecutor(1, "nanovllm-masks")
        has_begun = Event()
        seconds = self._caller.submit(_fill, self._executor(num_lexers), arguments, has_begun)
        has_begun.wait()  # the caller keeps Python's lock

        def wait() -> dict[int, GrammarError]:
            if seconds.result() > min(row.matcher.lexers.budget.allowed for row in filled):
                self._num_measured = MEASURED_STEPS
            for row in filled:
                try:
                    row.matcher.check()
                except GrammarError as error:
                    failed[row.place] = error
            return failed

        return left, wait

    def _measures(self, entries: list[tuple[int, Any, Sequence[int], int, int]]) -> bool:
        """Whether this step is filled one by one: a slow one came before, or a form has used up time since."""
        if self._num_measured == 0:
            return False
        has_excess = any(matcher.lexers.budget.has_excess for _, matcher, *_ in entries)
        self._num_measured = MEASURED_STEPS if has_excess else self._num_measured - 1
        return True

    def _executor(self, num_lexers: int) -> Any:
        """Threads for at most so many lexers; more would wait for a lexer."""
        from llguidance import LLExecutor

        count = min(self._num_threads, 1 << num_lexers.bit_length() - 1)
        if count not in self._executors:
            self._executors[count] = LLExecutor(count)
        return self._executors[count]

    def _spread(self, rows: list[MaskRow]) -> int:
        """Spread samples over the lexers of their forms, with more lexers for many; returns the lexers in use."""
        forms: dict[int, list[MaskRow]] = {}
        for row in rows:
            forms.setdefault(id(row.matcher.lexers), []).append(row)
        num_used = 0
        for own in forms.values():
            lexers = own[0].matcher.lexers
            wanted = min(self._num_threads, -(-len(own) // ROWS_A_LEXER))
            if wanted > len(lexers.states):
                lexers.grow(wanted)
            num_used += _spread_form(own, min(wanted, len(lexers.states)))
        return num_used


def _lexer_of(row: MaskRow) -> tuple[int, int]:
    return id(row.matcher.lexers), row.matcher.lexer


def _spread_form(rows: list[MaskRow], num_lexers: int) -> int:
    """Move samples of one form from crowded lexers to others; returns the lexers in use."""
    by_lexer: dict[int, list[MaskRow]] = {lexer: [] for lexer in range(num_lexers)}
    for row in rows:
        by_lexer.setdefault(row.matcher.lexer, []).append(row)
    most, num_replayed = -(-len(rows) // num_lexers), 0
    for own in by_lexer.values():
        for row in own[most:]:
            num_tokens = row.matcher.num_tokens
            if num_replayed + num_tokens > MOVED_TOKENS:
                continue
            target = min(range(num_lexers), key=lambda lexer: len(by_lexer[lexer]))
            row.matcher.move(target, row.token_ids[row.start : row.start + num_tokens])
            own.remove(row)
            by_lexer[row.matcher.lexer].append(row)
            num_replayed += num_tokens
    return sum(1 for own in by_lexer.values() if own)


def _consume(rows: list[MaskRow]) -> dict[int, GrammarError]:
    """Consume the newest token of each sample, unless that is done; returns errors by place."""
    failed: dict[int, GrammarError] = {}
    for row in rows:
        matcher = row.matcher
        if row.position - row.start > matcher.num_tokens:
            if matcher.state.consume_token(row.token_ids[row.position - 1]):
                matcher.num_tokens += 1
                continue
            try:
                matcher.check()
            except GrammarError as error:
                failed[row.place] = error
    return failed


def _fill(executor: Any, arguments: tuple[Any, ...], has_begun: Event) -> float:
    """Fill masks with all threads; returns the seconds it took."""
    begin = perf_counter()
    has_begun.set()
    executor.unsafe_compute_mask_ptr(*arguments)
    return perf_counter() - begin
