"""Work that requests need before they are queued: one queue a client, the client that had the fewest seconds first.

A task runs in one thread and holds a place of its lane while it works::

    lane short   1 place    [bob: 10 characters]               waiting: alice alice alice ...
    lane long    1 place    [alice: piece 3 of 20]             waiting: carol (after piece 9)
    lane forms   4 places   [alice][alice][bob][ ]             waiting: -
    lane pictures  2 places [bob: picture 2 of 3][ ]           waiting: -

Long work calls `checkpoint` every few milliseconds, where it makes way for a client that had less, and ends if nobody
waits for it. Compilation of forms moves to the third lane (`form_turn`), reading of pictures to the fourth
(`picture_turn`), with a checkpoint before each. A client without a place for forms gets one at once: a trial of the
client with the most is stopped and begins again later.

Invariant: No place of a lane is free while a task that may begin waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

Result = TypeVar("Result")

# Client of the current request; None where no server names it.
CLIENT: ContextVar[str | None] = ContextVar("client", default=None)
LONG_CHARS = 32768  # longer texts take 20 ms and more to tokenise
MAX_THREADS = 256
MAX_FORMS = 8  # tasks of one client that have begun and compile forms; its other work goes on meanwhile
MAX_IDLE = 1024  # most accounts of clients without work
FORM_PLACES = 4  # processes at work at once
PICTURE_PLACES = 2


class IntakeClosedError(Exception):
    """Ends work for a closed intake, and work that was dropped, which nobody reads."""


class DroppedError(BaseException):
    """Ends a task that nobody waits for; no `except Exception` on its way holds it."""


@dataclass(slots=True, eq=False)
class Account:
    """A client.

    served: seconds of preparation that it had.
    num_open: its tasks, waiting or running.
    num_forms: tasks among them that compile forms and have begun.
    """

    client: str
    served: float = 0.0
    num_open: int = 0
    num_forms: int = 0


class Accounts:
    """Accounts by client; the least counter of clients with work is where a client begins that had none."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def open(self, client: str) -> Account:
        """The account of a client with one more task."""
        account = self._accounts.pop(client, None) or Account(client)
        if not account.num_open:
            least = min((other.served for other in self._accounts.values() if other.num_open), default=0.0)
            account.served = max(account.served, least)
        account.num_open += 1
        self._accounts[client] = account
        return account

    def close(self, account: Account) -> None:
        """Count one task less."""
        account.num_open -= 1
        if not any(other.num_open for other in self._accounts.values()):
            self._accounts.clear()
        elif not account.num_open and len(self._accounts) > MAX_IDLE:
            idle = next((name for name, other in self._accounts.items() if not other.num_open), None)
            self._accounts.pop(idle or "", None)


@dataclass(slots=True, eq=False)
class Lane:
    """Tasks of one kind, running in places or waiting, by account."""

    num_places: int
    running: list[Task[Any]] = field(default_factory=list)
    waiting: dict[Account, deque[Task[Any]]] = field(default_factory=dict)

    def add(self, task: Task[Any], *, is_first: bool) -> None:
        tasks = self.waiting.setdefault(task.account, deque())
        (tasks.appendleft if is_first else tasks.append)(task)

    def tasks(self) -> list[Task[Any]]:
        return [*self.running, *(task for tasks in self.waiting.values() for task in tasks)]

    def remove(self, task: Task[Any]) -> None:
        tasks = self.waiting[task.account]
        tasks.remove(task)
        if not tasks:
            del self.waiting[task.account]

    def num_running(self, account: Account) -> int:
        return sum(task.account is account for task in self.running)


