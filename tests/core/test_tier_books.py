"""Books of a tier: what is evicted, forgotten and kept; damaged and foreign files; what a reset leaves."""

import os

import pytest

from nanovllm.block_manager import digest
from nanovllm.features.tiers.books import TierBooks
from nanovllm.features.tiers.costs import LoadCosts
from nanovllm.features.tiers.directory import CacheDirectory
from nanovllm.features.tiers.reading import FileReads, Job, ReadItem, read_place
from nanovllm.features.tiers.segments import (
    Place,
    checksum,
    encode_header,
    encode_record,
    read_header,
    read_records,
    segment_paths,
)
from tests.support.prefixes import store, tiered_blocks
from tests.support.public_options import make_sequence

ROOT = digest(b"root")
CONTENT = bytes(range(64))


def chain(books, count):
    """Blocks one after another in host memory."""
    nodes = [books.root(ROOT)]
    for number in range(count):
        nodes.append(nodes[-1].child(bytes([number] * 16)))
        books.hold(nodes[-1], 0, books.take_slot(0))
    return nodes[1:]


def stored(books, nodes):
    return [0 in node.slots for node in nodes]


def directory(path, books=None, max_bytes=2**20, **header):
    return CacheDirectory(path, header or {"model": "ours"}, max_bytes, books or TierBooks([len(CONTENT)], 2**20))


def full(*_):
    raise OSError("disk full")


def written(path):
    """A directory with a block in a file."""
    files = directory(path)
    node = files._books.root(ROOT).child(b"tokens of a block")
    assert files.append(node, 0, CONTENT)
    return files, node


# ---------------------------------------------------------------------------------------------------------- host memory


def test_a_full_tier_evicts_the_tail_of_the_chain_used_longest_ago():
    books = TierBooks([1], 4)
    nodes = chain(books, 4)
    books.use(nodes, 0)
    assert (books.take_slot(0), stored(books, nodes)) == (3, [True, True, True, False])
    books.use(nodes[2:3], 0)
    books.take_slot(0)
    assert stored(books, nodes) == [True, False, True, False]


def test_a_tier_and_each_group_of_it_keep_to_their_bytes():
    books = TierBooks([4, 4], 20, shares=[1.0, 0.5])
    assert [books.take_slot(1) for _ in range(3)] == [0, 1, None]
    assert [books.take_slot(0) for _ in range(4)] == [0, 1, 2, None]
    assert books.num_bytes == 20


def test_a_pinned_slot_is_neither_evicted_nor_free_until_its_copy_has_gone():
    books = TierBooks([1], 2)
    nodes = chain(books, 2)
    books.pin(0, 0)
    assert books.take_slot(0) == 1 and books.take_slot(0) is None
    books.drop(nodes[0], 0)
    assert books.take_slot(0) is None
    books.unpin(0, 0)
    assert books.take_slot(0) == 0


def test_distrust_forgets_every_longer_prefix_in_memory_and_in_files():
    books = TierBooks([1], 4)
    nodes = chain(books, 3)
    for node in nodes:
        node.places[0] = Place(1, 0, 1, b"")
    books.distrust(nodes[1])
    assert stored(books, nodes) == [True, False, False]
    assert [bool(node.places) for node in nodes] == [True, False, False]


def test_a_block_stays_in_the_tree_while_a_file_is_read_into_it():
    books = TierBooks([1], 4)
    (node,) = chain(books, 1)
    node.num_reads = 1
    books.drop(node, 0)
    assert books.roots[ROOT].children == {node.key: node}


# ---------------------------------------------------------------------------------------------------------------- reads


