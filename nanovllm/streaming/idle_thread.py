"""Takes a CPU's KV memory in a thread of its own, for an engine that its callers' threads step."""

from __future__ import annotations

import atexit
import threading
import weakref

from nanovllm.streaming.engines import AnyEngine

# Seconds without a request before it goes on.
IDLE_SECONDS = 0.5

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_ends = threading.Event()


@atexit.register
def _end_all() -> None:
    """An engine that a daemon thread lets go of while the interpreter ends would abort the process."""
    _ends.set()
    for thread in list(_threads):
        thread.join()


def take_memory_when_idle(engine: AnyEngine) -> threading.Thread | None:
    """Start the thread, which ends when all memory is taken or the engine is closed; None if there is none to take.

    It takes memory from the start on, and while no request runs. It needs no lock: what it does changes no content. A
    forked child has no such thread.
    """
    if engine.wake is not None or not engine.use_idle_time(captures=False):  # replicas have their own
        return None
    thread = threading.Thread(target=_run, args=(weakref.ref(engine),), name="nanovllm-idle", daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


def _run(reference: weakref.ref[AnyEngine]) -> None:
    num_tokens = 0
    while (
        not _ends.is_set() and (engine := reference()) is not None
    ):  # not held while asleep, nor longer than its owner holds it
        has_worked, num_tokens = engine.num_output_tokens() > num_tokens, engine.num_output_tokens()
        if not (has_worked or engine.has_unfinished):
            if not engine.use_idle_time(captures=False):
                return
            del engine
        else:
            del engine
            _ends.wait(IDLE_SECONDS)
