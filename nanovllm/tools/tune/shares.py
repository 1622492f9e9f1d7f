"""Smaller shares of a workload, which load an engine as the whole does, for less long."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

from nanovllm.tools.workloads.workloads import TimedRequest, Workload

MAX_GROUPS = 4  # with more times of arrival a workload counts as spread over time
FEWEST = 8  # requests of a share that arrive over time; the tails of fewer say nothing


def share_of(workload: Workload, share: float) -> Workload:
    """A workload cut to a share of its requests.

    Of requests that arrive over time these are the first. Of groups that arrive together it is the first part of each
    group, so that whales stay among those that decode. Who waits for another's end comes along with it.
    """
    if share >= 1.0:
        return workload
    kept: dict[int, int] = {}  # by place in the workload: place in the share
    roots = _groups(workload)
    if len(roots) > MAX_GROUPS:
        roots = [[place for group in roots for place in group]]
    chosen = {place for group in roots for place in group[: math.ceil(share * len(group))]}
    requests: list[TimedRequest] = []
    for place, request in enumerate(workload.requests):
        if place in chosen or request.after in kept:
            kept[place] = len(requests)
            requests.append(replace(request, after=None if request.after is None else kept[request.after]))
    return Workload(workload.name, requests, {**workload.parameters, "share": share})


def smallest_share(workload: Workload, max_num_seqs: int) -> float:
    """Below it a share tells nothing: requests that are all there at once must be able to fill `max_num_seqs`."""
    groups = _groups(workload)
    if len(groups) > MAX_GROUPS:
        return min(1.0, FEWEST / sum(map(len, groups)))
    return min(1.0, max_num_seqs / max(map(len, groups)))


def _groups(workload: Workload) -> list[list[int]]:
    """Places of the requests that wait for no other, by time of arrival."""
    groups: defaultdict[float, list[int]] = defaultdict(list)
    for place, request in enumerate(workload.requests):
        if request.after is None:
            groups[request.arrival].append(place)
    return list(groups.values())
