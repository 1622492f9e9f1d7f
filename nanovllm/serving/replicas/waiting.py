"""Requests of a pool without a replica: all of them while none is up, and suspects, which may kill replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from nanovllm.serving.replicas.pool_request import PoolRequest


def may_have_run(requests: Iterable[PoolRequest], max_num_seqs: int, *, ages: bool) -> list[PoolRequest]:
    """Requests of a dead replica that its scheduler may have run; it had not reached the rest of its queue.

    Args:
        ages: True if priorities age. Then, or with several clients, the order of the queue is unknown here.
    """
    ordered = sorted(requests, key=lambda request: (request.new.priority, request.placement))
    if ages or len({request.new.client for request in ordered}) > 1:
        return ordered
    found = []
    num_samples = 0
    for request in ordered:
        if num_samples >= max_num_seqs:
            break
        found.append(request)
        num_samples += request.new.params.n
    return found


class WaitingRequests:
    """Admits requests to replicas, suspects one at a time.

    A request that kills its replica makes all requests that ran with it suspects. Before its last permitted death each
    is tried without the other suspects, so that a harmless one never fails for another's fault.
    """

    def __init__(self) -> None:
        self._requests: deque[PoolRequest] = deque()
        self._on_trial: PoolRequest | None = None

    def admit(self, requests: Iterable[PoolRequest], *, has_replica: bool) -> list[PoolRequest]:
        """Select the waiting and given requests that may be placed now; the rest wait."""
        candidates = list(requests)
        if self._on_trial in candidates:  # its replica has died for another reason
            self._on_trial = None
        if has_replica and self._is_trial_over:
            candidates[:0] = self._requests
            self._requests.clear()
        admitted = []
        for request in candidates:
            if not has_replica or (request.is_suspect and not self._is_trial_over):
                self._requests.append(request)
                continue
            if request.is_suspect:
                self._on_trial = request
                request.has_begun = False
            admitted.append(request)
        return admitted

    @property
    def may_admit(self) -> bool:
        return bool(self._requests) and self._is_trial_over

    @property
    def _is_trial_over(self) -> bool:
        request = self._on_trial
        if request is not None and (request.is_ended or request.has_begun or not request.is_suspect):
            self._on_trial = request = None
        return request is None

    def discard(self, request: PoolRequest) -> None:
        if request in self._requests:
            self._requests.remove(request)

    def clear(self) -> None:
        self._requests.clear()
        self._on_trial = None
