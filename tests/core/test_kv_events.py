"""KV events on ZeroMQ in vLLM's schema, read as a router reads them."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import threading
import time

import msgspec
import pytest
import zmq

from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.state_kinds import FULL, StateKind
from nanovllm.features.kv_events import kv_events
from nanovllm.features.kv_events.block_events import AllForgotten, BlockEvents, Findable, Forgotten
from nanovllm.features.kv_events.kv_events import KvEventPublisher, as_number, endpoint_of_rank, in_schema
from nanovllm.features.prompt_hashes import PromptHashes
from nanovllm.observability.step_records import StepObservers
from nanovllm.serving.replicas.prefix_index import PrefixIndex, encode
from tests.engine.blocks import A, B, C, D, computed, make_manager, release
from tests.support.llms import generate, greedy, open_llm
from tests.support.refusals import invalid
from tests.support.scheduling import Loop, make_group_scheduler

# The schema as vLLM documents it to subscribers, since 0.24: an array, whose events are maps with a tag.


class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class Router:
    """A subscriber that keeps which blocks the engine holds, and names them by its own key: all tokens before."""

    def __init__(self, context, endpoint, topic=""):
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.socket.connect(endpoint)
        self.numbers = []
        self.batches = []
        self.topics = set()
        self.tokens = {}  # hash -> the tokens of its block and all before

    def read(self, count=1, timeout=10.0):
        for _ in range(count):
            assert self.socket.poll(1000 * timeout), f"no message after {timeout} s"
            topic, number, payload = self.socket.recv_multipart()
            self.topics.add(topic)
            self.take(int.from_bytes(number, "big"), decode(payload))

    def read_all(self):
        """Every message until none comes for half a second."""
        while self.socket.poll(500):
            self.read()

    def take(self, number, batch):
        self.numbers.append(number)
        self.batches.append(batch)
        for event in batch.events:
            if isinstance(event, BlockStored):
                tokens = () if event.parent_block_hash is None else self.tokens[event.parent_block_hash]
                size = event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                for index, block_hash in enumerate(event.block_hashes):
                    tokens = (*tokens, *event.token_ids[index * size : (index + 1) * size])
                    self.tokens[block_hash] = tokens
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    del self.tokens[block_hash]
            else:
                self.tokens.clear()


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/events"


def replayed(context, endpoint, first):
    """What a subscriber gets that asks for the batches from `first` on, with the end's mark."""
    with context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while not found or found[-1][0] >= 0:
            assert socket.poll(10_000), "no answer"
            empty, number, payload = socket.recv_multipart()
            assert empty == b""
            found.append((int.from_bytes(number, "big", signed=True), payload))
        return found


class Published:
    """A block manager whose events are published at the end of each `step`."""

    def __init__(self, num_blocks=8, **options):
        self.manager, self.observers = make_manager(num_blocks), StepObservers()
        self.publisher = KvEventPublisher(EngineConfig(**options))
        self.publisher.begin(self.manager, self.observers)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.observers.notify("engine_closed")

    def hold(self, tokens, **options):
        computed(self.manager, tokens, **options)
        self.step()

    def step(self):
        self.observers.notify("step_ended", None, None)


def subscribed(published, context, endpoint, topic=""):
    """A router that has joined: what is published from now on reaches it."""
    router = Router(context, endpoint, topic)
    while not router.socket.poll(50):
        published.manager.reset_prefix_cache()
    router.read_all()
    router.numbers.clear()
    router.batches.clear()
    return router


@pytest.fixture
def replay(tmp_path):
    return f"ipc://{tmp_path}/replay"


@pytest.fixture
def heard(context, endpoint):
    """What is published at the endpoint, and a router that has joined."""

    @contextlib.contextmanager
    def begin(num_blocks=8, **options):
        with Published(num_blocks, kv_events=endpoint, **options) as published:
            yield published, subscribed(published, context, endpoint)

    return begin


def within(seconds, holds):
    end = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


# -------------------------------------------------------------------------------------------------------- the schema


def findable(block_hash, parent=None, **more):
    return Findable(block_hash, parent, bytes(16), "", **more)  # four int32


def test_a_chain_is_one_event_and_so_are_blocks_removed_in_a_row():
    first, second, third = PromptHashes([*A, *B, *C, 9], 4)
    chain = [findable(first), findable(second, first), findable(third, second)]
    stored, removed, cleared = in_schema([*chain, Forgotten(third), Forgotten(second), AllForgotten()])
    assert stored["block_hashes"] == [*map(as_number, (first, second, third))]
    assert stored["parent_block_hash"] is None and stored["block_size"] == 4 and len(stored["token_ids"]) == 12
    assert removed["block_hashes"] == [as_number(third), as_number(second)]
    assert cleared == {"type": "AllBlocksCleared"}


