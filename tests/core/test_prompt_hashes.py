"""Block hashes of a prompt: a chain that any process computes, as far as it is read."""

import pytest
import xxhash

from nanovllm.features.prompt_hashes import PromptHashes, num_leading_hits
from tests.engine.blocks import SIZE, A, B, C, computed, make_manager, release
from tests.support.public_options import make_sequence


def test_a_prompt_has_the_hashes_under_which_a_manager_caches_it():
    manager = make_manager(8, hash_seed="model:float32")
    sequence = computed(manager, [*A, *B, *C, 9], cache_salt="salt")
    hashes = PromptHashes([*A, *B, *C, 9], SIZE, hash_seed="model:float32", cache_salt="salt")
    assert list(hashes) == sequence.block_hashes == list(manager.entries)
    assert num_leading_hits(hashes, manager.entries) == 3


def test_a_hash_is_that_of_its_parents_hash_and_its_tokens_in_any_process():
    root = xxhash.xxh3_128_digest(b"5:modelsalt")
    tokens = b"\x01\0\0\0\x02\0\0\0\x03\0\0\0\xff\xff\0\0"
    assert SIZE == 4
    (only,) = PromptHashes([1, 2, 3, 65535, 9], SIZE, hash_seed="model", cache_salt="salt")
    assert only == xxhash.xxh3_128_digest(root + tokens)


@pytest.mark.parametrize("length", range(1, 14))
def test_a_prompt_has_as_many_hashes_as_a_lookup_can_find_blocks(length):
    manager = make_manager(8)
    release(manager, computed(manager, list(range(12))))
    hashes = PromptHashes(range(length), SIZE)
    assert len(hashes) == len(list(hashes)) == len(manager.lookup(make_sequence(range(length))))


def test_hashes_are_computed_once_and_as_far_as_they_are_read():
    known = []
    hashes = PromptHashes([*A, *B, *C, 9], SIZE, known=known)
    assert known == []
    assert num_leading_hits(hashes, {hashes[0]}) == 1
    assert len(known) == 2  # the hit, and the miss that ends it
    read = list(known)
    assert hashes[-1] == hashes[2] and hashes[:2] == read
    assert all(one is other for one, other in zip(read, known, strict=False))
    with pytest.raises(IndexError, match="block 3 of a prompt with 3 blocks"):
        hashes[3]
