"""KV events of replicas: each publishes its own, on a port of its own."""

from __future__ import annotations

import socket

import msgspec
import zmq

from nanovllm import LLM, SamplingParams
from tests.support.replicas import REPLICAS, tiny_folder, wait_until
from tests.support.tiny_models import random_prompts


def two_free_ports() -> int:
    """The first of two neighbouring ports."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def test_each_replica_publishes_under_its_rank_on_the_next_port():
    port, ranks = two_free_ports(), set()
    options = REPLICAS | {"kv_events": f"tcp://*:{port}", "routing": "round-robin"}
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber, LLM(tiny_folder(), **options) as llm:
        subscriber.subscribe(b"")
        subscriber.linger = 0
        for number in range(2):
            subscriber.connect(f"tcp://127.0.0.1:{port + number}")

        def heard_both() -> bool:
            seed = len(ranks) + subscriber.poll(0)
            llm.generate(random_prompts(2, seed=seed), SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
            llm.reset_prefix_cache()
            while subscriber.poll(50):
                ranks.add(msgspec.msgpack.decode(subscriber.recv_multipart()[2])[2])
            return ranks == {0, 1}

        wait_until(heard_both, 30.0)
