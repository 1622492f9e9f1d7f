"""Masks filled in several threads are those filled one by one, whichever lexer a sample has."""

import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from nanovllm import StructuredOutput
from nanovllm.features.grammar import mask_threads
from nanovllm.features.grammar.compiler import GrammarCompiler
from nanovllm.features.grammar.mask_threads import MEASURED_STEPS, MOVED_TOKENS, ROWS_A_LEXER, MaskCaller, MaskThreads
from nanovllm.features.grammar.matcher import RESERVE_SECONDS
from nanovllm.features.token_masks import begin_masks
from tests.support.structured import EOS, FORMS, allowed, form, grammars
from tests.support.tiny_models import VOCAB_SIZE, tiny_tokenizer

ENDLESS = [StructuredOutput(regex=r"([a-z]{1,3},)*"), StructuredOutput(regex=r"(?s:.)*"), form("json_object")]


def samples(forms, count, *, compiler=None):
    """Sequences, as far as masks read them."""
    compiler = compiler or grammars()
    return [
        Drawn(
            draft=(),
            matcher=compiler.matcher(forms[row % len(forms)]).copy(), token_ids=[5, 6, 7 + row], num_prompt_tokens=3,
            is_finished=False, request_id=str(row),
        )
        for row in range(count)
    ]  # fmt: skip


