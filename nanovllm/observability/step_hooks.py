"""Several listeners to an engine's steps, where the engine takes one."""

from __future__ import annotations

import logging

from nanovllm.observability.step_records import StepHook, StepRecord

logger = logging.getLogger("nanovllm")


class StepHooks(list[StepHook]):
    """An `on_step` that calls each hook that is appended to it, in the engine's thread.

    One that raises is logged and removed; the others go on.
    """

    def __call__(self, record: StepRecord) -> None:
        for hook in tuple(self):
            try:
                hook(record)
            except Exception:
                self.remove(hook)
                logger.exception("a step hook raised after step %d; it is not called again", record.step_id)
