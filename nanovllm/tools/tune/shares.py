"""Shares of a workload: fewer requests with the load pattern of the whole."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

from nanovllm.tools.workloads.workloads import TimedRequest, Workload

FEWEST = 8  # minimum number of requests of a share that arrive over time, for meaningful tails


def take_share(workload: Workload, share: float) -> Workload:
    """Return a share of a workload's requests.

    Requests that arrive over time: the first ones. Groups that arrive together: the first part of each group, so that
    long prompts still meet decodes. Requests with `after` stay with the request they follow.
    """
    if share >= 1.0:
        return workload
    kept: dict[int, int] = {}  # index in the workload -> index in the share
    roots = _groups(workload)
    if workload.is_spread:
        roots = [[index for group in roots for index in group]]
    chosen = {index for group in roots for index in group[: math.ceil(share * len(group))]}
    requests: list[TimedRequest] = []
    for index, request in enumerate(workload.requests):
        if index in chosen or request.after in kept:
            kept[index] = len(requests)
            requests.append(replace(request, after=None if request.after is None else kept[request.after]))
    return replace(workload, requests=requests, parameters={**workload.parameters, "share": share})


def smallest_share(workload: Workload, max_num_seqs: int) -> float:
    """Return the smallest meaningful share: requests that arrive together must be able to fill `max_num_seqs`."""
    groups = _groups(workload)
    if workload.is_spread:
        return min(1.0, FEWEST / sum(map(len, groups)))
    return min(1.0, max_num_seqs / max(map(len, groups)))


def _groups(workload: Workload) -> list[list[int]]:
    """Group the indices of requests without `after` by arrival time."""
    groups: defaultdict[float, list[int]] = defaultdict(list)
    for index, request in enumerate(workload.requests):
        if request.after is None:
            groups[request.arrival].append(index)
    return list(groups.values())