def masks_of(sequences, threads, errors=None):
    masks = np.full((len(sequences), -(-VOCAB_SIZE // 32)), 77, np.int32)
    found = {} if errors is None else errors
    begin_masks(sequences, [len(sequence.token_ids) for sequence in sequences], masks, threads).finish(found)
    assert errors is not None or not found
    return masks


class Drawn(SimpleNamespace):
    """A sequence, as far as masks read it; errors are kept by it."""

    __hash__ = object.__hash__


def draw(sequences, masks, chance):
    for sequence, mask in zip(sequences, masks, strict=True):
        tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        tokens = tokens[tokens != EOS] if len(tokens) > 1 else tokens
        if not sequence.is_finished:
            sequence.token_ids.append(int(chance.choice(tokens)))
            sequence.is_finished = sequence.token_ids[-1] == EOS


def wait_for_threads():
    for thread in threading.enumerate():
        if thread.name == "nanovllm-lexers":
            thread.join(30.0)


def wait_for_lexers(matcher, count):
    matcher.lexers.grow(count)
    wait_for_threads()
    assert len(matcher.lexers.states) >= count


def with_lexers(form, count=2, **options):
    """Samples of one form, as many as so many threads share, once the form has a lexer for each of these."""
    sequences = samples([form], count * ROWS_A_LEXER, **options)
    wait_for_lexers(sequences[0].matcher, count)
    return sequences, MaskThreads(count)


@pytest.mark.parametrize("forms", [ENDLESS[:1], ENDLESS, [form(kind) for kind in FORMS]], ids=["one", "three", "ends"])
def test_masks_in_threads_are_those_filled_one_by_one(forms):
    ours, theirs = samples(forms, 48), samples(forms, 48)
    threads, chances = MaskThreads(4), [np.random.default_rng(1), np.random.default_rng(1)]
    for step in range(40):
        if step == 3:
            for sequence in ours[: len(forms)]:
                wait_for_lexers(sequence.matcher, 4 // len(forms))
        own, right = masks_of(ours, threads), masks_of(theirs, None)
        assert (own == right).all()
        for sequences, masks, chance in zip((ours, theirs), (own, right), chances, strict=True):
            draw(sequences, masks, chance)
    assert [s.matcher.num_tokens for s in ours] == [s.matcher.num_tokens for s in theirs]


def test_samples_of_one_form_are_spread_over_its_lexers():
    sequences, threads = with_lexers(ENDLESS[0], 4)
    masks_of(sequences, threads)
    assert np.bincount([sequence.matcher.lexer for sequence in sequences]).tolist() == [ROWS_A_LEXER] * 4


def test_long_outputs_keep_their_lexer():
    sequences, threads = with_lexers(ENDLESS[1])
    for sequence in sequences:
        sequence.token_ids += [20] * (MOVED_TOKENS + 1)
    masks_of(sequences, None)
    for sequence in sequences:
        sequence.token_ids.append(21)
    masks_of(sequences, threads)
    assert {sequence.matcher.lexer for sequence in sequences} == {0}


def test_a_forbidden_token_fails_its_request_alone():
    sequences, threads = with_lexers(ENDLESS[0])
    draw(sequences, masks_of(sequences, threads), np.random.default_rng(0))
    expected = [sequence.matcher.copy() for sequence in sequences]
    wrong = next(token for token in range(VOCAB_SIZE) if token not in allowed(expected[3]))
    sequences[3].token_ids[-1] = wrong
    errors = {}
    masks = masks_of(sequences, threads, errors)
    assert [*errors] == [sequences[3]] and "request '3': structured_output.regex" in next(iter(errors.values()))
    assert not masks[3].any() and all(mask.any() for row, mask in enumerate(masks) if row != 3)


def test_a_sample_with_several_rows_is_filled_in_their_order():
    ours, theirs = samples(ENDLESS, 2 * ROWS_A_LEXER), samples(ENDLESS, 2 * ROWS_A_LEXER)
    first = allowed(ours[0].matcher.copy())[0]
    rows = []
    for sequences in (ours, theirs):
        sequences[0].token_ids.append(first)
        keyed = [sequences[0], *sequences]
        masks = np.zeros((len(keyed), -(-VOCAB_SIZE // 32)), np.int32)
        threads = MaskThreads(4) if sequences is ours else None
        begin_masks(keyed, [3, 4, *[3] * (len(keyed) - 2)], masks, threads).finish({})
        rows.append(masks)
    assert (rows[0] == rows[1]).all() and (rows[0][0] != rows[0][1]).any()


def test_resumed_samples_consume_all_their_tokens():
    ours, threads = with_lexers(ENDLESS[1])
    theirs = samples(ENDLESS[1:2], len(ours))
    for sequences in (ours, theirs):
        for row, sequence in enumerate(sequences):
            sequence.token_ids += [20, 21, 22][: row % 4]
    assert (masks_of(ours, threads) == masks_of(theirs, None)).all()
    assert [sequence.matcher.num_tokens for sequence in ours] == [row % 4 for row in range(len(ours))]


def test_behind_a_slow_step_masks_are_filled_one_by_one_and_their_time_ends_the_form(monkeypatch):
    sequences, threads = with_lexers(ENDLESS[0], compiler=GrammarCompiler(tiny_tokenizer(), VOCAB_SIZE, (EOS,)))
    budget, now = sequences[0].matcher.lexers.budget, [0.0]

    def slow_clock():
        now[0] += budget.allowed + RESERVE_SECONDS / 12
        return now[0]

    monkeypatch.setattr(mask_threads, "perf_counter", slow_clock)
    monkeypatch.setattr("nanovllm.features.grammar.matcher.thread_time", slow_clock)
    masks_of(sequences, threads)
    assert not budget.has_excess  # nobody knows which form it was
    errors = {}
    masks_of(sequences, threads, errors)
    assert budget.is_exceeded and "takes too long for its masks" in next(iter(errors.values()))


def test_steps_are_filled_in_threads_again_when_no_form_is_slow(monkeypatch):
    sequences, threads = with_lexers(ENDLESS[0])
    now = [0.0]

    def slow_clock():
        now[0] += 1.0
        return now[0]

    consume, steps = mask_threads._consume, []

    def noted(*arguments):
        steps[-1] = True
        return consume(*arguments)

    monkeypatch.setattr(mask_threads, "_consume", noted)
    monkeypatch.setattr(mask_threads, "perf_counter", slow_clock)
    for _ in range(MEASURED_STEPS + 3):
        steps.append(False)
        masks_of(sequences, threads)
    assert np.flatnonzero(steps).tolist() == [0, MEASURED_STEPS + 1]


def test_a_form_without_room_for_another_lexer_goes_on_with_those_it_has():
    compiler = GrammarCompiler(tiny_tokenizer(), VOCAB_SIZE, (EOS,))
    sequences, threads = samples(ENDLESS[:1], 4 * ROWS_A_LEXER, compiler=compiler), MaskThreads(4)
    lexers = sequences[0].matcher.lexers

    lexers.compile_state = Mock(side_effect=ValueError("structured_output.regex cannot be compiled"))
    for _ in range(3):
        assert masks_of(sequences, threads).any()
    wait_for_threads()
    assert len(lexers.states) == 1 and lexers.compile_state is None


class _SlowExecutor:
    """llguidance's threads, which take a while, and sometimes panic."""

    def __init__(self):
        self.num_filled = 0

    def unsafe_compute_mask_ptr(self, number, seconds):
        time.sleep(seconds)
        if number < 0:
            raise RuntimeError("a panic")
        self.num_filled += 1


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_a_call_that_nobody_waited_for_is_over_before_the_next_begins(pause):
    """As after an interrupt of the wait."""
    caller, executor = MaskCaller(), _SlowExecutor()
    caller.begin(executor, 0, 0.05)  # lost
    time.sleep(pause)
    for number in range(1, 4):
        wait = caller.begin(executor, number, 0.02)
        assert executor.num_filled == number  # the earlier ones
        assert wait() >= 0.02
        assert executor.num_filled == number + 1


def test_a_panic_reaches_who_waits_and_the_next_call_works():
    caller, executor = MaskCaller(), _SlowExecutor()
    with pytest.raises(RuntimeError, match="a panic"):
        caller.begin(executor, -1, 0.0)()
    assert caller.begin(executor, 0, 0.0)() >= 0.0
