"""The commands `nanovllm ps` and `nanovllm stop`: the servers of this user, by the files that they keep while they run.

Each server keeps one file, PID.json, in a folder for this user alone. A file of an ended process is stale, and is
removed by the next look.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.cli.flags import add_verbose_flag
from nanovllm.features.extras import check_extra
from nanovllm.serving.server.listening import format_address
from nanovllm.serving.server.settings import ServerSettings

if TYPE_CHECKING:
    import psutil

HEADINGS = ("PID", "MODEL", "ADDRESS", "RUNS FOR", "MEMORY")
WAIT_S = 60.0  # open answers may take a server's drain_timeout, 30 s
POLL_S = 0.05
START_SLACK_S = 0.01  # the start of a process is known to a tick of the kernel's clock


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server of this user.

    started: seconds since the epoch, of the process: a later process may have its number.
    served_names: names of the model in requests, where `--served-model-name` gives some.
    """

    pid: int
    started: float
    model: str
    address: str
    served_names: Sequence[str] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Process id, port, model, and its names in requests."""
        port = self.address.rpartition(":")[2]
        base = os.path.basename(self.model)
        return str(self.pid), port, self.model, base, *self.served_names

    def process(self) -> psutil.Process | None:
        """The process; None if it has ended."""
        import psutil

        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.started) <= START_SLACK_S
            return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None


def add_ps_command(commands: Any) -> None:
    """Register `nanovllm ps`."""
    ps = commands.add_parser(
        "ps", help="list the servers of this user", allow_abbrev=False,
        description="List the servers of this user that run on this machine.",
    )  # fmt: skip
    ps.add_argument("--json", action="store_true", help="print one JSON object a line instead of a table")
    add_verbose_flag(ps)
    ps.set_defaults(run=_ps)


def add_stop_command(commands: Any) -> None:
    """Register `nanovllm stop`."""
    stop = commands.add_parser(
        "stop", help="stop a server of this user", allow_abbrev=False,
        description="Stop a server of this user by SIGTERM and wait until it has ended: open answers may finish.",
    )  # fmt: skip
    names = "process id, port, model or its name in requests; without it the only one"
    stop.add_argument("server", nargs="?", metavar="SERVER", help=names)
    stop.add_argument("--all", action="store_true", help="stop all of them")
    stop.add_argument("--timeout", type=float, default=WAIT_S, metavar="SECONDS", help="seconds to wait (default 60)")
    add_verbose_flag(stop)
    stop.set_defaults(run=_stop)


@contextmanager
def registered(model: str, settings: ServerSettings, listeners: Sequence[socket.socket]) -> Iterator[None]:
    """Keep this process's file while a server runs; without a private folder it runs unlisted."""
    import psutil

    process = psutil.Process()
    port = listeners[0].getsockname()[1] if listeners else settings.port
    address = f"http://{format_address(settings.host, port)}"
    server = RunningServer(process.pid, process.create_time(), model, address, settings.served_model_name)
    path = None
    with suppress(OSError):
        path = runtime_folder() / f"{server.pid}.json"
        path.write_text(json.dumps(asdict(server)) + "\n", encoding="utf-8")
    try:
        yield
    finally:
        if path is not None and os.getpid() == server.pid:
            with suppress(OSError):
                path.unlink()


def runtime_folder() -> Path:
    """The private folder of this user's files; raises PermissionError if it is another's or open to others."""
    own = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(own) / "nanovllm" if own else Path(tempfile.gettempdir()) / f"nanovllm-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(1, "must be a folder of this user, closed to others; remove it", str(folder))
    return folder


def running_servers() -> list[RunningServer]:
    """Servers of this user by start; removes stale files."""
    found = []
    for path in runtime_folder().glob("*.json"):
        try:
            server = RunningServer(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # being written, or just removed
            continue
        if server.process() is None:
            path.unlink(missing_ok=True)
        else:
            found.append(server)
    return sorted(found, key=lambda server: server.started)


def _ps(options: argparse.Namespace) -> int:
    check_extra("nanovllm ps", "cli", "psutil")
    rows = [HEADINGS]
    for server in running_servers():
        process = server.process()
        if process is None:
            continue
        num_bytes = _resident_bytes(process)
        if options.json:
            print(json.dumps(asdict(server) | {"memory": num_bytes}))
        seconds = int(time.time() - server.started)
        runs_for = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        rows.append((str(server.pid), server.model, server.address, runs_for, f"{num_bytes / 1e6:,.0f} MB"))
    if options.json:
        return 0
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _resident_bytes(process: psutil.Process) -> int:
    """Memory of a server and its replicas."""
    import psutil

    total = 0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            total += each.memory_info().rss
    return total


def _stop(options: argparse.Namespace) -> int:
    check_extra("nanovllm stop", "cli", "psutil")
    servers = _chosen(options)
    for server in servers:
        os.kill(server.pid, signal.SIGTERM)
    end = time.monotonic() + options.timeout
    for server in servers:
        while server.process() is not None:
            if time.monotonic() > end:
                raise RuntimeError(
                    f"{_describe(server)} still runs after {options.timeout:g} s: answers are open. Wait, or stop it "
                    "again, which ends them."
                )
            time.sleep(POLL_S)
        print(f"{_describe(server)} has stopped")
    return 0


def _chosen(options: argparse.Namespace) -> list[RunningServer]:
    """The servers to stop; raises ValueError unless the arguments name one of them."""
    servers = running_servers()
    if options.all and options.server is not None:
        raise ValueError(f"--all stops every server, and {options.server!r} names one. Give one of the two.")
    if options.server is not None:
        name = options.server
        found = [server for server in servers if name in server.names]
    else:
        name = "a server"
        found = servers
    if not found:
        raise ValueError(f"no server of this user is {name}." if options.server else "no server of this user runs.")
    if len(found) > 1 and not options.all:
        listed = ", ".join(map(_describe, found))
        raise ValueError(f"{len(found)} servers are meant: {listed}. Name one by its process id, or give --all.")
    return found


def _describe(server: RunningServer) -> str:
    return f"{server.pid} ({server.model} at {server.address})"
