"""The process that an engine was built in: a forked child has its memory, but neither its threads nor their locks."""

from __future__ import annotations

import os


class OwnProcess:
    """Refuses calls from forked children.

    There a lock may be held by a thread that does not exist, for ever; so look here before taking any.

    Args:
        owner: what lives in this process, for the error.
    """

    __slots__ = ("_id", "_owner")

    def __init__(self, owner: str) -> None:
        self._id, self._owner = os.getpid(), owner

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a forked child."""
        return os.getpid() != self._id

    def check(self) -> None:
        """Raise RuntimeError in a forked child."""
        if os.getpid() != self._id:
            raise RuntimeError(
                f"this {self._owner} lives in process {self._id}, and a forked child (process {os.getpid()}) cannot "
                "use it; build one there. PyTorch's threads do not survive a fork either: start such a process by "
                'multiprocessing\'s "spawn" method, or call torch.set_num_threads(1) in it first.'
            )
