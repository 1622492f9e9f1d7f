"""A step that is launched and not drawn yet, when the engine is interrupted, closed, or its model is changed."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from nanovllm import LLM
from nanovllm.engine import LaunchedStep
from nanovllm.fast.gpu.rank_runner import RankRunner
from nanovllm.features.logprobs.logprobs import StepLogprobs
from tests.support.llms import check_engine, generate, greedy
from tests.support.structured import EOS, form, open_llm
from tests.support.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("programs_are_forked")

PROMPT = [5, 9, 200, 31]
PARAMS = greedy(30, structured_output=form("json_schema"))


def begin(llm):
    """A stream, with a step in flight that is not drawn yet."""
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    assert llm._engine._in_flight[-1]._draw is not None
    return stream


def test_a_step_of_a_model_that_was_changed_is_dropped_and_not_drawn(monkeypatch):
    """A GPU's draw would read hidden states of graphs that the change has dropped."""
    with open_llm(overlap=True) as llm:
        expected = generate(llm, [PROMPT], PARAMS)[0].outputs[0].token_ids
        stream, is_changed = begin(llm), []
        forget, draw = llm._engine.model_runner.forget_model, llm._engine._in_flight[-1]._draw
        monkeypatch.setattr(llm._engine.model_runner, "forget_model", lambda: (is_changed.append(True), forget()))

        def late_draw():
            assert not is_changed
            return draw()

        llm._engine._in_flight[-1]._draw = late_draw
        llm.weights_changed()
        *_, last = stream
        assert last.outputs[0].token_ids == expected


def test_a_draw_follows_the_stream_of_its_forward_pass(monkeypatch):
    with open_llm() as llm:
        runner, calls = llm._engine.model_runner, []
        monkeypatch.setattr(runner, "device", SimpleNamespace(type="cuda"))
        monkeypatch.setattr(runner, "follow_last_stream", lambda: calls.append("follow"))
        runner._draw(lambda: (calls.append("draw"), torch.zeros(1, dtype=torch.int64))[1], StepLogprobs())
    assert calls == ["follow", "draw"]


def test_an_interrupt_of_a_draw_that_nobody_reads_is_raised_once_the_step_is_undone(monkeypatch):
    """Of several ranks, where the others wait for it."""
    with open_llm(overlap=True) as llm:
        expected = generate(llm, [PROMPT], PARAMS)[0].outputs[0].token_ids
        stream, engine, calls = begin(llm), llm._engine, []
        draw = LaunchedStep.draw

        def fail(self):
            calls.append("read")
            raise RuntimeError("a rank is gone")

        def interrupted(self):
            if calls == ["read"]:
                calls.append("interrupted")
                raise KeyboardInterrupt
            draw(self)

        monkeypatch.setattr(engine.model_runner, "draw_unread", partial(RankRunner.draw_unread, engine.model_runner))
        with monkeypatch.context() as patch:
            patch.setattr(LaunchedStep, "wait", fail)
            patch.setattr(LaunchedStep, "draw", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(stream)
        assert calls == ["read", "interrupted"]
        check_engine(llm)
        assert generate(llm, [PROMPT], PARAMS)[0].outputs[0].token_ids == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), eos_token_ids=[EOS])


@pytest.mark.full
def test_ranks_that_wait_for_a_draw_get_it_after_an_interrupt_and_at_the_end(folder, monkeypatch):
    options = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 65, "max_model_len": 512, "overlap": True}
    with LLM(folder, tensor_parallel_size=2, **options) as llm:
        expected = generate(llm, [PROMPT], PARAMS)[0].outputs[0].token_ids
        stream, engine = begin(llm), llm._engine
        engine.step()
        assert engine._in_flight[-1]._draw is not None

        def interrupted(self):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("nanovllm.engine.LaunchedStep.wait", interrupted)
            engine.step()  # a second Ctrl-C, which the read of a step lets through
        *_, last = stream
        assert last.outputs[0].token_ids == expected
        kept = begin(llm)
        start = time.monotonic()
    assert kept and time.monotonic() - start < 4.0, "a rank waited for the draw until it was killed"
