"""KV events of replicas: each publishes its own, on a port of its own."""

import socket
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from nanovllm import LLM, SamplingParams
from nanovllm.features.kv_events.kv_events import as_number
from tests.support.llms import comes_true
from tests.support.replicas import REPLICAS, kill, tiny_folder
from tests.support.tiny_models import random_prompts

pytestmark = pytest.mark.usefixtures("programs_are_forked")


def two_free_ports():
    """The first of two neighbouring ports."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@contextmanager
def subscribed(*addresses):
    """A subscriber to all that these publish."""
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        subscriber.linger = 0
        for address in addresses:
            subscriber.connect(address)
        yield subscriber


def fill(llm, seed):
    prompts = random_prompts(2, low=40, high=40, seed=seed)
    llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)


def test_each_replica_publishes_under_its_rank_on_the_next_port():
    port, ranks = two_free_ports(), set()
    options = REPLICAS | {"kv_events": f"tcp://*:{port}", "routing": "round-robin"}
    addresses = (f"tcp://127.0.0.1:{port + number}" for number in range(2))
    with LLM(tiny_folder(), **options) as llm, subscribed(*addresses) as subscriber:

        def heard_both():
            seed = len(ranks) + subscriber.poll(0)
            fill(llm, seed)
            llm.reset_prefix_cache()
            while subscriber.poll(50):
                ranks.add(msgspec.msgpack.decode(subscriber.recv_multipart()[2])[2])
            return ranks == {0, 1}

        comes_true(heard_both, 30.0)


def test_a_subscriber_forgets_what_a_replica_held_that_died(tmp_path):
    """It hears that nothing is cached as soon as the replica is up again, before anything is."""
    options = REPLICAS | {"kv_events": f"ipc://{tmp_path}/events"}
    held = set()
    numbers = []
    with LLM(tiny_folder(), **options) as llm, subscribed(f"ipc://{tmp_path}/events_dp1") as subscriber:

        def listen(milliseconds=300):
            while subscriber.poll(milliseconds):
                _, number, payload = subscriber.recv_multipart()
                numbers.append(int.from_bytes(number, "big"))
                for event in msgspec.msgpack.decode(payload)[1]:
                    if event["type"] == "BlockStored":
                        held.update(event["block_hashes"])
                    else:
                        held.difference_update(event.get("block_hashes", set(held)))

        def known():
            return {as_number(block_hash) for block_hash in llm._engine.replicas[1].prefixes.held}

        while not held:  # a late subscription misses some: cached blocks are not reported again
            llm.reset_prefix_cache()
            fill(llm, len(numbers))
            listen()
        assert known() <= held
        before = max(numbers)
        kill(llm, 1)
        comes_true(lambda: llm.replicas()[1].num_restarts == 1 and llm.replicas()[1].state == "up")
        comes_true(lambda: listen() or held == set())
        assert numbers[-1] == 0 <= before
        fill(llm, 100)
        comes_true(lambda: listen() or held == known())
        assert len(held) >= 2
