"""Routing on Ray: what a router believes of its replicas, from their reports and from what it sent them."""

import pickle
from types import SimpleNamespace

from nanovllm.features.prompt_hashes import PromptHashes
from nanovllm.ray.prompt import Prompt
from nanovllm.ray.router import EXPECTED_SECONDS, HeldBlocks, KnownReplica, fingerprints, with_model
from nanovllm.serving.replicas.routing import prefix_aware

HASHES = PromptHashes(range(100), 16, hash_seed="model")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_reported_blocks_are_held_until_a_report_without_them():
    held = HeldBlocks()
    held.report(fingerprints(HASHES[:3]))
    assert [block_hash in held for block_hash in HASHES] == [True] * 3 + [False] * 3
    held.report(fingerprints(HASHES[:1]))
    assert [block_hash in held for block_hash in HASHES[:2]] == [True, False]


def test_blocks_of_a_prompt_just_sent_are_expected_for_some_seconds():
    clock = Clock()
    held = HeldBlocks(clock)
    held.expect(HASHES)
    held.report(b"")  # of before the prompt arrived
    assert all(block_hash in held for block_hash in HASHES)
    clock.now += EXPECTED_SECONDS
    assert not any(block_hash in held for block_hash in HASHES)
    held.report(b"")
    assert not held._expected


def test_a_prompt_goes_to_the_replica_that_holds_most_of_it_unless_that_is_overloaded():
    replicas = [KnownReplica() for _ in range(3)]
    for number, replica in enumerate(replicas):
        stats = {"num_waiting": 0, "num_running": number, "blocks": fingerprints(HASHES[: 2 * number])}
        replica.update(stats, max_running=8, num_ongoing=None)
    route = prefix_aware()
    assert route(HASHES, replicas) == 2
    replicas[2].update({}, max_running=8, num_ongoing=50)  # Serve's count is newer than the report's
    assert (replicas[2].num_running, replicas[2].num_waiting) == (8, 42)
    assert route(HASHES, replicas) == 1
    assert route((), replicas) == 0  # without a prompt: the least loaded


def test_a_prompt_goes_to_replicas_of_its_model_while_an_application_is_updated():
    replicas = [SimpleNamespace(replica_metadata=data) for data in ({"hash_seed": "old"}, {"hash_seed": "new"}, {})]
    assert with_model(replicas, Prompt([1], model="new")) == replicas[1:2]
    assert with_model(replicas, Prompt([1], model="newer")) == with_model(replicas, None) == replicas


def test_nothing_of_a_prompt_is_sent_to_a_replica():
    prompt = Prompt(list(range(1000)), "salt")
    assert len(prompt.hashes("model", 16)) == 62
    assert len(pickle.dumps(prompt)) < 100
    assert len(pickle.loads(pickle.dumps(prompt)).hashes("model", 16)) == 0
