"""Draws that wait for threads on the host: launched once, before the next step or when they are read."""

import functools
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.errors import StepError
from nanovllm.fast.gpu.late_draw import LateDraw
from nanovllm.fast.gpu.mask_buffer import MaskBuffer
from nanovllm.features.grammar.compiler import GrammarCompiler
from nanovllm.features.grammar.mask_threads import MaskThreads
from nanovllm.features.groups.block_checks import check_scheduler
from nanovllm.features.logprobs.logprobs import StepLogprobs
from nanovllm.features.token_masks import begin_masks, num_mask_words, token_masks
from nanovllm.model_runner import PendingTokens
from tests.support.llms import OVERLAP
from tests.support.structured import EOS, FORMS, form, open_llm
from tests.support.tiny_models import VOCAB_SIZE, random_prompts, tiny_tokenizer


def counted(calls, name="draw"):
    calls.append(name)
    return torch.tensor([len(calls), 7])


def test_a_draw_is_launched_once_whoever_asks_first():
    for asks in (["launch", "launch", "result"], ["result", "launch", "result"]):
        calls = []
        drawn = LateDraw(lambda calls=calls: counted(calls))
        found = [getattr(drawn, name)() for name in asks]
        assert calls == ["draw"] and found[-1] == [1, 7]


def test_the_handle_of_a_step_is_the_late_draw_itself():
    report = StepLogprobs()
    drawn = LateDraw(lambda: torch.tensor([3]), report)
    assert PendingTokens.send(drawn, report) is drawn
    assert drawn.report is report and drawn.result() == [3] and drawn.report is report


def test_nothing_to_draw_launches_nothing():
    LateDraw().launch()


def test_a_draw_that_fails_raises_its_error_again_and_is_not_tried_again():
    calls = []

    def fail():
        calls.append("draw")
        raise ValueError("no draw")

    drawn = LateDraw(fail)
    for ask in (drawn.launch, drawn.launch, drawn.result):
        with pytest.raises(ValueError, match="no draw"):
            ask()
    assert calls == ["draw"]


def test_a_draw_that_is_dropped_before_its_launch_says_so():
    dropped = []
    for number in range(2):
        drawn = LateDraw(lambda: torch.tensor([3]), on_drop=functools.partial(dropped.append, number))
        if number:
            drawn.launch()
        del drawn
    assert dropped == [0]


# ------------------------------------------------------------------------------------------------ within the engine

PROMPTS = random_prompts(8, low=20, high=90, seed=8)
CROWDED = {"num_kv_blocks": 21, "max_model_len": 160, "max_num_batched_tokens": 80}


class LateExecutor:
    """A CPU's executor whose draws with masks are late, while threads move the matchers, as a GPU's are."""

    def __init__(self, llm):
        self._runner = llm._engine.model_runner
        self._launch = self._runner.launch_step
        self._threads = MaskThreads(2)
        self.late_draw = LateDraw()
        self.num_late = self.num_failures = 0
        self._runner.launch_step = self.launch

    def launch(self, batch, layout, plan, report):
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("this step was to fail")
        self.late_draw.launch()
        draw = self._launch(batch, layout, plan, report)
        positions = layout.sampled_positions.tolist()
        rows = [row for row, sequence in enumerate(batch.sampling) if sequence.matcher is not None]

        def begin_draw():
            if not rows:
                return draw()
            own = [batch.sampling[row] for row in rows]
            masks = np.zeros((len(rows), num_mask_words(own)), np.int32)
            begun = begin_masks(own, [positions[row] for row in rows], masks, self._threads)
            if begun.wait is None:
                return draw()
            self.num_late += 1
            self.late_draw = LateDraw(lambda: (begun.finish({}), draw())[1], report)
            return self.late_draw

        return begin_draw


def params_of(number):
    own = form(list(FORMS)[number % 4])
    return SamplingParams(temperature=0.9, seed=number, max_tokens=40, structured_output=own, n=1 + number % 2)


