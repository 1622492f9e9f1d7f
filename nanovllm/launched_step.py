"""A step from its launch to its tokens: where some row's draw needs the tokens of the step before, it comes later.

::

    host     launch 2 (forward)   read 1   update 1   draw 2   schedule 3   launch 3 (forward)   read 2 ...
    device   [ forward 2 .............................][draw 2][ forward 3 ..............
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nanovllm.core.batch import ScheduledBatch
from nanovllm.execution.pending_tokens import PendingTokens
from nanovllm.model_runner import ModelRunner
from nanovllm.observability.step_records import StepTimes
from nanovllm.sampling.logprobs import StepLogprobs


@dataclass(slots=True)
class LaunchedStep:
    """A step that runs on the device, and the seconds that the host has spent on it."""

    batch: ScheduledBatch
    times: StepTimes
    clock: Callable[[], float]
    _pending: PendingTokens | None = None  # until it is drawn
    _draw: Callable[[], PendingTokens] | None = None
    report: StepLogprobs | None = None  # what was asked for besides tokens, once these are there

    @classmethod
    def launch(
        cls, model_runner: ModelRunner, batch: ScheduledBatch, start: float, clock: Callable[[], float], *, draws: bool
    ) -> LaunchedStep:
        """Launch a batch; its scheduling began at time `start`. Without `draws` the caller calls `draw` later."""
        scheduled = clock()
        step = cls(batch, StepTimes(start, scheduled - start), clock)
        if draws:
            step._pending = model_runner.execute(batch)
        else:
            step._draw = model_runner.launch(batch)
        step.times.launch_time = clock() - scheduled
        for entry in batch.prefills:
            if entry.sequence.scheduled_time is None:
                entry.sequence.scheduled_time = start
        return step

    def draw(self) -> None:
        """Draw its tokens, unless that is done: before any other step is launched."""
        if self._draw is not None:
            begin, draw = self.clock(), self._draw
            self._draw = None  # also of a draw that fails
            self._pending = draw()
            self.times.launch_time += self.clock() - begin

    def wait(self) -> list[int]:
        """Its tokens in the order of `batch.sampling`, and its report."""
        assert self._pending is not None
        begin = self.clock()
        token_ids, self.report = self._pending.result(), self._pending.report
        self.times.read_time = self.clock()
        self.times.wait_time = self.times.read_time - begin
        return token_ids
