"""Cores by NUMA node: an engine's threads and its memory stay on one node, those of replicas on one each.

Another node's memory is slower to read, and barriers across nodes take longer. Memory lies on the node of the thread
that touches it first, so it follows from where threads run. What the user chose is left alone: an affinity, a policy
for memory, OpenMP's own variables, or more threads than a node has cores.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

logger = logging.getLogger("nanovllm")

NODES = Path("/sys/devices/system/node")
PROCESS = Path("/proc/self")
GPUS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
# Any of these says that the user places threads.
PLACING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclass(frozen=True, slots=True)
class Node:
    """Cores of a node that has memory of its own, and its free memory in bytes."""

    number: int
    cores: frozenset[int]
    free_bytes: int


def read_nodes(root: Path = NODES) -> list[Node]:
    """The nodes with cores and memory, by number; none where the system does not tell."""
    nodes = []
    try:
        for folder in sorted(root.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:])):
            cores = parse_cores((folder / "cpulist").read_text(encoding="ascii"))
            lines = (folder / "meminfo").read_text(encoding="ascii").splitlines()
            kilobytes = {line.split()[2].rstrip(":"): int(line.split()[3]) for line in lines if line.startswith("Node")}
            if cores and kilobytes.get("MemTotal", 0):
                nodes.append(Node(int(folder.name[4:]), cores, kilobytes.get("MemFree", 0) * 1024))
    except (OSError, ValueError, IndexError):
        return []
    return nodes


def parse_cores(text: str) -> frozenset[int]:
    """The numbers of a list such as "0-3,8,10-11"."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def split_cores(cores: Collection[int], count: int, nodes: Sequence[Node]) -> list[list[int]]:
    """Cores for each of `count` processes, as many as possible within a node; `count` is at most the number of cores.

    Each node takes as many processes as its share of the cores says, and divides its cores among them. Where some node
    would get none, or there is but one, cores are divided in their order.
    """
    groups = [sorted(node.cores & set(cores)) for node in nodes]
    groups = [group for group in groups if group]
    ordered = sorted(cores)
    if len(groups) < 2 or count < len(groups) or sum(map(len, groups)) < len(ordered):
        return _divided(ordered, count)
    numbers = [1] * len(groups)
    while sum(numbers) < count:  # the next goes where each process has most cores
        fullest = max(range(len(groups)), key=lambda index: len(groups[index]) / (numbers[index] + 1))
        numbers[fullest] += 1
    if any(number > len(group) for number, group in zip(numbers, groups, strict=True)):
        return _divided(ordered, count)
    return [share for number, group in zip(numbers, groups, strict=True) for share in _divided(group, number)]


def _divided(cores: Sequence[int], count: int) -> list[list[int]]:
    return [list(cores[index * len(cores) // count : (index + 1) * len(cores) // count]) for index in range(count)]


def node_for_one(
    nodes: Sequence[Node], affinity: Collection[int], num_cores: int, environment: Mapping[str, str]
) -> Node | None:
    """The node that an engine's process should stay on; None to leave it where it is.

    Of the nodes with the most cores it is that with the most free memory. Of nodes with less than half the cores each,
    as where one socket is split into several, one would leave too many cores idle.

    Args:
        affinity: cores on which the process may run.
        num_cores: of the machine; fewer in `affinity` are the user's choice.
    """
    if len(nodes) < 2 or len(affinity) < num_cores or any(environment.get(name) for name in PLACING):
        return None
    node = max(nodes, key=lambda node: (len(node.cores), node.free_bytes))
    if 2 * len(node.cores) < len(affinity):
        return None
    threads = openmp_threads(environment)
    return None if threads is not None and threads > len(node.cores) else node


def openmp_threads(environment: Mapping[str, str]) -> int | None:
    """The threads that OMP_NUM_THREADS asks for; None if it is not set, or if OpenMP warns of the value and ignores it.

    The first number of a list such as "4,2" counts: those behind it are of nested parallel regions.
    """
    numbers = [number.strip(" \t\n\r\f\v") for number in environment.get("OMP_NUM_THREADS", "").split(",")]
    if not all(re.fullmatch(r"\+?[0-9]+", number) and int(number) > 0 for number in numbers):
        return None
    return int(numbers[0])


def place_engine(options: Mapping[str, Any]) -> None:
    """Keep this process on one node if its engine computes on the CPU, alone; before PyTorch is imported.

    For processes that exist to run an engine, as the command's: in others a library has no business to do this.

    Args:
        options: of the engine, as far as they were given.
    """
    if options.get("data_parallel_size", 1) > 1 or options.get("tensor_parallel_size", 1) > 1:
        return
    device = options.get("device", "auto")
    if device == "cpu" or (device == "auto" and not any(path.exists() for path in GPUS)):
        stay_on_one_node()


def usable_nodes(nodes: Sequence[Node], affinity: Collection[int], process: Path = PROCESS) -> list[Node]:
    """The nodes whose memory this process may have, each with the cores that it may use.

    A container may be kept from some, though the system's folders show them all.
    """
    status = _read(process / "status").partition("Mems_allowed_list:")[2]
    allowed = parse_cores(status.splitlines()[0]) if status else {node.number for node in nodes}
    found = [replace(node, cores=node.cores & set(affinity)) for node in nodes if node.number in allowed]
    return [node for node in found if node.cores]


def has_memory_policy(process: Path = PROCESS) -> bool:
    """Whether somebody chose where this process gets memory, as by `numactl --interleave=all`."""
    words = _read(process / "numa_maps", lines=1).split()
    return len(words) > 1 and words[1] != "default"


def _read(path: Path, *, lines: int | None = None) -> str:
    """The text of a file, or its first lines; empty where there is none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return "".join(islice(file, lines))
    except OSError:
        return ""


def stay_on_one_node(root: Path = NODES, process: Path = PROCESS) -> None:
    """Keep this process on one node; before PyTorch is imported, which counts its threads by the cores that it sees."""
    if not hasattr(os, "sched_setaffinity"):
        return
    affinity = os.sched_getaffinity(0)
    nodes = usable_nodes(read_nodes(root), affinity, process)
    node = node_for_one(nodes, affinity, os.cpu_count() or 1, os.environ)
    if node is None or has_memory_policy(process):
        return
    try:
        os.sched_setaffinity(0, node.cores)
    except OSError as error:  # a sandbox may forbid it
        logger.debug("the engine is not kept on a NUMA node: %s", error)
        return
    logger.warning(
        "the engine stays on NUMA node %d of %d, %d cores: data_parallel_size=%d uses all nodes, a replica on each",
        node.number, len(nodes), len(node.cores), len(nodes),
    )  # fmt: skip
