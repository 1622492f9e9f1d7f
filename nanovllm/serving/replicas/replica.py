"""A replica in the front: its process, channel, queue and restarts."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from nanovllm.features.engine_stats import ReplicaStatus
from nanovllm.serving.replicas.channel import Channel
from nanovllm.serving.replicas.foreign_process import ForeignProcess
from nanovllm.serving.replicas.messages import Start, ToEngine, encode
from nanovllm.serving.replicas.pool_request import PoolRequest
from nanovllm.serving.replicas.replica_queue import ReplicaQueue

logger = logging.getLogger("nanovllm")

# Seconds until a dead replica is restarted, by number of deaths; after the last one it has failed for good.
BACKOFF_SECONDS = (0.0, 1.0, 2.0, 4.0, 8.0)
# Seconds of service after which earlier deaths no longer count.
STABLE_SECONDS = 60.0
EXIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ReplicaResources:
    """Cores and devices of one replica.

    cores: cores of its process.
    environment: variables of its process, such as CUDA_VISIBLE_DEVICES.
    """

    cores: frozenset[int]
    environment: dict[str, str]


class Replica(ReplicaQueue):
    """An engine process and its state.

    Args:
        setup: options of the engine, see `opening`.
        sends_records, sends_block_events: see `Start`.
    """

    def __init__(
        self,
        index: int,
        resources: ReplicaResources,
        setup: dict[str, Any],
        *,
        sends_records: bool,
        sends_block_events: bool,
    ) -> None:
        super().__init__(index)
        self._resources = resources
        self._start = Start(pickle.dumps(setup | {"index": index}), sends_records, sends_block_events)
        self.channel: Channel | None = None
        self.num_restarts = 0
        self.silence = 0.0  # seconds without a message, while the replica had work and the front listened
        self.start_time: float | None = None  # time of the next restart
        self._num_deaths = 0  # consecutive deaths
        self._up_since = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._workers: tuple[ForeignProcess, ...] = ()  # its other ranks, until the next launch
        self._died_at = 0.0

    @property
    def is_up(self) -> bool:
        return self.state == "up"

    @property
    def status(self) -> ReplicaStatus:
        process_id = None if self._process is None else self._process.pid
        return ReplicaStatus(
            self.index, self.state, process_id, self.num_running, self.num_waiting, self.num_restarts, self.silence
        )

    def launch(self) -> Channel:
        """Start its process; returns the channel to it."""
        channel, other = Channel.pair()
        resources = self._resources
        descriptor = other.fileno()
        paths = [path for path in sys.path if isinstance(path, str)]  # Python skips other entries
        # Not multiprocessing: it would import the caller's main module again.
        program = (
            f"import os, sys; os.sched_setaffinity(0, {set(resources.cores)}); sys.path[:] = {paths}\n"
            "from nanovllm.fast.host.gc_control import collector_paused\n"
            "with collector_paused():\n"
            "    from nanovllm.serving.replicas.engine_process import main\n"
            f"main({descriptor}, {os.getpid()})"
        )
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                env=os.environ | resources.environment,
                pass_fds=(descriptor,),
                start_new_session=True,
            )
        self.channel = channel
        self.start_time = None
        self.silence = 0.0
        self._forget_workers()
        self.send(self._start)
        return channel

    def send(self, message: ToEngine) -> None:
        if self.channel is not None:
            self.channel.send(encode(message))

    def came_up(self, now: float, max_num_seqs: int, worker_ids: tuple[int, ...]) -> None:
        self.state = "up"
        self.max_num_seqs = max_num_seqs
        self._up_since = now
        self._workers = tuple(map(ForeignProcess, worker_ids))

    def kill(self) -> None:
        """Kill its process group, which includes compiler workers, and its other ranks."""
        # Its process id cannot be reused before the process is waited for.
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for worker in self._workers:  # a stopped worker would not notice the end
            worker.kill()

    def _forget_workers(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = ()

    def bury(self, now: float) -> list[PoolRequest]:
        """Record the death of its process, and schedule a restart; returns its requests."""
        self.kill()
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self.is_up and now - self._up_since > STABLE_SECONDS:
            self._num_deaths = 0
        if self._num_deaths < len(BACKOFF_SECONDS):
            self.state = "restarting"
            self.start_time = now + BACKOFF_SECONDS[self._num_deaths]
        else:
            self.state = "failed"
            self.start_time = None
        self._num_deaths += 1
        self._died_at, requests = now, super().bury(now)
        fate = "given up" if self.state == "failed" else "started again"
        logger.error("replica %d has died with %d requests; it is %s", self.index, len(requests), fate)
        return requests

    def is_due(self, now: float) -> bool:
        """Whether to restart it: the backoff is over, and its old processes have freed their memory."""
        if self.start_time is None or now < self.start_time:
            return False
        if now < self._died_at + EXIT_SECONDS and any(worker.is_alive for worker in self._workers):
            return False
        return self._process is None or self._process.poll() is not None

    def join(self) -> None:
        """Kill its process and wait for its end."""
        self.kill()
        if self._process is not None:
            try:
                self._process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning("process %d of replica %d does not end", self._process.pid, self.index)
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        self._forget_workers()