def test_a_block_of_another_prompt_parts_a_chain_in_order():
    first, second = PromptHashes([*A, *B, 9], 4)
    (other,) = PromptHashes([*C, 9], 4)
    events = in_schema([findable(first), findable(other), findable(second, first)])
    assert [event["parent_block_hash"] for event in events] == [None, None, as_number(first)]
    events = in_schema([findable(first), Forgotten(other), findable(second, first)])
    assert [event["type"] for event in events] == ["BlockStored", "BlockRemoved", "BlockStored"]


def test_blocks_with_pictures_name_what_identifies_them():
    first, second, third = PromptHashes([*A, *B, *C, 9], 4)
    pictured = Findable(second, first, bytes(16) + b"picture", "")
    events = in_schema([findable(first), pictured, findable(third, second)], block_size=4)
    assert [len(event["token_ids"]) for event in events] == [4, 8]
    assert events[1]["block_size"] == 4 and events[1]["extra_keys"] == [[b"picture".hex()], None]
    assert "extra_keys" not in events[0] and events[1]["parent_block_hash"] == as_number(first)


def test_states_are_told_from_the_blocks_after_which_they_are():
    """A router that counts hits of such a model needs both."""
    (first, second), kinds = PromptHashes([*A, *B, 9], 4), ["full_attention", "mamba"]
    events = [
        findable(first),
        findable(second, first),
        findable(second, first, of_states=True),
        Forgotten(second, of_states=True),
        Forgotten(second),
    ]
    found = in_schema(events, kinds)
    assert [(event["type"], event["group_idx"], len(event["block_hashes"])) for event in found] == [
        ("BlockStored", 0, 2), ("BlockStored", 1, 1), ("BlockRemoved", 1, 1), ("BlockRemoved", 0, 1),
    ]  # fmt: skip
    assert [event.get("kv_cache_spec_kind") for event in found] == [*kinds, None, None]
    assert not any("group_idx" in event for event in in_schema(events)), "a model without states has one group"


def test_the_events_of_states_follow_their_slots():
    scheduler = make_group_scheduler([FULL, StateKind.record(100)], [1 + 40, 1 + 4], max_model_len=100)
    manager, loop, seen = scheduler.block_manager, Loop(scheduler), []
    BlockEvents.follow(manager, StepObservers(), seen.extend)
    for number in range(6):
        loop.add([number, *A, *B, *C], max_tokens=9)
        loop.drain()
        manager.observer.flush()
        held = {event.block_hash: isinstance(event, Findable) for event in seen if event.of_states}
        states = manager.groups[1].pool
        assert {h for h, is_held in held.items() if is_held} == {e.block_hash for e in states.entry_of if e is not None}
    assert any(isinstance(event, Forgotten) and event.of_states for event in seen)
    index = PrefixIndex()
    index.apply(encode(seen))
    assert index.held == set(manager.entries), "replicas are chosen by blocks"


def test_every_event_decodes_by_the_structs_of_vllm(heard):
    with heard(2) as (published, router):
        before = time.time()
        release(published.manager, computed(published.manager, [*A, *B], cache_salt="salt"))
        published.hold(D)  # evicts the second block
        published.manager.reset_prefix_cache()
        router.read(2)
        one, two = router.batches
        first, second = (as_number(h) for h in PromptHashes([*A, *B, 9], 4, cache_salt="salt"))
        (third,) = (as_number(h) for h in PromptHashes([*D, 9], 4))
        stored = BlockStored([first, second], None, [*A, *B], 4, None, "GPU", None, [("salt",), None])
        other = BlockStored([third], None, D, 4, None, "GPU", None)
        assert one.events == [stored, BlockRemoved([second], "GPU"), other]
        assert two.events == [AllBlocksCleared()]
        assert before <= one.ts <= two.ts <= time.time()
        assert one.data_parallel_rank == two.data_parallel_rank == 0


def test_a_salt_may_hold_any_text(heard):
    with heard() as (published, router):
        published.hold(A, cache_salt="\ud800é")
        router.read()
        assert router.batches[0].events[0].extra_keys == [("\\ud800é",)]


