"""Engine processes of a pool: their messages, deaths and restarts."""

from __future__ import annotations

import logging
import os
import pickle
import selectors
import time
from collections.abc import Iterator, Sequence

from nanovllm.errors import ModelLoadError
from nanovllm.features.engine_stats import ReplicaStatus
from nanovllm.models.source import stored_files
from nanovllm.serving.replicas.messages import Close, Died, FromEngine, LoadFailed, Ready, ToEngine, decode_from_engine
from nanovllm.serving.replicas.replica import Replica
from nanovllm.serving.streaming.engine_thread import CLOSE_SECONDS

logger = logging.getLogger("nanovllm")

# A replica with work that reports no step for this long is killed, and its requests move to other replicas.
STALL_SECONDS = 120.0
# Maximum seconds of silence per check: while the front does not listen, a replica is not silent.
MAX_LISTENING_SECONDS = 1.0


class Fleet:
    """Replicas and their channels. Not thread-safe, except `wake`.

    Args:
        source: the model's folder, file or hub id.
        step_timeout: seconds, see `EngineConfig`.
        ends_in_order: True if engines have something to write when they are closed; they get CLOSE_SECONDS for it.
    """

    def __init__(
        self, replicas: Sequence[Replica], source: str, *, step_timeout: float, ends_in_order: bool = False
    ) -> None:
        self.replicas = replicas
        self._ends_in_order = ends_in_order
        # A single replica's requests cannot move: its first step may be a long compilation.
        self._stall_seconds = min(STALL_SECONDS, step_timeout) if len(replicas) > 1 else step_timeout
        self._source, self._files = source, stored_files(source)
        self._hash_seed = ""  # hash seed of the first ready replica; the others must have the same
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._last_look = time.monotonic()

    @property
    def up(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.is_up]

    @property
    def statuses(self) -> list[ReplicaStatus]:
        return [replica.status for replica in self.replicas]

    @property
    def has_failed(self) -> bool:
        """Whether every replica has failed for good."""
        return all(replica.state == "failed" for replica in self.replicas)

    def launch(self, replica: Replica) -> None:
        self._selector.register(replica.launch(), selectors.EVENT_READ, replica)
        self._follow(replica)

    def send(self, replica: Replica, message: ToEngine) -> None:
        """Send a message, as soon as the channel has room; drops it if the replica is dead."""
        replica.send(message)
        self._follow(replica)

    def wake(self) -> None:
        """Make `listen` return; any thread may call it."""
        os.eventfd_write(self._wake, 1)

    def wait(self, timeout: float | None) -> None:
        """Wait for messages or a wake-up, at most `timeout` seconds; consumes nothing."""
        self._selector.select(timeout)

    def listen(self) -> Iterator[tuple[Replica, FromEngine | None]]:
        """Yield each received message with its replica; None is the last message of a dead replica."""
        for key, events in self._selector.select(0):
            replica: Replica | None = key.data
            if replica is None:
                os.eventfd_read(self._wake)
                continue
            channel = replica.channel
            if channel is None:
                continue
            if events & selectors.EVENT_WRITE:
                channel.flush()
                self._follow(replica)
            for data in channel.receive() if events & selectors.EVENT_READ else ():
                message = decode_from_engine(data)
                replica.silence = 0.0
                if isinstance(message, Ready) and (error := self._other_model(message)) is not None:
                    replica.kill()
                    message = LoadFailed(pickle.dumps(error), str(error))
                if isinstance(message, Ready):
                    replica.came_up(time.monotonic(), message.config["max_num_seqs"], message.worker_ids)
                    replica.stats = message.stats
                elif isinstance(message, LoadFailed | Died):
                    logger.error("replica %d: %s", replica.index, message.message)
                yield replica, message
            if channel.is_closed:
                yield replica, None

    def stalled(self) -> list[Replica]:
        """Replicas with work that have reported nothing for too long."""
        now = time.monotonic()
        elapsed = min(now - self._last_look, MAX_LISTENING_SECONDS)
        self._last_look = now
        found = []
        for replica in self.up:
            if replica.requests:
                replica.silence += elapsed
            if replica.silence > self._stall_seconds:
                limit = self._stall_seconds
                logger.error("replica %d has reported nothing for %g s and is killed", replica.index, limit)
                found.append(replica)
        return found

    def restart(self) -> None:
        """Restart the dead replicas that are due."""
        now = time.monotonic()
        for replica in self.replicas:
            if replica.is_due(now):
                replica.num_restarts += 1
                try:
                    self._check_files()
                    self.launch(replica)
                except (OSError, ModelLoadError) as error:  # the host is short of processes or memory
                    logger.error("replica %d could not be started: %s", replica.index, error)
                    replica.bury(now)

    def _check_files(self) -> None:
        """Raise ModelLoadError if the model's files have changed since the first replicas were started.

        Requests move between replicas: with two models an answer would mix both.
        """
        found = stored_files(self._source)
        changed = sorted(name for name, state in self._files.items() if found.get(name) != state)
        if changed:
            raise ModelLoadError(
                f"{changed[0]} in {self._source} has changed since the others were started, by its size or time. "
                "Put it back with its time, or start all replicas anew."
            )

    def _other_model(self, ready: Ready) -> ModelLoadError | None:
        """Error if a replica has loaded another model than the first one, such as a newer revision; else None."""
        self._hash_seed = self._hash_seed or ready.hash_seed
        if ready.hash_seed == self._hash_seed:
            return None
        return ModelLoadError(
            f"it has loaded {ready.hash_seed!r}, and the others {self._hash_seed!r} (model, revision, dtype). Name the "
            "revision, or start all replicas anew."
        )

    def drop(self, replica: Replica) -> None:
        """Stop listening to a dead replica."""
        if replica.channel is not None:
            self._selector.unregister(replica.channel)

    def close(self) -> None:
        """End every process."""
        if self._ends_in_order:
            self._close_in_order()
        self._selector.close()
        for replica in self.replicas:
            replica.kill()
        for replica in self.replicas:
            replica.join()
        os.close(self._wake)

    def _close_in_order(self) -> None:
        """Have the processes close their engines, within CLOSE_SECONDS; messages that arrive meanwhile are dropped."""
        closing = set(self.up)
        for replica in closing:
            self.send(replica, Close())
        end = time.monotonic() + CLOSE_SECONDS
        while closing and (left := end - time.monotonic()) > 0:
            self.wait(left)
            for replica, message in self.listen():
                if message is None:
                    self.drop(replica)
                    closing.discard(replica)
        if closing:
            logger.warning("%d replicas are killed, as they took over %g s to end", len(closing), CLOSE_SECONDS)

    def _follow(self, replica: Replica) -> None:
        """Select the channel for writing too while it has unsent bytes."""
        if (channel := replica.channel) is None:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
        if self._selector.get_key(channel).events != events:
            self._selector.modify(channel, events, replica)