def answers(llm, *, fails_after=None, late=None):
    """Completions of all requests; those of an engine whose step after so many late draws fails once."""
    engine, found, failures = llm._engine, {}, 0
    params = [params_of(number) for number in range(len(PROMPTS))]
    engine.add(*engine.input_processor.process(PROMPTS, params, request_ids=map(str, range(len(PROMPTS)))))
    while engine.has_unfinished:
        if late is not None and late.num_late == fails_after and not failures:
            late.num_failures = 1
        try:
            engine.step()
        except StepError:
            failures += 1
        found |= {int(output.request_id): output for output in engine.outputs if output.finished}
        engine.outputs.clear()
    check_scheduler(engine.scheduler)
    assert failures == (fails_after is not None)
    each = [found[number].outputs for number in range(len(PROMPTS))]
    return [[(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in outputs] for outputs in each]


@functools.cache
def expected():
    with open_llm(overlap=False) as llm:
        return answers(llm)


@pytest.fixture(autouse=True)
def threads_take_all(monkeypatch):
    """From two samples on, and however long a mask takes on a machine with other work."""
    monkeypatch.setattr("nanovllm.features.grammar.mask_threads.perf_counter", lambda: 0.0)
    monkeypatch.setattr("nanovllm.features.grammar.mask_threads.ROWS_A_LEXER", 1)


@pytest.mark.costly
@OVERLAP
@pytest.mark.parametrize("options", [{}, CROWDED], ids=["roomy", "crowded"])
def test_late_draws_change_no_token(overlap, options):
    with open_llm(overlap=overlap, **options) as llm:
        late = LateExecutor(llm)
        assert answers(llm) == expected()
        assert late.num_late > 10 and bool(options) == (llm.stats().num_preemptions > 0)


@pytest.mark.costly
@pytest.mark.parametrize("fails_after", [1, 4, 9])
def test_a_failed_step_with_a_late_draw_in_flight_changes_no_token(fails_after):
    with open_llm(overlap=True) as llm:
        late = LateExecutor(llm)
        assert answers(llm, fails_after=fails_after, late=late) == expected()
        assert answers(llm) == expected(), "once more, with the same lexers"


def test_an_abort_with_a_late_draw_in_flight_leaves_the_others_as_they_are():
    with open_llm(overlap=True) as llm:
        LateExecutor(llm)
        doomed = llm.stream(PROMPTS[3], params_of(0))
        next(doomed)
        doomed.close()
        assert answers(llm) == expected()


# ---------------------------------------------------------------------------------------------------- the GPU's buffer


class NoEvent:
    def record(self, stream): ...

    def synchronize(self): ...


def test_masks_of_each_step_are_sent_whole_with_the_rows_that_have_none(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    buffer = MaskBuffer(8, torch.device("cpu"), lambda rows, words: (rows, words))
    grammars = GrammarCompiler(tiny_tokenizer(), VOCAB_SIZE, (EOS,))
    compiled = grammars.matcher(form("regex"))
    requests = [SimpleNamespace(matcher=None), *(sample(compiled) for _ in range(3)), SimpleNamespace(matcher=None)]
    beside = [sample(compiled) for _ in range(3)]
    chance = np.random.default_rng(0)
    for step in range(6):
        positions = [len(getattr(request, "token_ids", ())) for request in requests]
        if step % 3 != 1:  # a step of a captured head; others begin when they send
            assert buffer.begin(requests, positions)
        errors = {}
        buffer.upload(requests, positions, errors)
        rows, words = buffer.views(5)
        assert not errors and rows.tolist() == [-1, 0, 1, 2, -1]
        right = token_masks(beside, positions[1:4], {})
        assert (words[:3].numpy() == right).all()
        for own, other, mask in zip(requests[1:4], beside, right, strict=True):
            tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token_id = int(chance.choice(tokens[tokens != EOS])) if len(tokens) > 1 else int(tokens[0])
            own.token_ids.append(token_id)
            other.token_ids.append(token_id)
    assert buffer.begin(requests, positions)
    buffer.wait()  # of a step that was undone


def sample(compiled):
    return SimpleNamespace(
        draft=(), matcher=compiled.copy(), token_ids=[5, 6], num_prompt_tokens=2, is_finished=False, request_id="r"
    )
