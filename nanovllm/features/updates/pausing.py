"""Pauses of an engine: requests keep their KV and wait, and no step is scheduled until it goes on."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from nanovllm.engine import Engine

MAX_REST_SECONDS = 1.0  # longest sleep of a paused engine: watchdogs take a longer silence for a step that hangs


class Pause:
    """A `Proposer` in front of another: the scheduler waits for steps in flight, and then still waits."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def waits(self, *_: object) -> bool:
        return True


def pause(engine: Any) -> None:
    """Schedule nothing from now on; steps in flight are read. A paused engine stays paused."""
    if not isinstance(engine, Engine):
        engine.change("pause_generation")
    elif not is_paused(engine):
        engine.scheduler.proposer = Pause(engine.scheduler.proposer)


def resume(engine: Any) -> None:
    """Schedule again; an engine that is not paused goes on."""
    if not isinstance(engine, Engine):
        engine.change("resume_generation")
    elif isinstance(proposer := engine.scheduler.proposer, Pause):
        engine.scheduler.proposer = proposer.inner


def is_paused(engine: Any) -> bool:
    if not isinstance(engine, Engine):
        return bool(engine.updates.is_paused)
    return isinstance(engine.scheduler.proposer, Pause)


def rest_seconds(engine: Any) -> float:
    """Time for which steps of a paused engine would do nothing: until the next deadline, at most MAX_REST_SECONDS."""
    if not isinstance(engine, Engine) or not is_paused(engine) or engine._in_flight:  # steps of a pool wait themselves
        return 0.0
    deadline: float = engine._deadlines[0][0] if engine._deadlines else math.inf
    return min(max(deadline - engine.clock(), 0.0), MAX_REST_SECONDS)


def _refuse_step(*_: object) -> NoReturn:
    raise RuntimeError("this LLM is paused, and its calls would wait for ever. Call resume_generation() first.")


def choose_step(llm: Any, engine: Any) -> None:
    """Let the calls of an `LLM` step by the state of its engine: asleep, paused or neither."""
    vars(llm).pop("_step", None)
    if getattr(engine, "asleep", None) is not None:
        llm._step = llm._step_or_wait
    elif is_paused(engine):
        llm._step = _refuse_step


class Pausing:
    """Mixin of `LLM`."""

    def pause_generation(self: Any) -> None:
        """Let calls raise RuntimeError instead of computing, until `resume_generation`; their requests end."""
        with self._interrupts(), self._turn() as engine:
            pause(engine)
            choose_step(self, engine)

    def resume_generation(self: Any) -> None:
        """Compute again after `pause_generation`."""
        with self._interrupts(), self._turn() as engine:
            resume(engine)
            choose_step(self, engine)

    @property
    def is_paused(self: Any) -> bool:
        return is_paused(self._open_engine())


class AsyncPausing:
    """Mixin of `AsyncLLM`."""

    async def pause_generation(self: Any) -> None:
        """Start and continue no request until `resume_generation`; tokens of steps in flight still come.

        Running requests keep their KV. Requests may be added and aborted, and end at their deadlines.
        """
        await self._run(pause)

    async def resume_generation(self: Any) -> None:
        """Go on after `pause_generation`."""
        await self._run(resume)

    async def is_paused(self: Any) -> bool:
        paused: bool = await self._run(is_paused)
        return paused
