"""Entry point of the process for grammar trials: holds the vocabularies, and forks a child for each trial.

The kernel kills a child that exceeds the limits of time or memory; its connection then closes without an answer. It
kills a process when the other side closes its connection, too.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
from multiprocessing.connection import Connection
from typing import Any

CPU_SECONDS = 0.5  # limit of one trial
MEMORY_MB = 256  # limit of one trial, on top of the parent's memory
NICENESS = 10  # the engine's steps have priority


def main(descriptor: int) -> None:
    """Serve trials, one connection each, until the other end of this socket closes."""
    from nanovllm.features.grammar.compilation import load_library

    os.nice(NICENESS)
    load_library()  # here, so that no child loads it again
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    vocabularies: dict[int, Any] = {}
    with socket.socket(fileno=descriptor) as control:
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            with Connection(descriptors[0]) as connection:
                _serve(connection, vocabularies)


def _serve(connection: Connection[Any, Any], vocabularies: dict[int, Any]) -> None:
    try:
        kind, *arguments = connection.recv()
    except EOFError:  # the client has exited
        return
    if kind == "vocabulary":
        from nanovllm.features.grammar.vocabulary import open_vocabulary

        number, source = arguments
        vocabularies[number] = open_vocabulary(*source)
    elif kind == "forget":
        vocabularies.pop(arguments[0], None)
    elif os.fork() == 0:
        _try(connection, kind, arguments, vocabularies)


def _try(connection: Connection[Any, Any], kind: str, arguments: list[Any], vocabularies: dict[int, Any]) -> None:
    """Send (problem or None, bytes of memory taken), in a forked child that exits here."""
    try:
        _limit()
        _end_with(connection)
        before = resident_bytes()
        problem = _check(*arguments) if kind == "check" else _compile(vocabularies, *arguments)
        connection.send((problem, max(0, resident_bytes() - before)))
    finally:
        os._exit(0)


def _limit() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    if (pages := _pages()) is not None:
        limit = pages[0] * resource.getpagesize() + MEMORY_MB * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _end_with(connection: Connection[Any, Any]) -> None:
    """Let SIGIO end this process when the other end of its connection closes: nobody waits for the trial."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    descriptor = connection.fileno()
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    if connection.poll():  # it closed before
        os._exit(0)


def _check(grammar: str) -> str | None:
    from nanovllm.features.grammar.compilation import grammar_problem

    return grammar_problem(grammar)


def _compile(vocabularies: dict[int, Any], number: int, form: dict[str, Any], is_forced: bool) -> str | None:
    from nanovllm.features.grammar.compilation import compile_form
    from nanovllm.features.structured_output import StructuredOutput

    try:
        compile_form(StructuredOutput(**form), vocabularies[number], is_forced)
    except ValueError as error:
        return str(error)
    return None


def resident_bytes() -> int:
    """Anonymous resident memory of this process; its peak memory where the system does not report that."""
    if (pages := _pages()) is not None:
        return (pages[1] - pages[2]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _pages() -> list[int] | None:
    """Pages of this process: total, resident, resident and file-backed; None where the system does not report them."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return [int(number) for number in file.read().split()]
    except OSError:
        return None