class Task(Future[Result]):
    """Work of a client and its result; `cancel` drops it, also while it runs."""

    def __init__(self, intake: Intake, work: Callable[[], Result], account: Account, *, compiles: bool) -> None:
        super().__init__()
        self.work: Callable[[], Result] | None = work
        self.account = account
        self.compiles = compiles
        self.has_begun = self.is_dropped = self.is_stopped = False
        self.lane: Lane
        self.since = 0.0  # time from which its place is not charged yet
        self.has_place = threading.Event()
        self.stop: Callable[[], None] | None = None  # ends its wait
        self._intake = intake

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        self._intake.drop(self)
        return is_cancelled

    def requeue(self) -> None:
        """Give up the place and wait for another one."""
        self._intake.move(self, self.lane)

    @contextmanager
    def stopped_by(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop`, from any thread, if the task is dropped or has to make way within the block."""
        with self._intake.lock:
            if self.is_dropped:
                raise DroppedError
            self.stop = stop
        try:
            yield
        finally:
            with self._intake.lock:
                self.stop = None


class Intake:
    """Tasks of one engine; thread-safe.

    Args:
        is_parallel: True if work of several lanes may run at once; if not, all of it shares one place.
    """

    def __init__(self, *, is_parallel: bool = True) -> None:
        self.lock = threading.RLock()  # guards everything below, and the fields of tasks
        self._accounts = Accounts()
        self.short = Lane(1)
        self.long, self.forms, self.pictures = (
            (Lane(1), Lane(FORM_PLACES), Lane(PICTURE_PLACES)) if is_parallel else [self.short] * 3
        )
        self._lanes = (self.short, self.long, self.forms, self.pictures)
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="nanovllm-prepare")
        self._num_begun = 0  # tasks with a thread
        self._is_closed = False

    def submit(
        self, work: Callable[[], Result], num_chars: int = 0, *, client: str | None = None, compiles: bool = False
    ) -> Task[Result]:
        """Queue work of a client; raises IntakeClosedError after `shutdown`.

        Args:
            num_chars: characters that it tokenises, about.
            client: client of the request, unless the server has named one for it.
            compiles: True if it compiles forms, so that few of a client begin.
        """
        named = CLIENT.get()
        client = named if named is not None else client if isinstance(client, str) else ""
        with self.lock:
            if self._is_closed:
                raise IntakeClosedError()
            task = Task(self, work, self._accounts.open(client), compiles=compiles)
            self._wait(task, self.short if num_chars <= LONG_CHARS else self.long)
        return task

    def shutdown(self) -> None:
        """Refuse further work and work that waits; work that runs ends at its next checkpoint."""
        with self.lock:
            self._is_closed = True
            tasks = [task for lane in self._lanes for task in lane.tasks()]
        for task in tasks:
            if not task.has_begun and task.set_running_or_notify_cancel():
                task.set_exception(IntakeClosedError())
            self.drop(task)

    def drop(self, task: Task[Any]) -> None:
        """End a task that nobody waits for: at once if it waits, else at its next checkpoint."""
        with self.lock:
            if task.work is None:
                return
            task.is_dropped = True
            is_waiting = task in task.lane.waiting.get(task.account, ())
            if is_waiting:
                task.lane.remove(task)
            if not task.has_begun:
                self._end(task)
            elif is_waiting:
                task.has_place.set()  # its thread ends it
            elif task.stop is not None:
                task.stop()

    # ------------------------------------------------------------------------------------------ from a task's thread

    def checkpoint(self, task: Task[Any]) -> None:
        """Charge the task; let a client go first that had less, or raise DroppedError."""
        with self.lock:
            self._charge(task)
            best = self._next(task.lane)
            if not task.is_dropped and (best is None or best.account.served >= task.account.served):
                return
        self.move(task, task.lane)

    def move(self, task: Task[Any], lane: Lane) -> None:
        """Give up the task's place and wait for one of `lane`; raises DroppedError."""
        with self.lock:
            self._leave(task)
            if task.is_dropped:
                raise DroppedError
            self._wait(task, lane, is_first=lane in (task.lane, self.short, self.long))
        task.has_place.wait()
        if task.is_dropped:
            raise DroppedError

    def _run(self, task: Task[Result]) -> None:
        try:
            if task.work is not None and task.set_running_or_notify_cancel():
                _current.task = task
                task.set_result(task.work())
        except DroppedError:
            task.set_exception(IntakeClosedError())
        except BaseException as error:
            task.set_exception(error)
        finally:
            _current.task = None
            with self.lock:
                self._leave(task)
                self._num_begun -= 1
                task.account.num_forms -= task.compiles
                self._end(task)

    # --------------------------------------------------------------------------------------------- under the lock

    def _wait(self, task: Task[Any], lane: Lane, *, is_first: bool = False) -> None:
        task.lane = lane
        task.has_place.clear()
        lane.add(task, is_first=is_first)
        self._fill(lane)

    def _leave(self, task: Task[Any]) -> None:
        if task in task.lane.running:
            self._charge(task)
            task.lane.running.remove(task)
            self._fill(task.lane)

    def _end(self, task: Task[Any]) -> None:
        task.work = None
        self._accounts.close(task.account)
        for lane in (self.short, self.long):  # a thread, or a form of its client, may begin
            self._fill(lane)

    def _charge(self, task: Task[Any]) -> None:
        now = time.perf_counter()
        task.account.served += now - task.since
        task.since = now

    def _next(self, lane: Lane) -> Task[Any] | None:
        """The task that gets the next place: of the client with the fewest places and seconds; None if none may."""
        ready = [task for tasks in lane.waiting.values() if (task := self._first(tasks)) is not None]
        return min(ready, key=lambda task: (lane.num_running(task.account), task.account.served), default=None)

    def _first(self, tasks: deque[Task[Any]]) -> Task[Any] | None:
        """The first task of a client that may begin or go on."""
        has_thread = self._num_begun < MAX_THREADS
        for task in tasks:
            may_compile = not task.compiles or task.account.num_forms < MAX_FORMS
            if task.has_begun or (has_thread and may_compile):
                return task
        return None

    def _fill(self, lane: Lane) -> None:
        """Hand out free places, and those of trials that make way."""
        while (task := self._next(lane)) is not None:
            if len(lane.running) >= lane.num_places:
                self._make_way(lane, task.account)
                return
            lane.remove(task)
            lane.running.append(task)
            task.since = time.perf_counter()
            task.is_stopped = False
            task.has_place.set()
            if not task.has_begun:
                task.has_begun = True
                task.account.num_forms += task.compiles
                self._num_begun += 1
                self._threads.submit(self._run, task)

    def _make_way(self, lane: Lane, account: Account) -> None:
        """Stop the youngest trial of the client with the most places, for a client that has none."""
        if lane.num_running(account) or any(task.is_stopped for task in lane.running):
            return
        most = max(lane.running, key=lambda task: lane.num_running(task.account)).account
        if lane.num_running(most) < 2:
            return
        for task in reversed(lane.running):
            if task.account is most and task.stop is not None:
                task.is_stopped = True
                task.stop()
                return


class _Current(threading.local):
    task: Task[Any] | None = None


_current = _Current()


def checkpoint() -> None:
    """Let clients go first that had less, and end here if nobody waits; outside of a task nothing."""
    if (task := _current.task) is not None:
        task._intake.checkpoint(task)


def form_turn() -> AbstractContextManager[Task[Any] | None]:
    """Compile a form within the block, in a place for forms; gives the task, None outside of one."""
    return _turn("forms")


def picture_turn() -> AbstractContextManager[Task[Any] | None]:
    """Read pictures within the block, in a place for pictures; gives the task, None outside of one."""
    return _turn("pictures")


@contextmanager
def _turn(name: str) -> Iterator[Task[Any] | None]:
    task = _current.task
    if task is None or task.lane is getattr(task._intake, name):
        yield task
        return
    before = task.lane
    task._intake.move(task, getattr(task._intake, name))
    try:
        yield task
    finally:
        task._intake.move(task, before)
