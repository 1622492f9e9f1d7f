"""A process that has imported the engine and forks for each Python program that this process starts: no imports there.

test ── subprocess.Popen ── program, folder, environment, files ──▶ this process ── fork, fork ──▶ the program

The middle fork ends at once, and the system gives its child to the nearest ancestor that asked for orphans: the test's
process, which so waits for it, signals it and gets its exit status as of a child that it has started itself.

python -m tests.support.forked_processes FILE_DESCRIPTOR
"""

import ctypes
import fcntl
import functools
import gc
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from types import ModuleType

import pytest

PR_SET_CHILD_SUBREAPER = 36
# Variables that a fork heeds too. With another difference a program starts by itself: libraries read them at import.
HEEDED = """
    PYTHONPATH PYTHONSAFEPATH PYTEST_CURRENT_TEST TQDM_DISABLE OMP_NUM_THREADS CUDA_VISIBLE_DEVICES PIP_ HF_HUB_CACHE
    HF_HUB_OFFLINE NANOVLLM_
"""
OF_TORCH = "TORCHINDUCTOR_ _TORCHINDUCTOR_ CUBLAS_ TRITON_"  # which it sets itself when it compiles
EXECUTE = inspect.signature(subprocess.Popen._execute_child)


@contextmanager
def programs_are_forked():
    """Fork the Python programs that are started in this block by `subprocess`; elsewhere than on Linux, start them."""
    if sys.platform != "linux":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", _forking())
        yield


@functools.cache
def _forking():
    """`Popen` that forks, for as long as this process lives."""
    own, theirs = socket.socketpair()
    python, environment, lock = sys.executable, dict(os.environ), threading.Lock()
    command = [python, "-m", "tests.support.forked_processes", str(theirs.fileno())]
    # It ends with this process, whose end of the socket is then closed.
    server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0)
    theirs.close()

    class Popen(subprocess.Popen):
        def _execute_child(self, *arguments):
            given = EXECUTE.bind(self, *arguments).arguments
            if not _can_fork(given, python, environment):
                return super()._execute_child(*arguments)
            pipes = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            files = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
            numbers = [0, 1, 2, *given["pass_fds"]]
            group = os.getpgrp() if given["process_group"] == -1 else given["process_group"]
            program = {
                "arguments": given["args"][1:], "folder": os.fspath(given["cwd"] or os.getcwd()), "numbers": numbers,
                "environment": dict(given["env"] or os.environ), "group": None if given["start_new_session"] else group,
            }  # fmt: skip
            with lock, _orphans_are_mine():
                self.pid = _ask(own, program, [*files, *given["pass_fds"]])
            self._child_created = True
            self._close_pipe_fds(*(given[n] for n in EXECUTE.parameters if n in given and n[-4:] in ("read", "rite")))

    Popen.server = server
    return Popen


def _can_fork(given, python, environment):
    command, env = given["args"], given["env"] or os.environ
    changed = {name for name, _ in dict(env).items() ^ environment.items()}
    prefixes = tuple((HEEDED + OF_TORCH).split())
    return (
        isinstance(command, list)
        and command[:1] == [python]
        and command[1:2] in (["-c"], ["-m"])
        and not given["shell"]
        and all(name.startswith(prefixes) for name in changed)
    )


def _ask(server, program, files):
    """The process in which the program runs."""
    data = json.dumps(program).encode()
    socket.send_fds(server, [len(data).to_bytes(8, "big")], files)
    server.sendall(data)
    return int(server.recv(16))


@contextmanager
def _orphans_are_mine():
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# ------------------------------------------------------------------------------------------- the process that forks


def serve(server):
    """Fork for each program that is asked for; returns its arguments, in the process that is to run it."""
    while True:
        size, files, _, _ = socket.recv_fds(server, 8, 64)
        if not size:
            sys.exit()
        data = b""
        while len(data) < int.from_bytes(size, "big"):
            data += server.recv(1 << 20)
        program = json.loads(data)
        ready, given_over = os.pipe()
        told, tell = os.pipe()
        if (middle := os.fork()) == 0:
            if (process := os.fork()) != 0:
                os.write(tell, b"%d" % process)
                os._exit(0)
            os.close(given_over)
            server.detach()  # a program's file may get its number
            os.read(ready, 1)  # now its parent is who asked
            _become(program, files)
            return program["arguments"]
        os.waitpid(middle, 0)
        answer = os.read(told, 16)
        for number in (ready, told, tell, given_over, *files):
            os.close(number)  # `given_over` lets the child go on
        server.sendall(answer)


def _become(program, files):
    """Take over a program's session, files, folder and environment."""
    if program["group"] is None:
        os.setsid()
    else:
        os.setpgid(0, program["group"])
    wanted = set(program["numbers"])
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, max(wanted) + 1) for file in files]
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in wanted and number not in high:
            with suppress(OSError):  # of the list itself
                os.close(number)
    for number, file in zip(program["numbers"], high, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    _find_hub()
    _count_threads()


def _find_hub():
    """Let the hub's library have its variables, which it reads when it is imported."""
    from huggingface_hub import constants

    constants.HF_HUB_CACHE = os.environ.get("HF_HUB_CACHE", constants.HF_HUB_CACHE)
    constants.HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES


def _count_threads():
    """Give PyTorch as many threads as it takes when it is imported: by the variable, or the cores of this process."""
    import torch

    number = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    torch.set_num_threads(int(number or len(os.sched_getaffinity(0))))


def run(arguments, paths):
    """What `python` does with these arguments, with these paths of the interpreter's own."""
    kind, program, *rest = arguments
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    first = [] if os.environ.get("PYTHONSAFEPATH") else ["" if kind == "-c" else os.getcwd()]
    sys.path[:] = [*first, *given, *paths]
    if kind == "-m":
        sys.argv = [program, *rest]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    sys.argv = ["-c", *rest]
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), main.__dict__)


def main():
    """Import what programs need; returns a program's arguments, once for each that is asked for."""

    import nanovllm.cli.main
    import nanovllm.serving.llm
    import nanovllm.serving.replicas.engine_process
    import nanovllm.serving.server.app  # noqa: F401

    if threading.active_count() > 1:
        raise RuntimeError("a process with threads cannot be forked safely")
    gc.collect()
    gc.freeze()  # no collection of a program copies the pages of what was imported
    return serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    own = {*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), os.getcwd(), ""}
    run(main(), [path for path in sys.path if path not in own])
