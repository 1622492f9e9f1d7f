"""Fills the masks of a step's samples in several threads, across the lexers of their forms."""

from __future__ import annotations

import os
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from threading import Thread
from time import perf_counter
from typing import Any, TypeAlias

from nanovllm.features.grammar.matcher import Matcher
from nanovllm.features.structured_output import GrammarError

MAX_THREADS = 8
ROWS_A_LEXER = 8  # a form with more samples is compiled again
# Replayed in a step by samples that change their lexer, 3 µs each; samples with longer outputs keep theirs.
MOVED_TOKENS = 128
# Time of a usual mask. A step is slow if its masks take longer than that each, and one mask's allowance.
ROW_SECONDS = 60e-6
SPREAD_STEPS = 8  # rows are spread anew after so many steps, and when their number changes
# Steps after a slow one that fill masks one by one, because only then is the time of each form known.
MEASURED_STEPS = 16


# Place of the mask, matcher, prompt and output, the prompt's length, position of the token to be drawn.
MaskRow: TypeAlias = tuple[int, Any, Sequence[int], int, int]


class MaskThreads:
    """llguidance's threads, and the choice of each sample's lexer; Python's lock is free while they work.

    Each step passes here with all its rows: a loop of few calls, since the device may wait for it.

    Args:
        num_threads: None for half of the processors that this process may use, at most MAX_THREADS.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        num_processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._num_threads = min(num_processors // 2, MAX_THREADS) if num_threads is None else num_threads
        self._executors: dict[int, Any] = {}  # number of threads -> executor
        self._caller: MaskCaller | None = None
        self._num_measured = 0  # steps to come without threads
        self._num_rows = self._num_lexers = self._num_steps = 0  # rows and lexers in use when rows were last spread

    def begin(
        self, rows: list[MaskRow], address: int, num_masks: int
    ) -> tuple[list[MaskRow], Callable[[], dict[int, GrammarError]] | None]:
        """Consume the newest token of samples, and start to write their masks to an array [num_masks, num_words].

        Returns the rows that are left for `Matcher.follow`, and a function that waits for the masks and returns errors
        by their place; None if no thread is at work. Until then no other call may use the matchers.
        """
        if self._num_threads < 2 or len(rows) <= ROWS_A_LEXER or self._measures(rows):
            return rows, None
        if len({id(row[1]) for row in rows}) < len(rows):  # a sample with drafts has several rows
            return rows, None
        self._num_steps += 1
        if len(rows) != self._num_rows or self._num_steps % SPREAD_STEPS == 0:
            self._num_rows, self._num_lexers = len(rows), self._spread(rows)
        left, filled, failed = _consume(rows)
        if not filled:
            return left, lambda: failed
        filled.sort(key=_lexer_of)  # neighbours go to one thread: several would wait for their lexer
        masks = [(matcher.state, place) for place, matcher in filled]
        if self._caller is None:
            self._caller = MaskCaller()
        begun = self._caller.begin(
            self._executor(self._num_lexers), masks, address, 4 * filled[0][1].num_words, num_masks
        )

        def wait() -> dict[int, GrammarError]:
            allowed = filled[0][1].lexers.budget.allowed  # the same for all masks of a vocabulary
            seconds = begun()
            if seconds > allowed + ROW_SECONDS * len(filled):
                self._num_measured = MEASURED_STEPS
            for place, matcher in filled:
                matcher.lexers.budget.expect(seconds / len(filled))
                try:
                    matcher.check()
                except GrammarError as error:
                    failed[place] = error
            return failed

        return left, wait

    def _measures(self, rows: list[MaskRow]) -> bool:
        """Whether this step is filled one by one: a slow one came before, or a form has used up time since."""
        if self._num_measured == 0:
            return False
        has_excess = any(matcher.lexers.budget.has_excess for _, matcher, *_ in rows)
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
            forms.setdefault(id(row[1].lexers), []).append(row)
        num_used = 0
        for own in forms.values():
            lexers = own[0][1].lexers
            wanted = min(self._num_threads, -(-len(own) // ROWS_A_LEXER))
            if wanted > len(lexers.states):
                lexers.grow(wanted)
            num_used += _spread_form(own, min(wanted, len(lexers.states)))
        return num_used


def _lexer_of(filled: tuple[int, Matcher]) -> int:
    return filled[1].lexer_id


def _spread_form(rows: list[MaskRow], num_lexers: int) -> int:
    """Move samples of one form from crowded lexers to others; returns the lexers in use."""
    by_lexer: dict[int, list[MaskRow]] = {lexer: [] for lexer in range(num_lexers)}
    for row in rows:
        by_lexer.setdefault(row[1].lexer, []).append(row)
    most = -(-len(rows) // num_lexers)
    num_replayed = 0
    for own in by_lexer.values():
        for row in own[most:]:
            _, matcher, token_ids, start, _ = row
            num_tokens = matcher.num_tokens
            if num_replayed + num_tokens > MOVED_TOKENS:
                continue
            target = min(range(num_lexers), key=lambda lexer: len(by_lexer[lexer]))
            matcher.move(target, token_ids[start : start + num_tokens])
            own.remove(row)
            by_lexer[matcher.lexer].append(row)
            num_replayed += num_tokens
    return sum(1 for own in by_lexer.values() if own)


def _consume(rows: list[MaskRow]) -> tuple[list[MaskRow], list[tuple[int, Matcher]], dict[int, GrammarError]]:
    """Consume the newest token of each sample, unless that is done.

    Returns the rows that lack more tokens or time, (place, matcher) of rows with masks to fill, and errors.
    """
    left: list[MaskRow] = []
    filled: list[tuple[int, Matcher]] = []
    failed: dict[int, GrammarError] = {}
    for row in rows:
        place, matcher, token_ids, start, position = row
        num_missing = position - start - matcher.num_tokens
        if num_missing > 1 or matcher.lexers.budget.is_exceeded:
            left.append(row)
        elif num_missing < 1:
            filled.append((place, matcher))
        elif matcher.state.consume_token(token_ids[position - 1]):
            matcher.num_tokens += 1
            filled.append((place, matcher))
        else:
            try:
                matcher.check()
                failed[place] = GrammarError(f"{matcher.name}: token {token_ids[position - 1]} is not allowed")
            except GrammarError as error:
                failed[place] = error
    return left, filled, failed


class MaskCaller:
    """A thread that calls llguidance's threads and waits for them; three locks cost less than a pool's queue."""

    def __init__(self) -> None:
        self._asked, self._has_begun, self._is_done = allocate_lock(), allocate_lock(), allocate_lock()
        for lock in (self._asked, self._has_begun, self._is_done):
            lock.acquire()
        self._executor: Any = None
        self._arguments: tuple[Any, ...] = ()
        self._outcome: float | BaseException = 0.0
        self._num_begun = self._num_done = 0
        Thread(target=self._run, name="nanovllm-masks", daemon=True).start()

    def begin(self, executor: Any, *arguments: Any) -> Callable[[], float]:
        """Start to fill masks; returns a function to be called once, which waits and returns the seconds they took."""
        while self._num_done < self._num_begun:  # the wait for an earlier call was interrupted
            self._is_done.acquire(timeout=0.01)
        for lock in (self._is_done, self._has_begun):
            lock.acquire(blocking=False)
        self._executor = executor
        self._arguments = arguments
        self._num_begun += 1
        self._asked.release()
        self._has_begun.acquire()  # the thread now keeps Python's lock until its call releases that
        return self._wait

    def _wait(self) -> float:
        self._is_done.acquire()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def _run(self) -> None:
        while True:
            self._asked.acquire()
            self._has_begun.release()
            begin = perf_counter()
            try:
                self._executor.unsafe_compute_mask_ptr(*self._arguments)
                self._outcome = perf_counter() - begin
            except BaseException as error:  # a panic of llguidance too
                self._outcome = error
            self._executor = None
            self._arguments = ()
            self._num_done += 1
            if self._is_done.locked():
                self._is_done.release()
