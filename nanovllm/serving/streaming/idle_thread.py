"""Idle thread: touches a CPU's KV memory for an engine that its callers' threads step."""

from __future__ import annotations

import atexit
import threading
import weakref

from nanovllm.serving.streaming.engines import EngineInterface

# Seconds without a request before the thread continues.
IDLE_SECONDS = 0.5

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_ends = threading.Event()


@atexit.register
def _end_all() -> None:
    """Join all threads: a daemon thread that frees an engine during interpreter shutdown would abort the process."""
    _ends.set()
    for thread in list(_threads):
        thread.join()


def take_memory_when_idle(engine: EngineInterface) -> threading.Thread | None:
    """Start the thread, which ends when all memory is touched or the engine is closed; None if it has nothing to do.

    It works from the start on, while no request runs. It needs no lock: touching memory changes no content. A forked
    child has no such thread.
    """
    if engine.wake is not None or not engine.use_idle_time(captures=False):  # each replica has such a thread
        return None
    thread = threading.Thread(target=_run, args=(weakref.ref(engine),), name="nanovllm-idle", daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


def _run(reference: weakref.ref[EngineInterface]) -> None:
    num_tokens = 0
    while (
        not _ends.is_set() and (engine := reference()) is not None
    ):  # a weak reference: the engine is freed with its owner
        has_worked = engine.num_output_tokens() > num_tokens
        num_tokens = engine.num_output_tokens()
        if not (has_worked or engine.has_unfinished):
            if not engine.use_idle_time(captures=False):
                return
            del engine
        else:
            del engine
            _ends.wait(IDLE_SECONDS)
