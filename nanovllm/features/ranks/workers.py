"""Worker processes for tensor parallelism: rank 0 sends whole steps, and all ranks compute them together.

Rank 0 is the user's process. It starts one worker a device; workers have neither scheduler nor requests::

    rank 0    schedule, lay out ──┬── compute ─ all-reduce ... draw ── update
                                  │ rows, block tables, draw inputs
    rank 1                        └── compute ─ all-reduce ... draw

If a process ends or hangs, all end: its peers notice the closed connection or the missing heartbeat and abort their
collectives, and the engine is dead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nanovllm.errors import DeviceError
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.ranks.ranks import COLLECTIVE_TIMEOUT, Ranks
from nanovllm.features.speculation_options import SUFFIX

ENTRY = """
import sys
from nanovllm.build import run_worker
run_worker(int(sys.argv[1]), int(sys.argv[2]))
"""
CLOSE_SECONDS = 5.0  # most time for a process to end after it was asked to
HANG_SECONDS = 60.0  # time without a heartbeat after which a process counts as ended
ENDING_SECONDS = 2.0  # most time between a worker's lost connections and its exit code, on a busy host
_POLL_SECONDS = 1.0
_MEETING_POLL_SECONDS = 0.1
_LOST = (EOFError, OSError, RuntimeError)  # errors of a connection to a dead worker


@dataclass(frozen=True, slots=True)
class Start:
    """Start message of a worker.

    port: port of rank 0's store on this host.
    num_threads: this rank's share of a CPU's cores; None on a GPU.
    """

    rank: int
    port: int
    source: str
    config: EngineConfig
    num_threads: int | None

    def __post_init__(self) -> None:
        """Remove the options of rank 0 alone: a drafter, and policies."""
        source = self.config.speculation
        speculation = source if isinstance(source, str | None) else SUFFIX
        object.__setattr__(self, "config", replace(self.config, policies=None, speculation=speculation))


class WorkerProcesses:
    """Ranks 1 and up of one engine, started and ended by rank 0.

    Args:
        source: folder or hub id of the model.
        device_type: "cpu" or "cuda"; rank r takes device r.

    Attributes:
        ranks: this process among them.
        num_threads: each rank's share of a CPU's cores, for `computing_with`; None on a GPU.

    Raises DeviceError with a worker's own error if one fails to start.
    """

    def __init__(self, source: str, config: EngineConfig, device_type: str) -> None:
        size = config.tensor_parallel_size
        self._is_closing = False
        self._failure: str | None = None
        self._lock = threading.Lock()  # guards the ends of processes
        self._processes: list[subprocess.Popen[bytes]] = []
        self._orders: list[Connection[Any, Any]] = []
        self._lifelines: list[Connection[Any, Any]] = []
        self._callback: weakref.WeakMethod[Callable[[DeviceError], None]] | None = None
        self.ranks: Ranks | None = None
        self.num_threads = max(1, torch.get_num_threads() // size) if device_type == "cpu" else None
        # Its port is chosen by the system, and known to this process's children alone.
        self._store = dist.TCPStore("127.0.0.1", 0, size, True, COLLECTIVE_TIMEOUT, wait_for_workers=False)
        try:
            for rank in range(1, size):
                self._start(Start(rank, self._store.port, source, config, self.num_threads))
            self.ranks = self._meet(size, torch.device("cpu" if device_type == "cpu" else "cuda:0"))
        except (EOFError, OSError, RuntimeError) as error:
            self.fail(error)
        except BaseException:  # Ctrl-C
            self.close()
            raise

    def _meet(self, size: int, device: torch.device) -> Ranks:
        """This process among the ranks, once all are ready and connected; raises DeviceError if a worker ends before.

        In a thread, since until the ranks are connected only a timeout of minutes reveals a dead one.
        """
        self._failure = next((said for orders in self._orders if (said := orders.recv()) != "ready"), None)
        self.check()
        threading.Thread(target=self._watch, name="nanovllm-workers", daemon=True).start()
        meeting: futures.Future[Ranks] = futures.Future()

        def meet() -> None:
            try:
                meeting.set_result(Ranks(0, size, device, self._store))
            except BaseException as error:
                meeting.set_exception(error)

        threading.Thread(target=meet, name="nanovllm-meeting", daemon=True).start()
        while not futures.wait((meeting,), _MEETING_POLL_SECONDS).done:
            self.check()
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the current device is per thread
        return meeting.result()

    def _start(self, start: Start) -> None:
        pairs = [socket.socketpair() for _ in range(2)]  # orders, lifeline
        theirs = [pair[1].fileno() for pair in pairs]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path if isinstance(path, str)),
            "TQDM_DISABLE": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-c", ENTRY, *map(str, theirs)],
            pass_fds=theirs, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for rank 0
        )  # fmt: skip
        for _, own in pairs:
            own.close()
        self._processes.append(process)
        orders, lifeline = (Connection(pair[0].detach()) for pair in pairs)
        self._orders.append(orders)
        self._lifelines.append(lifeline)
        orders.send(start)

    def _watch(self) -> None:
        """Wait until a worker ends or hangs; then end the others and abort rank 0's collectives."""
        last_signs = dict.fromkeys(self._lifelines, time.monotonic())
        gone: list[int] = []
        while not gone:
            for lifeline in wait(self._lifelines, _POLL_SECONDS):
                try:
                    lifeline.recv_bytes()  # type: ignore[union-attr]
                    last_signs[lifeline] = time.monotonic()  # type: ignore[index]
                except (EOFError, OSError):
                    gone.append(self._lifelines.index(lifeline))  # type: ignore[arg-type]
            if self._is_closing:
                return
            oldest = min(last_signs, key=last_signs.__getitem__)
            if time.monotonic() - last_signs[oldest] > HANG_SECONDS:
                gone.append(self._lifelines.index(oldest))
                self._processes[gone[-1]].kill()
        self._record_failure(gone)
        self.abort()
        self._end_processes()
        if self._callback is not None and (callback := self._callback()) is not None:
            callback(self._error())

    @property
    def process_ids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def when_failed(self, callback: Callable[[DeviceError], None]) -> None:
        """Call a method from another thread once a worker is gone, even between steps; it is held weakly."""
        self._callback = weakref.WeakMethod(callback)
        if self._failure is not None:
            callback(self._error())

    def _record_failure(self, numbers: list[int]) -> None:
        """Keep the last messages and exit codes of these workers; the first failure counts."""
        with self._lock:
            if self._failure is None:
                self._failure = "; ".join(self._last_words(number) for number in numbers)

    def _last_words(self, number: int) -> str:
        process = self._processes[number]
        said = ""
        with contextlib.suppress(EOFError, OSError):
            if self._orders[number].poll():
                said = f":\n{self._orders[number].recv()}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLOSE_SECONDS)
        return f"rank {number + 1} (process {process.pid}) ended with exit code {process.returncode}{said}"

    # --------------------------------------------------------------------------------------------------- orders

    def send(self, kind: str, *payload: Any) -> None:
        """Send an order to every worker; raises DeviceError if one is gone."""
        self.check()
        try:
            for orders in self._orders:
                orders.send((kind, payload))
        except OSError as error:
            self.fail(error)

    def check(self) -> None:
        """Raise DeviceError if a worker is gone."""
        if self._failure is not None:
            raise self._error()

    def _error(self) -> DeviceError:
        return DeviceError(f"a process of the tensor parallel group is gone: {self._failure}")

    def fail(self, error: BaseException) -> NoReturn:
        """End all ranks after an error in a step: they may have stopped at different places."""
        if gone := self._find_gone(error):
            self._record_failure(gone)
        with self._lock:
            self._failure = self._failure or f"a step failed on rank 0 ({type(error).__name__}: {error})"
        self.close()
        if isinstance(error, Exception):
            raise self._error() from error
        raise error

    def _find_gone(self, error: BaseException) -> list[int]:
        """Numbers of the ended workers; waits for one that is just ending, if the error may be a lost connection."""
        may_be_lost = isinstance(error, _LOST) or isinstance(error.__cause__, _LOST)
        end = time.monotonic() + (ENDING_SECONDS if may_be_lost else 0.0)
        while True:
            gone = [number for number, process in enumerate(self._processes) if process.poll() is not None]
            if gone or time.monotonic() >= end:
                return gone
            time.sleep(0.01)

    # ------------------------------------------------------------------------------------------------------ end

    def close(self) -> None:
        """End every worker and wait until it has; may be called again."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._failure is None:
            for orders in self._orders:
                with contextlib.suppress(OSError):
                    orders.send(("close", ()))
            end = time.monotonic() + CLOSE_SECONDS
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
        self.abort()
        self._end_processes()
        with self._lock:
            self._failure = self._failure or "the engine was closed"

    def abort(self) -> None:
        """End the collectives in progress, which wait for a rank that is gone or stuck."""
        if self.ranks is not None:
            self.ranks.abort()

    def _end_processes(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()


class Worker:
    """One of the other ranks, in its own process.

    Args:
        orders, lifeline: file descriptors of connections to rank 0.
    """

    def __init__(self, orders: int, lifeline: int) -> None:
        self._orders: Connection[Any, Any] = Connection(orders)
        self._lifeline: Connection[Any, Any] = Connection(lifeline)
        logging.getLogger("nanovllm").setLevel(logging.ERROR)  # rank 0 says the same
        threading.Thread(target=self._end_with_rank_0, args=(os.getppid(),), daemon=True).start()

    def _end_with_rank_0(self, parent: int) -> None:
        with contextlib.suppress(EOFError, OSError):
            while not self._lifeline.poll(_POLL_SECONDS) and os.getppid() == parent:
                self._lifeline.send_bytes(b".")  # a sign of life
        os._exit(1)  # the main thread may wait for a collective that never ends

    def run(self, build: Callable[[Start, Ranks], Any]) -> None:
        """Start as the rank named in the first message, then execute rank 0's orders until it closes.

        Args:
            build: makes the model runner of this rank.
        """
        try:
            start: Start = self._orders.recv()
            if start.num_threads is not None:
                torch.set_num_threads(start.num_threads)
                device = torch.device("cpu")
            else:
                device = torch.device("cuda", start.rank)
            self._orders.send("ready")
            store = dist.TCPStore("127.0.0.1", start.port, start.config.tensor_parallel_size, False, COLLECTIVE_TIMEOUT)
            runner = build(start, Ranks(start.rank, start.config.tensor_parallel_size, device, store))
            while True:
                kind, payload = self._orders.recv()
                if kind == "close":
                    break
                getattr(runner, kind)(*payload)
        except BaseException:
            with contextlib.suppress(OSError):
                self._orders.send(traceback.format_exc())
            os._exit(1)  # threads of collectives may wait for ever
        os._exit(0)