def test_a_batch_that_cannot_be_encoded_is_a_logged_gap(heard, caplog):
    with heard() as (published, router):
        published.publisher.receive([Findable(b"", None, b"not int32", "")])
        published.hold(A)
        router.read()
        assert f"batch {router.numbers[0] - 1} of KV events is lost" in caplog.text


# -------------------------------------------------------------------------------------------------------- an engine


def test_a_router_knows_what_an_engine_holds_after_evictions_and_a_reset(context, endpoint):
    options = {"kv_events": endpoint, "kv_events_topic": "kv@pod-1@tiny", "num_kv_blocks": 9, "max_model_len": 96}
    with open_llm(**options) as llm:
        manager = llm._engine.block_manager
        router = Router(context, endpoint, topic="kv@")
        while not router.socket.poll(50):
            llm.reset_prefix_cache()
        for start in range(0, 200, 10):
            prompt = [*range(start, start + 33)]
            generate(llm, [prompt], greedy(8))
        router.read_all()
        assert set(router.tokens) == {as_number(block_hash) for block_hash in manager.entries}
        assert router.tokens[as_number(PromptHashes(prompt, 16, hash_seed=manager.hash_seed)[1])] == tuple(prompt[:32])
        assert router.topics == {b"kv@pod-1@tiny"}
        assert any(isinstance(event, BlockRemoved) for batch in router.batches for event in batch.events)
        assert router.numbers == list(range(router.numbers[0], router.numbers[-1] + 1))
        llm.reset_prefix_cache()
        router.read_all()
        assert router.tokens == {}


def test_what_an_engine_has_queued_is_sent_when_it_closes(heard):
    with heard() as (published, router):
        published.hold(A)
    router.read()
    assert len(router.tokens) == 1
    assert not published.publisher._thread.is_alive()


def test_an_engine_at_the_endpoint_of_one_before_says_that_nothing_is_cached(heard, endpoint):
    with heard() as (published, router):
        published.hold(A)
        router.read()
        assert len(router.tokens) == 1
    with Published(kv_events=endpoint) as published:
        while not router.socket.poll(50):  # it connects again
            published.publisher.receive([AllForgotten()])
        router.read_all()
        assert router.tokens == {} and router.numbers[-1] < 100


# ------------------------------------------------------------------------------------------------------------ replay


def test_a_subscriber_that_comes_late_asks_for_what_it_missed(context, endpoint, replay):
    with Published(kv_events=endpoint, kv_events_replay=replay) as published:
        for tokens in (A, B, C):
            published.hold(tokens)
        assert within(20.0, lambda: len(replayed(context, replay, 0)) == 5)
        *batches, (end, payload) = replayed(context, replay, 0)
        assert [number for number, _ in batches] == [0, 1, 2, 3]
        assert decode(batches[0][1]).events == [AllBlocksCleared()]
        assert (end, payload) == (-1, b"")
        router = Router(context, endpoint)
        for number, batch in batches:
            router.take(number, decode(batch))
        assert set(router.tokens) == {as_number(block_hash) for block_hash in published.manager.entries}
        assert [number for number, _ in replayed(context, replay, 3)] == [3, -1]
        assert [number for number, _ in replayed(context, replay, 4)] == [-1]


def test_old_batches_are_not_kept_for_replay(context, endpoint, replay, monkeypatch):
    monkeypatch.setattr(kv_events, "MAX_REPLAYED", 2)
    with Published(kv_events=endpoint, kv_events_replay=replay) as published:
        for tokens in (A, B, C, D):
            published.hold(tokens)
        assert within(20.0, lambda: [number for number, _ in replayed(context, replay, 0)] == [3, 4, -1])


def test_a_malformed_replay_request_is_logged_and_the_next_is_answered(context, endpoint, replay, caplog):
    with Published(kv_events=endpoint, kv_events_replay=replay) as published:
        with context.socket(zmq.DEALER) as socket:
            socket.connect(replay)
            socket.send(b"all of it")
            assert within(20.0, lambda: "an empty frame and one of 8 bytes" in caplog.text)
        published.hold(A)
        assert within(20.0, lambda: [number for number, _ in replayed(context, replay, 0)] == [0, 1, -1])


# ------------------------------------------------------------------------------------------------- slow subscribers


