"""The cores of a host without GPUs, shared among replicas."""

import os

import pytest

from nanovllm.features.engine_config import EngineConfig
from nanovllm.serving.replicas import opening


def shares(count, cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    split = opening.split_host(EngineConfig(data_parallel_size=count, device="cpu"))
    assert [int(share.environment["OMP_NUM_THREADS"]) for share in split] == [len(share.cores) for share in split]
    return [set(share.cores) for share in split]


def test_a_share_lies_on_as_few_nodes_as_it_can(tmp_path, monkeypatch):
    """As on most servers: the second threads of node 0's cores are numbered behind node 1's cores."""
    monkeypatch.setattr(opening, "CPUS", tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for core in range(16):
        (tmp_path / f"cpu{core}" / f"node{core // 4 % 2}").mkdir(parents=True)
    first, second = {0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}
    assert shares(1, first | second, monkeypatch) == [first | second]
    assert shares(2, first | second, monkeypatch) == [first, second]
    assert shares(4, first | second, monkeypatch) == [{0, 1, 2, 3}, {8, 9, 10, 11}, {4, 5, 6, 7}, {12, 13, 14, 15}]
    assert shares(2, {0, 1, 5, 8}, monkeypatch) == [{0, 1}, {8, 5}]


@pytest.mark.parametrize("count", range(1, 11))
def test_shares_are_whole_disjoint_and_of_one_size(count, tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "CPUS", tmp_path / "missing")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = shares(count, set(range(10)), monkeypatch)
    assert sorted(core for share in found for core in share) == list(range(10))
    assert {*map(len, found)} <= {10 // count, -(-10 // count)}


@pytest.mark.costly
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
    assert opening.openmp_threads({"OMP_NUM_THREADS": value}) == threads
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    split = opening.split_host(EngineConfig(data_parallel_size=2, device="cpu"))
    expected = str(min(threads or 4, 4))
    assert [share.environment["OMP_NUM_THREADS"] for share in split] == [expected, expected]
