"""NUMA placement: keeps an engine's threads and memory on one node, and each replica's on one.

Remote memory is slower to read, and barriers across nodes take longer. Memory is allocated on the node of the thread
that touches it first, so it follows the placement of threads. The user's own choice wins: an affinity, a memory policy,
OpenMP's variables, or more threads than a node has cores.
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
# Any of these variables means that the user places threads.
PLACING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclass(frozen=True, slots=True)
class Node:
    """Cores and free memory, in bytes, of a node with memory."""

    number: int
    cores: frozenset[int]
    free_bytes: int


def read_nodes(root: Path = NODES) -> list[Node]:
    """Nodes with cores and memory, in order of their number; empty if the system does not report them."""
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
    """Parse a list such as "0-3,8,10-11"."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def split_cores(cores: Collection[int], count: int, nodes: Sequence[Node]) -> list[list[int]]:
    """Cores for each of `count` processes (at most the number of cores), within nodes as far as possible.

    Each node gets a number of processes in proportion to its cores, and divides its cores among them. If a node would
    get none, or there is only one node, cores are divided in order.
    """
    groups = [sorted(node.cores & set(cores)) for node in nodes]
    groups = [group for group in groups if group]
    ordered = sorted(cores)
    if len(groups) < 2 or count < len(groups) or sum(map(len, groups)) < len(ordered):
        return _divided(ordered, count)
    numbers = [1] * len(groups)
    while sum(numbers) < count:  # the next process goes to the node with the most cores per process
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
    """The node for an engine's process; None for no restriction.

    Among the nodes with the most cores, the one with the most free memory. None if a node has less than half of the
    cores, as in a socket split into several nodes: too many cores would idle.

    Args:
        affinity: cores on which the process may run.
        num_cores: cores of the machine; a smaller affinity is the user's choice.
    """
    if len(nodes) < 2 or len(affinity) < num_cores or any(environment.get(name) for name in PLACING):
        return None
    node = max(nodes, key=lambda node: (len(node.cores), node.free_bytes))
    if 2 * len(node.cores) < len(affinity):
        return None
    threads = openmp_threads(environment)
    return None if threads is not None and threads > len(node.cores) else node


def openmp_threads(environment: Mapping[str, str]) -> int | None:
    """Number of threads in OMP_NUM_THREADS; None if it is unset or invalid, which OpenMP ignores with a warning.

    The first number of a list such as "4,2" counts; further ones apply to nested parallel regions.
    """
    numbers = [number.strip(" \t\n\r\f\v") for number in environment.get("OMP_NUM_THREADS", "").split(",")]
    if not all(re.fullmatch(r"\+?[0-9]+", number) and int(number) > 0 for number in numbers):
        return None
    return int(numbers[0])


def place_engine(options: Mapping[str, Any]) -> None:
    """Keep this process on one node if it runs a single CPU engine; call it before PyTorch is imported.

    Only for processes that exist to run an engine, such as the command's; a library must not place its caller's.

    Args:
        options: the given engine options.
    """
    if options.get("data_parallel_size", 1) > 1 or options.get("tensor_parallel_size", 1) > 1:
        return
    device = options.get("device", "auto")
    if device == "cpu" or (device == "auto" and not any(path.exists() for path in GPUS)):
        stay_on_one_node()


def usable_nodes(nodes: Sequence[Node], affinity: Collection[int], process: Path = PROCESS) -> list[Node]:
    """Nodes with memory allowed to this process, each with its allowed cores.

    A container may be excluded from nodes that the system's folders list.
    """
    status = _read(process / "status").partition("Mems_allowed_list:")[2]
    allowed = parse_cores(status.splitlines()[0]) if status else {node.number for node in nodes}
    found = [replace(node, cores=node.cores & set(affinity)) for node in nodes if node.number in allowed]
    return [node for node in found if node.cores]


def has_memory_policy(process: Path = PROCESS) -> bool:
    """Whether a memory policy is set for this process, as by `numactl --interleave=all`."""
    words = _read(process / "numa_maps", lines=1).split()
    return len(words) > 1 and words[1] != "default"


def _read(path: Path, *, lines: int | None = None) -> str:
    """Text of a file, or its first lines; empty if there is no such file."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return "".join(islice(file, lines))
    except OSError:
        return ""


def stay_on_one_node(root: Path = NODES, process: Path = PROCESS) -> None:
    """Keep this process on one node; call it before importing PyTorch, which sets its threads by the visible cores."""
    if not hasattr(os, "sched_setaffinity"):
        return
    affinity = os.sched_getaffinity(0)
    nodes = usable_nodes(read_nodes(root), affinity, process)
    node = node_for_one(nodes, affinity, os.cpu_count() or 1, os.environ)
    if node is None or has_memory_policy(process):
        return
    try:
        os.sched_setaffinity(0, node.cores)
    except OSError as error:  # forbidden in some sandboxes
        logger.debug("the engine is not kept on a NUMA node: %s", error)
        return
    logger.warning(
        "the engine stays on NUMA node %d of %d, %d cores: data_parallel_size=%d uses all nodes, a replica on each",
        node.number, len(nodes), len(node.cores), len(nodes),
    )  # fmt: skip
