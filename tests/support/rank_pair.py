"""A second process that is rank 1 of one engine after another, so that an engine of two ranks starts without one.

Rank 0 is the test's process. What both compute is the engine's own; how a process starts and dies is not tested here.

python -m tests.support.rank_pair FILE_DESCRIPTOR
"""

import os
import socket
import subprocess
import sys
import traceback
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from nanovllm.build import build_worker
from nanovllm.errors import DeviceError
from nanovllm.features.ranks import workers
from nanovllm.features.ranks.ranks import COLLECTIVE_TIMEOUT, Ranks
from nanovllm.features.ranks.workers import Start


@contextmanager
def one_pair_of_processes():
    """Let every engine of two ranks in this block, one at a time, have the same process as its other rank."""
    own, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.support.rank_pair", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process, pytest.MonkeyPatch.context() as patch:
        theirs.close()
        orders = Connection(own.detach())
        try:
            patch.setattr(workers, "WorkerProcesses", partial(PairedWorker, orders))
            yield
            orders.send(None)
        except BaseException:
            process.kill()
            raise
        finally:
            orders.close()


class PairedWorker:
    """What `WorkerProcesses` is to an engine of two ranks on a CPU."""

    def __init__(self, orders, source, config, device_type):
        assert config.tensor_parallel_size == 2 and device_type == "cpu"
        self.num_threads = 1
        self._orders, self._is_closed = orders, False
        store = dist.TCPStore("127.0.0.1", 0, 2, True, COLLECTIVE_TIMEOUT, wait_for_workers=False)
        orders.send(Start(1, store.port, source, config, self.num_threads))
        self.ranks = Ranks(0, 2, torch.device("cpu"), store)

    def send(self, kind, *payload):
        self._orders.send((kind, payload))

    def check(self):
        pass

    def abort(self):
        pass

    def when_failed(self, callback):
        pass

    def fail(self, error):
        raise DeviceError(f"a step of two ranks failed; the other says: {self.close()}") from error

    def close(self):
        """Wait until the other process is no longer a rank of this engine; returns what failed there."""
        if self._is_closed:
            return None
        self._is_closed = True
        self.send("close")
        said = self._orders.recv()
        return said


def _serve(orders):
    while (start := orders.recv()) is not None:
        said = None
        try:
            _follow(start, orders)
        except Exception:  # a refusal is rank 0's too
            said = traceback.format_exc()
            while orders.recv()[0] != "close":
                pass
        orders.send(said)


def _follow(start, orders):
    store = dist.TCPStore("127.0.0.1", start.port, 2, False, COLLECTIVE_TIMEOUT)
    runner = build_worker(start, Ranks(start.rank, 2, torch.device("cpu"), store))
    while True:
        kind, payload = orders.recv()
        if kind == "close":
            return
        getattr(runner, kind)(*payload)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["TQDM_DISABLE"] = "1"
    try:
        _serve(Connection(int(sys.argv[1])))
    except EOFError:  # the test's process is gone
        sys.exit(1)
