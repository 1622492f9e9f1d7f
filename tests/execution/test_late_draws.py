"""Draws that wait for threads on the host: launched once, before the next step or when they are read."""

from __future__ import annotations

import pytest
import torch

from nanovllm.execution.late_draw import LateDraw
from nanovllm.execution.pending_tokens import PendingTokens
from nanovllm.sampling.logprobs import StepLogprobs


def counted(calls: list[str], name: str = "draw") -> torch.Tensor:
    calls.append(name)
    return torch.tensor([len(calls), 7])


def test_a_draw_is_launched_once_whoever_asks_first():
    for asks in (["launch", "launch", "result"], ["result", "launch", "result"]):
        calls: list[str] = []
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


def test_a_draw_that_fails_raises_where_it_is_launched_and_is_not_tried_again():
    calls: list[str] = []

    def fails() -> torch.Tensor:
        counted(calls)
        raise RuntimeError("out of memory")

    drawn = LateDraw(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        drawn.launch()
    drawn.launch()
    assert calls == ["draw"]