@pytest.mark.parametrize("is_right, is_current", [(True, True), (False, True), (True, False)])
def test_a_read_is_a_hit_if_it_is_right_and_no_reset_came_between_and_else_gives_its_slot_back(
    is_right, is_current, tmp_path
):
    files, node = written(tmp_path)
    books = files._books
    reads = FileReads(files, books, LoadCosts(), lambda group, slot: memoryview(b""))
    job = Job([ReadItem(node, 0, books.take_slot(0), node.places[0])], books.generation, results=[is_right])
    node.num_reads = 1
    reads._jobs.append(job)
    job.is_done.set()
    if not is_current:
        books.clear()
    reads.collect()
    is_stored = is_right and is_current
    assert (0 in node.slots) == is_stored
    assert (0 in node.places) == is_right  # a damaged one is not read again
    assert books.take_slot(0) == (1 if is_stored else 0)
    files.close()


def test_a_place_is_read_if_its_length_and_its_checksum_are_right(tmp_path):
    files, node = written(tmp_path)
    place = node.places[0]
    for changed, is_right in (
        (place, True),
        (place._replace(checksum=checksum(b"other")), False),
        (place._replace(length=32, checksum=checksum(CONTENT[:32] + bytes(32))), False),
        (place._replace(segment=9), False),
    ):
        opened = {}
        target = bytearray(64)
        assert read_place(files, changed, memoryview(target), opened) == is_right
        for file in opened.values():
            os.close(file)
    files.close()


# ---------------------------------------------------------------------------------------------------------------- files


def found(path, **header):
    """Blocks that another process finds there."""
    files = directory(path, **header)
    files.close()
    return len(files._by_hash)


def test_a_record_is_taken_if_it_is_whole_and_its_tokens_have_its_hash(tmp_path):
    files, _ = written(tmp_path)
    files.close()
    _, index = segment_paths(tmp_path, 1)
    data = index.read_bytes()
    assert found(tmp_path) == 1
    for position in (len(data) - 1, len(data) - 30):  # in the tokens, in the record
        index.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        assert found(tmp_path) == 0
    index.write_bytes(data[:-1])
    assert found(tmp_path) == 0
    _, begin = read_header(data)
    record, _ = next(read_records(data, begin, 1))
    index.write_bytes(data[:begin] + encode_record(record._replace(tokens=b"other tokens here")))
    assert found(tmp_path) == 0


def test_files_of_other_weights_are_not_read(tmp_path):
    files, _ = written(tmp_path)
    files.close()
    assert (found(tmp_path), found(tmp_path, model="other")) == (1, 0)
    segment, _ = segment_paths(tmp_path, 1)
    theirs = encode_header({"model": "them"})
    segment.write_bytes(theirs + segment.read_bytes()[len(theirs) :])
    assert found(tmp_path) == 0


def test_a_damaged_header_is_none():
    data = encode_header({"model": "ours"})
    assert read_header(data) == ({"model": "ours"}, len(data))
    assert read_header(data.replace(b"ours", b"hers")) == (None, 0)


def test_one_process_writes_to_a_folder_and_a_full_disk_ends_that(tmp_path, monkeypatch):
    first, node = written(tmp_path)
    second = directory(tmp_path)
    assert (first.is_writer, second.is_writer) == (True, False)
    second.close()

    monkeypatch.setattr("nanovllm.features.tiers.segments._write", full)
    assert not first.append(node.child(b"tokens of a block"), 0, CONTENT)
    assert not first.is_writer and 0 in node.places
    first.close()


def test_a_segment_whose_header_finds_the_disk_full_leaves_no_file_open(tmp_path, monkeypatch):
    opened = []
    open_file = os.open

    def record(*args):
        opened.append(open_file(*args))
        return opened[-1]

    monkeypatch.setattr(os, "open", record)
    monkeypatch.setattr(os, "write", full)
    files = directory(tmp_path)
    assert not files.append(files._books.root(ROOT).child(b"tokens of a block"), 0, CONTENT)
    files.close()
    assert len(opened) == 3  # the lock, a segment and its index
    for file in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