def test_a_subscriber_that_does_not_read_stops_no_step_and_sees_the_gap(heard, context, replay, monkeypatch):
    monkeypatch.setattr(kv_events, "MAX_UNSENT", 1)
    context.setsockopt(zmq.RCVHWM, 1)
    with heard(2, kv_events_replay=replay) as (published, router):
        first = published.publisher._next_sequence
        num_batches = 3000
        for number in range(num_batches):
            release(published.manager, computed(published.manager, [number] * 8))
            published.step()
        assert within(20.0, lambda: published.publisher._queue.empty())
        seen = []
        while router.socket.poll(500):
            seen.append(int.from_bytes(router.socket.recv_multipart()[1], "big"))
        assert len(seen) < num_batches and seen == sorted(set(seen))
        missing = next(number for number in range(first, first + num_batches) if number not in seen)
        numbers = [number for number, _ in replayed(context, replay, missing)]
        assert numbers == [*range(missing, first + num_batches), -1]


def test_batches_that_the_thread_cannot_keep_up_with_are_lost_with_their_numbers(heard, caplog):
    with heard() as (published, router):
        published.publisher._queue.maxsize = 2
        stuck, may_go_on = threading.Event(), threading.Event()
        encode = published.publisher._encode

        def slow(batch):
            stuck.set()
            may_go_on.wait()
            return encode(batch)

        published.publisher._encode = slow
        first = published.publisher._next_sequence
        for tokens in (A, B, C, D, [5] * 4):
            published.hold(tokens)
            stuck.wait()
        assert caplog.text.count(f"batch {first + 3} is lost") == 1
        may_go_on.set()
        router.read_all()
        published.hold([6] * 4)
        router.read()
        assert [number - first for number in router.numbers] == [0, 1, 2, 5]


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("missing", ["zmq", "msgspec"])
def test_without_its_packages_the_error_names_the_extra(missing, monkeypatch, endpoint):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(RuntimeError, match=rf"kv_events needs {missing}: pip install 'nanovllm\[kv-events\]'"):
        open_llm(kv_events=endpoint)


def test_an_endpoint_that_is_taken_is_named(context):
    with context.socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with invalid(rf"kv_events is 'tcp://\*:{port}', which cannot be bound: .*in use"):
            KvEventPublisher(EngineConfig(kv_events=f"tcp://*:{port}"))


def test_the_endpoint_is_free_again_after_a_model_that_does_not_load():
    with socket.create_server(("", 0)) as server:  # closed at once, where a socket of zmq closes later
        port = server.getsockname()[1]
    for _ in range(2):
        with invalid("max_model_len is 10000000"):
            open_llm(kv_events=f"tcp://*:{port}", max_model_len=10_000_000)


def test_an_endpoint_without_a_star_is_connected_to(context):
    with context.socket(zmq.SUB) as socket:
        socket.setsockopt_string(zmq.SUBSCRIBE, "")
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with Published(kv_events=f"tcp://127.0.0.1:{port}") as published:
            while not socket.poll(50):
                published.manager.reset_prefix_cache()
            assert decode(socket.recv_multipart()[2]).events == [AllBlocksCleared()]


def test_the_rank_moves_the_ports_and_is_told(context, endpoint):
    assert endpoint_of_rank("tcp://*:5557", 3) == "tcp://*:5560"
    assert endpoint_of_rank("tcp://*:5557", 0) == "tcp://*:5557"
    with Published(kv_events=endpoint, kv_events_rank=2) as published:
        router = subscribed(published, context, f"{endpoint}_dp2")
        published.hold(A)
        router.read()
        assert router.batches[-1].data_parallel_rank == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kv_events": "5557"}, "kv_events is '5557'; it must be like"),
        ({"kv_events": "tcp://*"}, "kv_events is 'tcp://\\*'; it must be like"),
        ({"kv_events": ""}, "kv_events is ''; it must be like"),
        ({"kv_events": 5557}, "kv_events is 5557; it must be like"),
        ({"kv_events": "tcp://*:1", "kv_events_replay": "inproc://a"}, "kv_events_replay is 'inproc://a'"),
        ({"kv_events_replay": "tcp://*:5558"}, "kv_events_replay is .*Set kv_events too"),
        ({"kv_events_topic": "kv"}, "kv_events_topic is 'kv', .*Set kv_events too"),
        ({"kv_events_rank": 1}, "kv_events_rank is 1, .*Set kv_events too"),
        ({"kv_events_rank": -1}, "kv_events_rank"),
        ({"kv_events": "tcp://*:1", "enable_prefix_caching": False}, "caches no prefix"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        EngineConfig(**options)


def test_ports_that_replicas_would_share_are_refused():
    options = {"kv_events": "tcp://*:5557", "kv_events_replay": "tcp://*:5558"}
    EngineConfig.from_options(**options)
    with invalid(r"5558.*at least 2 apart"):
        EngineConfig.from_options(**options, data_parallel_size=2)
