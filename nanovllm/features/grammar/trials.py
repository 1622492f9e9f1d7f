"""Trial compilation of grammars in a separate process, with limits; see docs/decisions/grammars_are_tried.md."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from nanovllm.features.grammar.trial_process import CPU_SECONDS, MEMORY_MB
from nanovllm.features.intake.intake import FORM_PLACES, Task, form_turn
from nanovllm.features.structured_output import StructuredOutput

MAX_TRIALS = FORM_PLACES  # concurrent
LIMITS_TEXT = f"takes more than {CPU_SECONDS} s of a processor or {MEMORY_MB} MB of memory to compile"
REMEDY = "Simplify it: intersections (allOf, &), large multipleOf and long counted repetitions cost most"


class TrialVocabulary:
    """A vocabulary for trials.

    Args:
        source: arguments of `open_vocabulary`.
    """

    def __init__(self, source: tuple[Any, ...]) -> None:
        self.source = source


class Trials:
    """Client of the process for trials, which starts with the first one; thread-safe."""

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(MAX_TRIALS)
        self._lock = threading.RLock()  # guards the fields below, and the order of messages
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._owner = 0  # pid of the process that started it: a forked child starts another
        self._sent: weakref.WeakKeyDictionary[TrialVocabulary, int] = weakref.WeakKeyDictionary()
        self._num_sent = 0
        self._forgotten: deque[int] = deque()  # numbers of collected vocabularies

    def start(self, vocabulary: TrialVocabulary) -> None:
        """Let the process read a vocabulary ahead of the first trial."""
        with self._slots:
            self._number_of(vocabulary)

    def check(self, name: str, grammar: str) -> str | None:
        """llguidance's error for a grammar, or None; raises ValueError if the check exceeds the limits."""
        problem: str | None = self._answer(name, lambda: ("check", grammar))[0]
        return problem

    def compile(self, vocabulary: TrialVocabulary, form: StructuredOutput, *, is_forced: bool) -> int:
        """Bytes of a compiled form; raises ValueError if it cannot be compiled or exceeds the limits."""
        problem, num_bytes = self._answer(
            f"structured_output.{form.kind}",
            lambda: ("compile", self._number_of(vocabulary), form.to_dict(), is_forced),
        )
        if problem is not None:
            raise ValueError(problem)
        return int(num_bytes)

    def close(self) -> None:
        """End the process; the next trial starts another."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                self._process.kill()
                self._process.wait()
            if self._control is not None:
                self._control.close()
            self._process = self._control = None
            self._sent.clear()

    def _answer(self, name: str, message: Any) -> tuple[str | None, int]:
        """The answer to a trial, which is tried again if it had to make way for another client's."""
        with form_turn() as task:
            while True:
                with self._slots:
                    answer = self._try(name, message, task)
                if answer is not None:
                    return answer
                if task is not None:
                    task.requeue()

    def _try(self, name: str, message: Any, task: Task[Any] | None) -> tuple[str | None, int] | None:
        """The answer to a trial; None if it was stopped."""
        for _ in range(2):  # a second time if the process itself was killed
            try:
                with self._send(message()) as connection:
                    stoppable = nullcontext() if task is None else task.stopped_by(partial(_hang_up, connection))
                    with stoppable:
                        answer: tuple[str | None, int] = connection.recv()
                        return answer
            except EOFError:
                if task is not None and (task.is_stopped or task.is_dropped):
                    return None
                if self._is_running():
                    raise ValueError(f"{name} {LIMITS_TEXT}. {REMEDY}.") from None
            except OSError:
                pass
            self.close()
        raise RuntimeError("the process that tries structured outputs ended twice; the machine may lack memory.")

    def _is_running(self) -> bool:
        with self._lock:
            return self._owner == os.getpid() and self._process is not None and self._process.poll() is None

    def _number_of(self, vocabulary: TrialVocabulary) -> int:
        """The number of a vocabulary in the process; sends the vocabulary the first time."""
        with self._lock:  # later trials refer to the vocabulary, so it is sent first
            self._start()
            number = self._sent.get(vocabulary)
            if number is None:
                number = self._num_sent = self._num_sent + 1
                self._send(("vocabulary", number, vocabulary.source)).close()
                self._sent[vocabulary] = number
                # Garbage collection may run while the lock is held, so numbers are sent with the next vocabulary.
                weakref.finalize(vocabulary, self._forgotten.append, number).atexit = False
                while self._forgotten:
                    self._send(("forget", self._forgotten.popleft())).close()
        return number

    def _send(self, message: Any) -> Connection[Any, Any]:
        own, other = socket.socketpair()
        with own, other:
            with self._lock:
                self._start()
                assert self._control is not None
                socket.send_fds(self._control, [b"\0"], [other.fileno()])
            connection: Connection[Any, Any] = Connection(own.detach())
        connection.send(message)
        return connection

    def _start(self) -> None:
        if self._owner == os.getpid() and self._process is not None:
            return
        self._sent.clear()
        self._control, other = socket.socketpair()
        paths = [path for path in sys.path if isinstance(path, str)]
        program = (
            f"import sys; sys.path[:] = {paths}\n"
            f"from nanovllm.features.grammar.trial_process import main\nmain({other.fileno()})"
        )
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # llguidance reports exhausted memory there
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # the process forks
                pass_fds=(other.fileno(),),
                # A process group shields it from Ctrl-C. A new session would get an equal share of the processors on
                # Linux (sched_autogroup), whatever its niceness.
                process_group=0,
            )
        self._owner = os.getpid()


def _hang_up(connection: Connection[Any, Any]) -> None:
    """End a trial: its process is sent SIGIO, and a reader here gets EOFError."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end, suppress(OSError):  # it has ended already
        end.shutdown(socket.SHUT_RDWR)


TRIALS = Trials()
atexit.register(TRIALS.close)
