"""The folder of `prefix_cache_dir` has one writer at a time, and never none; no request waits for its disk."""

import multiprocessing
import os
import threading

import pytest

from nanovllm import LLM
from nanovllm.features.tiers import directory as directories
from nanovllm.features.tiers import inspection
from nanovllm.features.tiers.books import TierBooks
from nanovllm.features.tiers.directory import CacheDirectory
from tests.support.llms import OPTIONS, generate
from tests.support.prefixes import PROMPTS, cached
from tests.support.tiny_models import save_tiny

BLOCK_BYTES = 64


def open_directory(folder, max_bytes=10**6):
    return CacheDirectory(folder, {"model": 1}, max_bytes, TierBooks([BLOCK_BYTES], max_bytes))


def append(directory, *tokens):
    """Write the first block of a prompt."""
    node = directory._books.root(b"a model and salt").child(bytes(tokens))
    return directory.append(node, 0, b"x" * BLOCK_BYTES)


def num_known(directory):
    """Blocks that a directory has learnt of."""
    return sum(bool(node.places) for root in directory._books.roots.values() for node in root.below())


class Child:
    """A forked process that lives until it is ended."""

    def __init__(self, by, run=lambda: None):
        self._read, self._write = os.pipe()
        has_run, tell = os.pipe()

        def live():
            run()
            os.write(tell, b"x")
            os.read(self._read, 1)

        if by == "multiprocessing":
            process = multiprocessing.get_context("fork").Process(target=live)
            process.start()
            self._join = process.join
        elif (number := os.fork()) == 0:
            try:
                live()
            finally:
                os._exit(0)
        else:
            self._join = lambda: os.waitpid(number, 0)
        os.read(has_run, 1)

    def end(self):
        os.write(self._write, b"x")
        self._join()


@pytest.mark.parametrize("by", ["os", "multiprocessing"])
def test_a_forked_child_that_lives_on_does_not_keep_the_folder(by, tmp_path):
    first = open_directory(tmp_path)
    child = Child(by)
    first.close()
    second = open_directory(tmp_path)
    assert append(second, 1)
    child.end()
    second.close()


def test_a_child_of_a_killed_engine_does_not_keep_its_folder(tmp_path):
    (is_over, end), (ready, tell) = os.pipe(), os.pipe()
    owner = os.fork()
    if owner == 0:
        os.close(end)
        directory = open_directory(tmp_path)
        assert directory.is_writer
        if os.fork() == 0:
            os.write(tell, b"x")
            os.read(is_over, 1)
        os._exit(0)  # the directory is not closed
    try:
        os.read(ready, 1)
        os.waitpid(owner, 0)
        second = open_directory(tmp_path)
        assert append(second, 1)
        second.close()
    finally:
        os.close(end)


def test_a_child_that_closes_its_copy_leaves_the_lock_to_its_parent(tmp_path):
    first = open_directory(tmp_path)
    child = Child("os", lambda: (append(first, 1), first.close()))
    assert not open_directory(tmp_path).is_writer
    assert num_known(open_directory(tmp_path)) == 0
    child.end()
    assert append(first, 2)
    first.close()


def test_a_reader_becomes_the_writer_when_the_writer_has_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(directories, "REFRESH_SECONDS", 0.0)
    first, second, third = (open_directory(tmp_path) for _ in range(3))
    assert append(first, 1)
    second.take_over()
    assert not append(second, 2)
    assert append(first, 3)
    first.close()
    second.take_over()
    third.take_over()
    assert num_known(second) == 2, "all that the former writer left"
    assert append(second, 2) and not append(third, 4)
    third.refresh()
    assert num_known(third) == 3
    second.close()
    third.close()


def test_an_engine_that_read_writes_what_it_has_when_it_closes_last(tmp_path):
    folder = str(save_tiny(tmp_path / "model", "llama"))
    kept = tmp_path / "kept"
    options = OPTIONS | {"prefix_cache_dir": str(kept), "skip_tokenizer_init": True}
    first, second = (LLM(folder, **options) for _ in range(2))
    generate(second, PROMPTS)
    first.close()
    second.close()
    with LLM(folder, **options) as third:
        assert cached(generate(third, PROMPTS)) == [64, 64]


def test_no_engine_writes_to_a_folder_while_it_is_cleared(tmp_path, monkeypatch):
    first, second = open_directory(tmp_path), open_directory(tmp_path)
    assert append(first, 1)
    first.close()
    remove = inspection.remove_segment

    def removing(path, number):
        second.take_over(now=True)
        assert not second.is_writer
        remove(path, number)

    monkeypatch.setattr(inspection, "remove_segment", removing)
    assert inspection.clear(str(tmp_path)) == 1
    second.take_over(now=True)
    assert append(second, 1)
    second.close()


def test_the_engine_goes_on_while_a_segment_becomes_durable_and_its_end_waits(tmp_path, monkeypatch):
    may_end, fsync = threading.Event(), os.fsync
    synced = []

    def slow(file):
        assert may_end.wait(60.0)
        fsync(file)
        synced.append(file)

    monkeypatch.setattr(os, "fsync", slow)
    directory = open_directory(tmp_path, max_bytes=4000)  # a segment of 1,000 bytes
    for number in range(45):
        assert append(directory, number)
    assert not synced and len(directory._ending) > 1
    closing = threading.Thread(target=directory.close)
    closing.start()
    assert not open_directory(tmp_path).is_writer, "until all is durable"
    may_end.set()
    closing.join()
    assert len(synced) >= 4 and len(synced) % 2 == 0
    assert open_directory(tmp_path).is_writer


def test_an_error_of_the_disk_in_the_thread_ends_the_writing_with_a_warning(tmp_path, monkeypatch, caplog):
    def fail(file):
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "fsync", fail)
    directory = open_directory(tmp_path, max_bytes=4000)
    written = 0
    while append(directory, written):
        written += 1
        for thread in directory._ending:
            thread.join()
    assert 0 < written < 30 and not directory.is_writer
    assert sum("the disk is gone" in record.message for record in caplog.records) == 1
    directory.close()
