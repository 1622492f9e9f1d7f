"""Cores by NUMA node: read from the system's folders, shared among replicas, and an engine's own node."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm.fast.host import numa
from nanovllm.fast.host.numa import Node, node_for_one, parse_cores, read_nodes, split_cores, stay_on_one_node
from nanovllm.features.engine_config import EngineConfig
from nanovllm.serving.replicas import opening


def write_nodes(root: Path, cpulists: list[str], *, free: list[int] | None = None, total: int = 1024) -> Path:
    """A folder as /sys/devices/system/node, with kilobytes of memory."""
    for number, cpulist in enumerate(cpulists):
        folder = root / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpulist}\n")
        lines = [f"Node {number} MemTotal:  {total} kB", f"Node {number} MemFree: {(free or [9] * 99)[number]} kB"]
        (folder / "meminfo").write_text("\n".join(lines) + "\n")
    (root / "possible").write_text("0-1\n")
    return root


def two_nodes(cores_each: int = 4) -> list[Node]:
    return [
        Node(number, frozenset(range(number * cores_each, (number + 1) * cores_each)), 2**30) for number in range(2)
    ]


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5", {5}), ("", set()), ("\n", set())]
)
def test_a_list_of_cores_is_read(text, cores):
    assert parse_cores(text) == cores


def test_nodes_are_read_by_number_and_those_without_cores_or_memory_left_out(tmp_path):
    root = write_nodes(tmp_path / "many", [f"{n}" for n in range(11)])
    assert [node.number for node in read_nodes(root)] == list(range(11))  # not 0, 1, 10, 2
    assert [node.cores for node in read_nodes(write_nodes(tmp_path / "far", ["0-1", ""]))] == [{0, 1}]
    assert read_nodes(write_nodes(tmp_path / "dry", ["0-1"], total=0)) == []
    assert read_nodes(tmp_path / "missing") == []


def test_a_folder_that_cannot_be_understood_is_one_node(tmp_path):
    root = write_nodes(tmp_path, ["0-1", "2-3"])
    (root / "node1" / "cpulist").write_text("some\n")
    assert read_nodes(root) == []


def test_replicas_divide_the_cores_of_nodes(tmp_path):
    # As on most servers: the second threads of node 0's cores are numbered behind node 1's cores.
    nodes = read_nodes(write_nodes(tmp_path, ["0-3,8-11", "4-7,12-15"]))
    assert split_cores(range(16), 2, nodes) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert split_cores(range(16), 4, nodes) == [[0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7], [12, 13, 14, 15]]
    assert sorted(map(len, split_cores(range(16), 3, nodes))) == [4, 4, 8]
    assert split_cores(range(16), 1, nodes) == [list(range(16))]
    assert split_cores(range(16), 2, []) == [list(range(8)), list(range(8, 16))]


@pytest.mark.parametrize("count", range(1, 11))
@pytest.mark.parametrize("sizes", [(5, 5), (8, 2), (1, 9), (4, 3, 3)])
def test_shares_are_whole_disjoint_and_within_nodes_where_they_can_be(sizes, count):
    nodes, first = [], 0
    for number, size in enumerate(sizes):
        nodes.append(Node(number, frozenset(range(first, first + size)), 1))
        first += size
    shares = split_cores(range(10), count, nodes)
    assert len(shares) == count and all(shares)
    assert sorted(core for share in shares for core in share) == list(range(10))
    if count >= len(sizes):
        assert all(any(set(share) <= node.cores for node in nodes) for share in shares)


def test_replicas_take_nodes_of_those_cores_alone_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(opening.os, "sched_getaffinity", lambda _: {0, 1, 4, 5, 6, 7})
    monkeypatch.setattr(opening, "read_nodes", two_nodes)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    shares = opening.split_host(EngineConfig(data_parallel_size=2, device="cpu"))
    assert [share.cores for share in shares] == [{0, 1}, {4, 5, 6, 7}]
    assert [share.environment["OMP_NUM_THREADS"] for share in shares] == ["2", "4"]


@pytest.mark.parametrize(
    ("value", "threads"),
    [
        ("4,2", 4),
        (" 2 , 8\n", 2),
        ("+3", 3),
        ("9,1,1", 9),
        *((text, None) for text in ("", "0", "-4", "four", "4,", ",4", "4,0", "4 2", "1_0", "²")),
    ],
)
def test_the_number_of_threads_is_read_as_openmp_does(monkeypatch, value, threads):
    """What libgomp refuses, it warns of and ignores; each replica has four cores here."""
    assert numa.openmp_threads({"OMP_NUM_THREADS": value}) == threads
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(opening, "read_nodes", list)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    shares = opening.split_host(EngineConfig(data_parallel_size=2, device="cpu"))
    expected = str(min(threads or 4, 4))
    assert [share.environment["OMP_NUM_THREADS"] for share in shares] == [expected, expected]


def test_one_engine_takes_the_node_with_the_most_free_memory():
    first, second = two_nodes()
    fuller = Node(1, second.cores, 2**31)
    assert node_for_one([first, fuller], range(8), 8, {}) is fuller
    assert node_for_one([first], range(4), 4, {}) is None
    assert node_for_one([], range(4), 4, {}) is None


def test_one_engine_takes_no_node_with_less_than_half_the_cores():
    quarters = [Node(number, frozenset(range(2 * number, 2 * number + 2)), 2**30) for number in range(4)]
    assert node_for_one(quarters, range(8), 8, {}) is None
    assert node_for_one(quarters[:2], range(4), 4, {}) is quarters[0]


@pytest.mark.parametrize("variable", numa.PLACING)
def test_who_places_threads_himself_is_left_alone(variable):
    nodes = two_nodes()
    assert node_for_one(nodes, range(8), 8, {variable: "close"}) is None
    assert node_for_one(nodes, range(6), 8, {}) is None  # an affinity, as by taskset or numactl
    assert node_for_one(nodes, range(8), 8, {"OMP_NUM_THREADS": "6"}) is None
    assert node_for_one(nodes, range(8), 8, {"OMP_NUM_THREADS": "6,2"}) is None
    assert node_for_one(nodes, range(8), 8, {"OMP_NUM_THREADS": "4"}) is nodes[0]


def test_the_process_stays_there_and_says_so(monkeypatch, tmp_path, caplog):
    set_to = []
    monkeypatch.setattr(numa.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(numa.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(numa.os, "sched_setaffinity", lambda _, cores: set_to.append(cores))
    for name in (*numa.PLACING, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.WARNING, logger="nanovllm"):
        process = write_process(tmp_path / "self")
        stay_on_one_node(write_nodes(tmp_path / "two", ["0-3", "4-7"], free=[5, 500]), process)
        stay_on_one_node(write_nodes(tmp_path / "one", ["0-7"]), process)
    assert set_to == [{4, 5, 6, 7}]
    assert [record.message for record in caplog.records] == [
        "the engine stays on NUMA node 1 of 2, 4 cores: data_parallel_size=2 uses all nodes, a replica on each"
    ]


def write_process(folder: Path, mems: str = "0-1", policy: str = "default") -> Path:
    """A folder as /proc/self."""
    folder.mkdir(parents=True)
    (folder / "status").write_text(f"Name:\tpython\nMems_allowed_list:\t{mems}\nvoluntary_ctxt_switches:\t1\n")
    (folder / "numa_maps").write_text(f"5586e5255000 {policy} file=/usr/bin/python3 mapped=2\n5586 default anon=1\n")
    return folder


@pytest.mark.parametrize(
    ("cores", "process", "expected"),
    [
        (range(8), {}, {4, 5, 6, 7}),
        (range(8), {"mems": "0"}, None),  # a container with the cores of both, and the memory of one
        (range(4), {}, None),  # a container that shows its own cores as the machine's, and all nodes
        ([0, 1, 4, 5, 6], {}, {4, 5, 6}),
        (range(8), {"policy": "interleave:0-1"}, None),
        (range(8), {"policy": "bind:0"}, None),
    ],
)
def test_a_node_is_left_out_where_it_may_not_be_used(monkeypatch, tmp_path, cores, process, expected):
    set_to = []
    monkeypatch.setattr(numa.os, "sched_getaffinity", lambda _: set(cores))
    monkeypatch.setattr(numa.os, "cpu_count", lambda: len(cores))
    monkeypatch.setattr(numa.os, "sched_setaffinity", lambda _, given: set_to.append(given))
    for name in (*numa.PLACING, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    root = write_nodes(tmp_path / "nodes", ["0-3", "4-7"], free=[5, 500])
    stay_on_one_node(root, write_process(tmp_path / "self", **process))
    assert set_to == ([] if expected is None else [expected])


def test_a_process_that_may_not_move_starts_all_the_same(monkeypatch, tmp_path, caplog):
    def refuse(_, cores):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(numa.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(numa.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(numa.os, "sched_setaffinity", refuse)
    for name in (*numa.PLACING, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    stay_on_one_node(write_nodes(tmp_path / "nodes", ["0-3", "4-7"]), write_process(tmp_path / "self"))
    assert not caplog.records  # nothing claims that it stays


@pytest.mark.skipif(not (numa.PROCESS / "numa_maps").exists(), reason="the system tells no policy for memory")
def test_a_policy_for_memory_is_seen_by_the_process_itself():
    """As numactl sets it; one node is enough."""
    script = (
        "import ctypes, platform\nfrom nanovllm.fast.host.numa import has_memory_policy\nprint(has_memory_policy())\n"
        "number = {'x86_64': 238, 'aarch64': 237}[platform.machine()]\nmask = ctypes.c_ulong(1)\n"
        "is_refused = ctypes.CDLL(None).syscall(number, 3, ctypes.byref(mask), 64)\n"
        "print('refused' if is_refused else has_memory_policy())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    if after == "refused":  # as containers do by default
        pytest.skip("a process may not set a policy for memory here")
    assert (before, after) == ("False", "True")


@pytest.mark.parametrize(
    ("options", "has_gpu", "stays"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"device": "cpu"}, True, True),
        ({"device": "cuda"}, False, False),
        ({"data_parallel_size": 2}, False, False),  # a replica on each
        ({"tensor_parallel_size": 2, "device": "cpu"}, False, False),
    ],
)
def test_only_an_engine_that_is_alone_on_the_cpu_stays_on_a_node(monkeypatch, tmp_path, options, has_gpu, stays):
    calls: list[None] = []
    monkeypatch.setattr(numa, "stay_on_one_node", lambda: calls.append(None))
    monkeypatch.setattr(numa, "GPUS", (tmp_path if has_gpu else tmp_path / "none",))
    numa.place_engine(options)
    assert len(calls) == stays


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to leave one")
def test_threads_of_pytorch_follow_the_node(tmp_path):
    """In a process of its own, over a folder that puts each core on a node of its own."""
    cores = sorted(os.sched_getaffinity(0))
    root = write_nodes(tmp_path / "nodes", [str(core) for core in cores])
    process = write_process(tmp_path / "self", f"0-{len(cores)}")
    script = (
        f"import os\nfrom pathlib import Path\nos.cpu_count = lambda: {len(cores)}\n"
        "from nanovllm.fast.host.numa import stay_on_one_node\n"
        f"stay_on_one_node(Path({str(root)!r}), Path({str(process)!r}))\nimport torch\n"
        "print(torch.get_num_threads(), len(os.sched_getaffinity(0)))"
    )
    environment = {name: value for name, value in os.environ.items() if name not in (*numa.PLACING, "OMP_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]
