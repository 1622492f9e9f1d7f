"""A process that is not our child, held by its pidfd, since its id may be reused."""

from __future__ import annotations

import contextlib
import os
import select
import signal


class ForeignProcess:
    """The current process with this id; counts as ended if it cannot be opened."""

    def __init__(self, process_id: int) -> None:
        self.process_id = process_id
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.pidfd_open(process_id)

    @property
    def is_alive(self) -> bool:
        """Whether it runs: a zombie does not."""
        if self._descriptor is None:
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)  # readable once it has ended
        return not poll.poll(0)

    def kill(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
