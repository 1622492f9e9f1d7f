"""A process that has imported the engine and forks for each `nanovllm` that a shell starts: no import for a command.

shell ── nanovllm (SHIM, milliseconds) ── arguments, folder, environment, 3 files ──▶ this process ── fork ──▶ main()

python -m tests.support.forked_commands SOCKET
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback

# The program `nanovllm` of a shell. It hands its files over, passes signals on, and ends with the command's status.
SHIM = """#!{python} -ISsu
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
process = int(server.recv(8))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(process, number))
status = server.recv(8)
sys.exit(int(status) if status else 1)
"""
START_SECONDS = 120.0


class ForkedCommands:
    """The process, and a folder with a `nanovllm` for the PATH of a shell."""

    def __init__(self, folder):
        self.path = folder
        address = folder / "commands"
        shim = folder / "nanovllm"
        shim.write_text(SHIM.format(python=os.path.realpath(sys.executable), path=str(address)), encoding="utf-8")
        shim.chmod(0o755)
        command = [sys.executable, "-m", "tests.support.forked_commands", str(address)]
        self._process = subprocess.Popen(command)
        end = time.monotonic() + START_SECONDS
        while not address.exists():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the process of the commands has not started: {self._process.poll()}")
            time.sleep(0.05)

    def close(self):
        """End the process; commands that still run end by themselves."""
        self._process.terminate()
        self._process.wait()


def main(address):
    """Import what commands need, and fork for each that connects."""
    import nanovllm.cli.main
    import nanovllm.serving.llm
    import nanovllm.serving.server.app  # noqa: F401

    if threading.active_count() > 1:
        raise RuntimeError("a process with threads cannot be forked safely")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets ended children by itself
    server = socket.socket(socket.AF_UNIX)
    server.bind(address + ".new")
    server.listen()
    os.rename(address + ".new", address)  # it is there once it answers
    while True:
        client = server.accept()[0]
        if os.fork() == 0:
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            status = _command(client)
            client.sendall(b"%d" % status)
            os._exit(0)
        client.close()


def _command(client):
    """Run a command as a process of its own would; returns its exit status."""
    size, files, _, _ = socket.recv_fds(client, 8, 3)
    data = b""
    while len(data) < int.from_bytes(size, "big"):
        data += client.recv(1 << 20)
    arguments, folder, environment = json.loads(data)
    client.sendall(b"%-8d" % os.getpid())
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["nanovllm", *arguments]
    status = 1
    try:
        from nanovllm.cli.main import main as command

        status = command(arguments)
    except SystemExit as exit_:
        status = exit_.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status if isinstance(status, int) else int(status is not None)


if __name__ == "__main__":
    main(sys.argv[1])