def test_a_record_follows_its_block_and_is_durable_after_it(tmp_path, monkeypatch):
    calls = []
    write = os.write
    sync = os.fsync
    monkeypatch.setattr(os, "write", lambda file, data: (calls.append(("write", file)), write(file, data[:9]))[1])
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append(("sync", file)), sync(file))[1])
    files, _ = written(tmp_path)
    segment, index = files._writer._files
    files.close()
    order = list(dict.fromkeys(calls[len(calls) - calls[::-1].index(("write", segment)) - 1 :]))
    assert order == [("write", segment), ("write", index), ("sync", segment), ("sync", index)]
    assert found(tmp_path) == 1  # written piece by piece


def test_segments_used_longest_ago_make_room_and_their_blocks_are_no_hits(tmp_path):
    files = directory(tmp_path, max_bytes=1000)
    nodes = [files._books.root(ROOT).child(bytes([number] * 16)) for number in range(12)]
    for number, node in enumerate(nodes):
        assert files.append(node, 0, CONTENT)
        files._end_segment()
        segment, _ = segment_paths(tmp_path, number + 1)
        os.utime(segment, (number, number))
    files.close()
    kept = [0 in node.places for node in nodes]
    assert kept == sorted(kept) and 0 < sum(kept) < 12
    assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) <= 1000
    assert {path.stem for path in tmp_path.glob("*.kv")} == {path.stem for path in tmp_path.glob("*.index")}


# --------------------------------------------------------------------------------------------------------------- stores


def test_two_idle_blocks_of_one_content_take_one_slot():
    manager, books = tiered_blocks()
    sequences = [make_sequence(range(5)) for _ in range(2)]
    manager.begin_step()
    for sequence in sequences:  # scheduled in one step, neither is a hit of the other
        manager.allocate(sequence, 1)
        manager.register(sequence, 0, 1, 1)
    manager.commit(1)
    for sequence in sequences:
        manager.release(sequence)
    manager.begin_step()
    assert len(manager.take_copies(2)) == books.num_stored == 1
    books.check()


# ---------------------------------------------------------------------------------------------------------------- reset


def test_a_reset_leaves_no_copy_no_load_and_no_store_of_former_content():
    manager, books = tiered_blocks()
    sequence = make_sequence(range(9))
    for step_id in (1, 2):
        manager.begin_step()
        manager.allocate(sequence, 2)
        manager.register(sequence, 0, 2, step_id)
        manager.take_copies(step_id)
        manager.commit(step_id)
        manager.release(sequence)
        root = manager.root_of("")
        if step_id == 1:
            manager.reset_prefix_cache()  # blocks wait to be stored
            assert manager.root_of("") is not root and not any(manager.queues)
    manager.begin_step()
    assert len(manager.copies) == 2  # stores
    manager.reset_prefix_cache()
    assert manager.take_copies(3) == () and books.num_stored == 0
    books.check()


# ------------------------------------------------------------------------------------------------------- costs


def waiting(compute_seconds, *, num_taken):
    """A prompt of three blocks, two of them in host memory, and the positions from which costs were asked for."""
    asked = []
    costs = LoadCosts(lambda start, count: (asked.append(start), compute_seconds)[1])
    costs.rates["host"] = 1.0
    manager, _ = tiered_blocks(num_blocks=9, costs=costs)
    sequence = make_sequence(range(12))
    store(manager, sequence, 2)
    manager.pop_free(num_taken)
    return manager, sequence, asked


def test_a_prompt_that_is_faster_computed_is_not_asked_for_again_while_it_waits():
    manager, sequence, asked = waiting(0.1, num_taken=0)
    assert [manager.lookup(sequence) for _ in range(3)] == [[], [], []] and asked == [0]
    manager.want(sequence)  # preempted, and queued again
    assert manager.lookup(sequence) == [] and asked == [0, 0]


def test_a_prompt_that_waits_for_blocks_asks_for_no_costs():
    manager, sequence, asked = waiting(1e9, num_taken=6)
    assert manager.lookup(sequence) == [] and asked == []
    manager, sequence, asked = waiting(1e9, num_taken=5)
    assert len(manager.lookup(sequence)) == 2 and asked == [0]
