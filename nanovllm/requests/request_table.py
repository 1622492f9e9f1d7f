"""The requests that run or wait, by id: the samples of each, and until when it may run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from sortedcontainers import SortedList

from nanovllm.requests.sample import Request
from nanovllm.sequence import Sequence


class RequestTable:
    """A request is the list of its samples, in order of their index."""

    def __init__(self) -> None:
        self._samples: dict[str, list[Request]] = {}
        self._deadlines: SortedList = SortedList()  # (deadline, request id) of the requests that have one

    def __len__(self) -> int:
        return len(self._samples)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._samples

    def __getitem__(self, request_id: str) -> list[Request]:
        return self._samples[request_id]

    @property
    def ids(self) -> Iterable[str]:
        return self._samples.keys()

    @property
    def samples(self) -> Iterator[Request]:
        """Those of all requests."""
        return chain.from_iterable(self._samples.values())

    def sample_of(self, sequence: Sequence) -> Request:
        return self._samples[sequence.request_id][sequence.index]

    def add(self, samples: list[Request]) -> None:
        request_id, deadline = samples[0].sequence.request_id, samples[0].deadline
        self._samples[request_id] = samples
        if deadline is not None:
            self._deadlines.add((deadline, request_id))

    def remove(self, request_id: str) -> list[Request]:
        samples = self._samples.pop(request_id)
        if samples[0].deadline is not None:
            self._deadlines.discard((samples[0].deadline, request_id))
        return samples

    def clear(self) -> None:
        self._samples.clear()
        self._deadlines.clear()

    def first_overdue(self, now: float) -> list[Request] | None:
        """A request whose time is up; None if there is none."""
        if self._deadlines and self._deadlines[0][0] <= now:
            return self._samples[self._deadlines[0][1]]
        return None

    def mend(self) -> None:
        """Make the deadlines those of the samples again, after a change that was cut short."""
        deadlines = [(samples[0].deadline, request_id) for request_id, samples in self._samples.items()]
        self._deadlines = SortedList(entry for entry in deadlines if entry[0] is not None)
