"""Two ranks with tiers: each keeps its part of every block, and a block of files is a hit only with all parts."""

import itertools
from typing import Any

import pytest
import torch.distributed as dist

from nanovllm import LLM
from nanovllm.cli.main import main
from nanovllm.errors import DeviceError
from nanovllm.fast.gpu.rank_runner import RankRunner
from nanovllm.features.ranks.rank_calls import key_of
from nanovllm.features.tiers import prefix_tiers, rank_tiers
from nanovllm.features.tiers.rank_tiers import RankOrders
from tests.support.llms import OPTIONS, check_engine, generate, token_ids
from tests.support.prefixes import OTHERS, PROMPTS, cached

pytestmark = pytest.mark.usefixtures("programs_are_forked")

HOST = {"prefix_cache_host_bytes": 2**26, "num_kv_blocks": 40}
TWO = OPTIONS | {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def expected(folder):
    """Tokens of one rank."""
    with LLM(folder, **OPTIONS) as llm:
        return token_ids(generate(llm, PROMPTS))


def answers(llm):
    """Tokens and numbers of cached tokens."""
    outputs = generate(llm, PROMPTS, priority=[0, 1])
    check_engine(llm)
    llm._engine.tiers.books.check()
    return token_ids(outputs), cached(outputs)


def run_in(folder, directory, **options):
    """Answers of a new engine with files, and its statistics of tiers."""
    with LLM(folder, prefix_cache_dir=str(directory), **(TWO | options)) as llm:
        return *answers(llm), llm.stats().tiers


@pytest.mark.costly
@pytest.mark.parametrize("overlap", [False, True])
def test_evicted_prefixes_come_back_from_the_memory_of_each_rank(folder, expected, overlap):
    with LLM(folder, **(TWO | HOST), overlap=overlap) as llm:
        assert answers(llm)[0] == expected
        generate(llm, OTHERS)
        again, cached = answers(llm)
        assert again == expected
        assert llm.stats().tiers.num_loaded_blocks > 0 and min(cached) >= 64


def test_ranks_store_in_idle_time_what_then_comes_back(folder, expected):
    with LLM(folder, **(TWO | HOST)) as llm:
        tiers = llm._engine.tiers
        assert answers(llm)[0] == expected
        while tiers.save_idle():
            pass
        assert llm.stats().tiers.num_stored_blocks >= 4
        for pool in tiers.manager.pools:
            for block in list(pool.free_blocks):
                pool.forget_block(block)
        assert answers(llm) == (expected, [64, 64])


@pytest.mark.full
def test_a_new_process_begins_with_the_files_of_both_ranks(folder, expected, tmp_path):
    assert run_in(folder, tmp_path)[:2] == (expected, [0, 64])
    names = {path.parent.name for path in tmp_path.glob("*/*.kv")}
    assert names == {"rank-0-of-2", "rank-1-of-2"}
    tokens, cached, stats = run_in(folder, tmp_path)
    assert (tokens, cached) == (expected, [64, 64]) and stats.num_read_blocks == 4
    one_rank = {"tensor_parallel_size": 1}
    assert run_in(folder, tmp_path, **one_rank)[:2] == (expected, [0, 64])  # another layout
    assert run_in(folder, tmp_path, **one_rank)[:2] == (expected, [64, 64])
    assert run_in(folder, tmp_path)[:2] == (expected, [64, 64])


@pytest.mark.full
def test_files_written_in_idle_time_have_all_parts(folder, expected, tmp_path):
    with LLM(folder, prefix_cache_dir=str(tmp_path / "kept"), **TWO) as llm:
        assert answers(llm)[0] == expected
        while llm._engine.tiers.save_idle():
            pass
        assert llm.stats().tiers.num_written_blocks == 4
        with LLM(folder, prefix_cache_dir=str(tmp_path / "kept"), **TWO) as other:
            assert answers(other) == (expected, [64, 64])
            assert not other._engine.tiers.directory.is_writer
    assert run_in(folder, tmp_path / "kept")[:2] == (expected, [64, 64])


@pytest.mark.full
@pytest.mark.parametrize("harm", ["removed", "damaged", "cut"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_one_rank_lacks_is_a_miss_on_all(harm, rank, folder, expected, tmp_path):
    run_in(folder, tmp_path)
    for path in (tmp_path / f"rank-{rank}-of-2").glob("*.kv"):
        data = path.read_bytes()
        if harm == "removed":
            path.unlink()
            path.with_suffix(".index").unlink()
        else:
            half = len(data) // 8
            path.write_bytes(data[:half] if harm == "cut" else data[:half] + bytes(len(data) - half))
    tokens, cached, _ = run_in(folder, tmp_path)
    assert tokens == expected and cached[0] < 64
    assert run_in(folder, tmp_path)[0] == expected


def test_the_command_lists_verifies_and_clears_the_files_of_ranks(folder, tmp_path, capsys):
    run_in(folder, tmp_path)
    assert main(["cache", "list", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "rank-0-of-2/1" in out and "rank-1-of-2/1" in out
    segment = next((tmp_path / "rank-1-of-2").glob("*.kv"))
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    assert main(["cache", "verify", str(tmp_path)]) == 1
    assert main(["cache", "clear", str(tmp_path)]) == 0
    assert not [*tmp_path.glob("*/*.kv"), *tmp_path.glob("*/*.index")]


# ------------------------------------------------------------------------------------------------------------- answers


class Others:
    """Stands for worker processes and ranks: notes orders, and answers those in `answers`."""

    size = 3

    def __init__(self, answers=None, *, is_gone=False):
        self.store, self.sent = dist.HashStore(), list[Any]()
        self._answers, self._is_gone, self._numbers = answers or {}, is_gone, itertools.count()

    def send(self, kind, order, payload):
        self.sent.append((kind, order, payload))
        if order in self._answers:
            for rank, answer in enumerate(self._answers[order], 1):
                self.store.set(key_of(f"tiers {payload[0]}", rank), answer)

    def check(self):
        if self._is_gone:
            raise DeviceError("a rank is gone")


def test_a_block_is_right_if_it_is_on_every_rank():
    others = Others({"read": ("110", "101")})
    orders = RankOrders(others, others)
    number = orders.read([])
    assert orders.all_right(number, [True, True, True]) == [True, False, False]
    assert orders.all_right(orders.read([]), [False, True, True]) == [False, False, False]
    assert others.store.num_keys() <= 1, "answers are taken out"


def test_tiers_that_cannot_be_opened_end_the_ranks_in_order(folder, monkeypatch):
    closed = []

    def fail(*_):
        raise ValueError("the machine cannot pin so much memory")

    monkeypatch.setattr(prefix_tiers, "open_tiers", fail)
    monkeypatch.setattr(RankRunner, "close", lambda self, close=RankRunner.close: closed.append(close(self)))
    with pytest.raises(ValueError, match="cannot pin"):
        LLM(folder, **(TWO | HOST))
    assert closed == [None]


def test_a_rank_that_is_stuck_is_not_waited_for_at_the_end(monkeypatch):
    monkeypatch.setattr(rank_tiers, "ANSWER_SECONDS", 0.01)
    others = Others({"answer": ("",)})  # of two
    orders = RankOrders(others, others)
    number = orders.read([])
    assert not orders.begin_close()
    with pytest.raises(TimeoutError):
        orders.all_right(number, [])


def test_a_rank_that_is_gone_ends_every_wait():
    others = Others(is_gone=True)
    orders = RankOrders(others, others)
    with pytest.raises(DeviceError):
        orders.all_right(orders.read([]), [])
    assert not orders.begin_close()
    orders.finish(60.0)
