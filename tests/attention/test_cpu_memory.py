"""The KV cache's memory on a CPU, taken in idle time: what it holds stays, and requests come first."""

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from nanovllm.attention import AttentionLayer
from nanovllm.fast.host import memory as host_memory
from nanovllm.fast.host.gc_control import collector_paused
from nanovllm.fast.host.memory import PIECE_BYTES, RESERVE_BYTES, LazyMemory
from nanovllm.kv_cache import KVCaches
from nanovllm.layout import LayerTraits
from tests.support import async_llms
from tests.support.async_llms import comes_true
from tests.support.llms import GREEDY, generate, open_llm, token_ids

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14),
    reason="Linux before 5.14, or another system, cannot take memory without writing to it",
)  # fmt: skip
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_PAGES = SETTING.read_text(encoding="ascii") if SETTING.exists() else "[never]"
NUM_SLOTS = 8192  # of 3 KV heads of 64 values: 12 MiB of K and V a layer in float32, 6 pieces
BLOCKS = {"num_kv_blocks": NUM_SLOTS // 16}
PROMPTS = [[5, 6, 7], [8, 9]]


@contextmanager
def pool(num_layers=2, num_slots=NUM_SLOTS):
    traits = LayerTraits(3, 3, 64, 64)
    layers = [AttentionLayer(nn.Identity(), traits, torch.float32, 1.0) for _ in range(num_layers)]
    caches = KVCaches(layers, torch.device("cpu"))
    caches.memory = LazyMemory()
    caches.allocate(num_slots)
    yield caches
    caches.release()


def resident_bytes(caches):
    """What the system has given of these tensors' memory, in whole pages."""
    count = 0
    for cache in caches:
        pages = (ctypes.c_ubyte * (cache.nbytes // mmap.PAGESIZE))()
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        assert mincore(ctypes.c_void_p(cache.data_ptr()), ctypes.c_size_t(len(pages) * mmap.PAGESIZE), pages) == 0
        count += sum(page & 1 for page in pages)
    return count * mmap.PAGESIZE


def num_bytes(caches):
    return sum(cache.nbytes for cache in caches)


def caches_of(llm):
    return llm._engine.model_runner.binding.caches.of_layers


@pytest.fixture
def idle_at_once(monkeypatch):
    monkeypatch.setattr("nanovllm.serving.streaming.idle_thread.IDLE_SECONDS", 0.01)


def idle_threads():
    return [thread for thread in threading.enumerate() if thread.name == "nanovllm-idle"]


def until(condition):
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_all_memory_is_taken_and_no_content_changes():
    generator = torch.Generator().manual_seed(0)
    with pool() as caches:
        before = [cache[:, 1000:1100].normal_(generator=generator).clone() for cache in caches.of_layers]
        size = num_bytes(caches.of_layers)
        assert resident_bytes(caches.of_layers) < size
        count = sum(1 for _ in iter(caches.memory.take_some_memory, False))
        assert count == size // PIECE_BYTES
        assert resident_bytes(caches.of_layers) == size
        for cache, values in zip(caches.of_layers, before, strict=True):
            assert torch.equal(cache[:, 1000:1100], values)
            assert not cache[:, :1000].any() and not cache[:, 1100:].any()


@pytest.mark.skipif("[always]" in HUGE_PAGES, reason="the system gives huge pages to whoever does not ask for them")
def test_a_first_short_request_takes_no_huge_pages():
    with pool() as caches:
        for cache in caches.of_layers:
            cache[:, :64] = 1.0
        written = sum(cache[:, :64].nbytes for cache in caches.of_layers)
        assert resident_bytes(caches.of_layers) <= written + 4 * mmap.PAGESIZE  # K and V of two layers
        assert all(cache[:, :64].eq(1.0).all() for cache in caches.of_layers)


def test_slots_written_meanwhile_keep_what_was_written():
    with pool(num_layers=4) as caches:
        taker = threading.Thread(target=lambda: sum(1 for _ in iter(caches.memory.take_some_memory, False)))
        taker.start()
        for slot in range(0, NUM_SLOTS, 16):
            for number, cache in enumerate(caches.of_layers):
                cache[:, slot : slot + 16] = slot + number
        taker.join()
        expected = torch.arange(NUM_SLOTS).div(16, rounding_mode="floor") * 16
        for number, cache in enumerate(caches.of_layers):
            assert torch.equal(cache, (expected + number).float().view(1, -1, 1, 1).expand_as(cache))


def test_the_first_blocks_of_all_layers_are_taken_first():
    with pool() as caches:
        for _ in range(4):  # K and V of each of two layers
            assert caches.memory.take_some_memory()
        per_slot = caches.of_layers[0][0, 0].nbytes
        for cache in caches.of_layers:
            for part in cache:
                assert resident_bytes([part[: PIECE_BYTES // per_slot]]) >= PIECE_BYTES - mmap.PAGESIZE


def test_nothing_is_taken_after_the_release_nor_where_memory_is_short(monkeypatch):
    with pool() as caches:
        monkeypatch.setattr(host_memory, "free_memory", lambda: RESERVE_BYTES + PIECE_BYTES - 1)
        assert not caches.memory.take_some_memory() and resident_bytes(caches.of_layers) == 0
        monkeypatch.setattr(host_memory, "free_memory", lambda: RESERVE_BYTES + PIECE_BYTES)
        assert caches.memory.take_some_memory()  # there is room again
    assert not caches.memory.take_some_memory()


def test_a_system_that_refuses_is_asked_once(monkeypatch):
    asked = []
    with pool() as caches:
        monkeypatch.setattr(
            host_memory, "_madvise", lambda: lambda *call: asked.append(call) or ctypes.set_errno(22) or -1
        )
        assert not caches.memory.take_some_memory() and not caches.memory.take_some_memory()
        assert len(asked) == 1 and resident_bytes(caches.of_layers) == 0


def test_the_limit_of_a_container_counts(monkeypatch, tmp_path):
    inner = tmp_path / "pod" / "container"
    inner.mkdir(parents=True)
    for folder, limit in ((inner, "max"), (tmp_path / "pod", "5000000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("3000000\n")
        (folder / "memory.stat").write_text("anon 100\ninactive_file 500000\n")
    monkeypatch.setattr(host_memory, "_groups", lambda: (inner, tmp_path / "pod", tmp_path))
    assert host_memory.free_memory() == 2_500_000


def test_parts_smaller_than_a_page_take_nothing():
    for caches in ([torch.zeros(2, 3)], []):
        memory = LazyMemory()
        memory.begin(caches)
        assert not memory.take_some_memory()


@pytest.mark.usefixtures("idle_at_once")
def test_an_llm_takes_it_between_requests_and_answers_the_same(monkeypatch):
    with open_llm() as plain:
        expected = token_ids(generate(plain, PROMPTS))
    allowed = threading.Event()
    free_memory = host_memory.free_memory
    monkeypatch.setattr(host_memory, "free_memory", lambda: allowed.wait(20.0) and free_memory())
    taken, take = [], LazyMemory.take_some_memory

    def take_and_note(memory):
        if threading.current_thread().name == "nanovllm-idle":
            taken.append(llm_is_busy())
        return take(memory)

    def llm_is_busy():
        return bool(llms and llms[0]._engine.has_unfinished)

    llms = []
    allowed.set()
    monkeypatch.setattr(LazyMemory, "take_some_memory", take_and_note)
    with open_llm(**BLOCKS) as llm:
        allowed.clear()
        llms.append(llm)
        stream = llm.stream([5, 6, 7], GREEDY)
        next(stream)
        asked = len(taken)
        allowed.set()
        assert token_ids(generate(llm, PROMPTS)) == expected
        assert len(taken) <= asked + 1  # at most the piece that was begun before the request
        stream.close()  # the request is aborted
        caches = caches_of(llm)
        until(lambda: resident_bytes(caches) == num_bytes(caches))
        assert not any(taken[asked + 1 :])
        assert token_ids(generate(llm, PROMPTS)) == expected


def test_an_llm_told_to_leave_untouched_memory_alone_takes_what_its_steps_write():
    before = idle_threads()
    with open_llm(kv_cache_touch="none", **BLOCKS) as llm:
        assert {*idle_threads()} <= {*before}  # one of an earlier test may end meanwhile
        assert not llm._engine.use_idle_time(captures=True)
        caches = caches_of(llm)
        untouched = resident_bytes(caches)
        generate(llm, PROMPTS)
        assert untouched < resident_bytes(caches) < num_bytes(caches) // 2


def test_statistics_tell_memory_that_was_touched_from_memory_that_can_be_hit():
    """On other prompts than before, blocks that were never used come first: touched memory grows, and stays."""
    with open_llm(kv_cache_touch="none", enable_prefix_caching=True, **BLOCKS) as llm:
        caches = caches_of(llm)
        block_bytes = num_bytes(caches) / BLOCKS["num_kv_blocks"]
        assert llm.stats().kv_touched_bytes == llm.stats().kv_findable_bytes == 0
        taken = []
        for first in (5, 6):
            generate(llm, [[first] * 40], GREEDY)
            stats = llm.stats()
            taken.append(stats.kv_touched_bytes)
            assert abs(stats.kv_findable_bytes - stats.num_findable_blocks * block_bytes) <= block_bytes
            assert 0 < stats.kv_findable_bytes <= stats.kv_touched_bytes + block_bytes
        assert 0 < taken[0] < taken[1] <= num_bytes(caches)
        llm.reset_prefix_cache()
        assert (llm.stats().kv_touched_bytes, llm.stats().kv_findable_bytes) == (taken[1], 0)
    with open_llm(**BLOCKS) as llm:
        caches = caches_of(llm)
        until(lambda: llm.stats().kv_touched_bytes == num_bytes(caches))  # touched while idle


@pytest.mark.usefixtures("idle_at_once")
def test_closing_ends_the_thread_of_an_llm(monkeypatch):
    before, taken = idle_threads(), []
    monkeypatch.setattr(host_memory, "_populate", lambda *_: taken.append(time.sleep(0.01)) or 0)
    with open_llm(num_kv_blocks=NUM_SLOTS):
        [thread] = [each for each in idle_threads() if each not in before]
    thread.join(30.0)
    assert not thread.is_alive() and len(taken) < 16


@pytest.mark.usefixtures("idle_at_once")
@pytest.mark.full
def test_an_llm_that_is_forgotten_is_freed(monkeypatch):
    before = idle_threads()
    monkeypatch.setattr(host_memory, "_populate", lambda *_: time.sleep(0.01) or 0)
    llm = open_llm(num_kv_blocks=NUM_SLOTS)
    [thread] = [each for each in idle_threads() if each not in before]
    engine = weakref.ref(llm._engine)
    del llm
    thread.join(30.0)
    gc.collect()
    assert not thread.is_alive() and engine() is None


def test_an_llm_that_is_dropped_gives_its_memory_back_without_a_collection():
    with collector_paused():
        llm = open_llm(num_kv_blocks=NUM_SLOTS)
        caches = [weakref.ref(cache) for cache in caches_of(llm)[0]]
        del llm
        assert [cache() for cache in caches] == [None] * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads, which is what is tested
def test_a_forked_child_takes_nothing(monkeypatch):
    monkeypatch.setattr(host_memory, "_populate", lambda *_: time.sleep(0.01) or 0)
    with open_llm(num_kv_blocks=NUM_SLOTS) as llm:
        assert idle_threads()
        child = os.fork()
        if child == 0:  # pragma: no cover
            os._exit(len(idle_threads()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert generate(llm, [[5, 6, 7]])


async def test_an_async_llm_takes_it_while_it_is_idle(monkeypatch):
    monkeypatch.setattr("nanovllm.serving.streaming.engine_thread.IDLE_SECONDS", 0.0)
    async with async_llms.open_llm(**BLOCKS) as llm:
        caches = llm._engine_thread._engine.model_runner.binding.caches.of_layers

        async def all_is_taken():
            return resident_bytes(caches) == num_bytes(caches)

        assert await comes_true(all_is_taken)
        assert await async_llms.answer(llm.generate([5, 6, 7], async_llms.GREEDY))


def test_a_gpu_has_nothing_to_take():
    assert not KVCaches([], torch.device("cuda")).memory.take_some_memory()


ENDS = """
import sys, time
from nanovllm.serving.streaming.idle_thread import take_memory_when_idle
class Engine:
    wake, has_unfinished = None, False
    def num_output_tokens(self): return 0
    def use_idle_time(self, *, captures): time.sleep(0.2); return True
    def __del__(self): print("gone", "late" if sys.is_finalizing() else "in time")
take_memory_when_idle(Engine())
"""


def test_an_engine_goes_before_the_interpreter_ends():
    """A daemon thread that lets go of tensors later aborts the process."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True)
    assert done.stdout == "gone in time\n"
