"""The router's index of cached prefixes: fed by the block managers' events, it knows exactly what they hold."""

import random
from collections import Counter

import pytest

from nanovllm.block_manager import digest, root_hash
from nanovllm.features.kv_events.block_events import BlockEvents, Findable
from nanovllm.features.policies.walk import make_prompt, walk_at_random
from nanovllm.features.prompt_hashes import PromptHashes
from nanovllm.observability.step_records import StepObservers
from nanovllm.serving.replicas.prefix_index import MAX_EXPECTED, PrefixIndex, encode
from nanovllm.serving.replicas.replica_queue import ReplicaQueue
from nanovllm.serving.replicas.routing import prefix_aware
from tests.engine.blocks import SIZE, A, B, C, D, compute, computed, make_manager, release
from tests.support.public_options import make_sequence
from tests.support.scheduling import Loop, make_scheduler

SEED = "model:float32"


class Followed:
    """A block manager with the index of it, fed by `flush`."""

    def __init__(self, manager):
        self.manager, self.index = manager, PrefixIndex()
        self.seen = []
        BlockEvents.follow(manager, StepObservers(), lambda events: self.index.apply(encode(events)))
        BlockEvents.follow(manager, StepObservers(), self.seen.extend)

    def flush(self):
        self.manager.observer.flush()
        return self.index.held

    def is_exact(self):
        return self.flush() == set(self.manager.entries)


# ------------------------------------------------------------------------------------------------------------ fuzz


@pytest.mark.costly
@pytest.mark.parametrize("seed", range(8))
def test_the_index_is_what_the_block_manager_holds_after_any_calls(seed):
    """Preemption, aborts, failed steps, resets, NaN; batches of events of any number of calls."""
    rng = random.Random(seed)
    block_size, max_model_len = rng.choice((1, 2, 3, 4)), rng.randint(12, 28)
    loop = Loop(make_scheduler(
        block_size=block_size, max_model_len=max_model_len, max_num_seqs=rng.randint(2, 6),
        num_kv_blocks=2 + -(-max_model_len // block_size) + rng.randint(0, 8),
        max_num_batched_tokens=6 + block_size + rng.randint(0, 12),
    ))  # fmt: skip
    followed, seen = Followed(loop.manager), Counter()

    def compare():
        assert followed.is_exact()
        prompt = make_prompt(rng.randrange(3), rng.randint(0, max_model_len - 3), [rng.randrange(8)])
        salt = rng.choice(("", "salt"))
        num_hits = followed.index.num_hits(PromptHashes(prompt, block_size, cache_salt=salt))
        found = len(loop.manager.lookup(make_sequence(prompt, cache_salt=salt)))
        # Where a reset or a failed step cut a chain and its head was computed anew, its tail is held and not hit.
        assert num_hits >= found
        seen.update(compared=1, found=found > 0, stale=num_hits > found)

    walk_at_random(loop, rng, 1000, more={compare: 100})
    assert followed.is_exact()
    assert loop.scheduler.stats.num_preemptions and loop.manager.num_evictions
    assert seen["found"] > seen["compared"] // 20 and seen["stale"] <= seen["compared"] // 50


@pytest.mark.parametrize("seed", range(4))
def test_every_event_says_whose_child_the_block_is(seed):
    rng = random.Random(seed)
    loop = Loop(make_scheduler(max_model_len=28, num_kv_blocks=20, max_num_seqs=4))
    followed = Followed(loop.manager)
    walk_at_random(loop, rng, 1000, more={followed.flush: 20})
    findable = [event for event in followed.seen if isinstance(event, Findable)]
    assert {event.cache_salt for event in findable if event.parent_hash is None} == {"", "salt"}
    assert {event.cache_salt for event in findable if event.parent_hash is not None} == {""}
    for event in findable:
        parent = event.parent_hash or root_hash("", event.cache_salt)
        assert event.block_hash == digest(parent + event.tokens)


# --------------------------------------------------------------------------------------------------- single events


def hashes(tokens):
    """Of the whole blocks of a prompt that goes on behind them."""
    return set(PromptHashes([*tokens, 9], SIZE))


def test_a_content_is_held_until_the_last_of_its_blocks_is_gone():
    followed = Followed(make_manager(2))
    first, second = make_sequence(A), make_sequence(A, arrival=1)
    for sequence in (first, second):  # both were scheduled before either was findable
        followed.manager.allocate(sequence, 1)
        sequence.num_computed_tokens = SIZE
    for sequence in (first, second):
        followed.manager.register(sequence, 0, 1, step_id=1)
    held = set(followed.flush())
    assert held == hashes(A) and len(followed.seen) == 1
    release(followed.manager, first)
    computed(followed.manager, D)  # takes the first one's block
    assert held < followed.flush()
    release(followed.manager, second)
    computed(followed.manager, B)
    assert followed.flush() == hashes(D) | hashes(B)


def test_what_a_failed_step_made_findable_is_withdrawn():
    loop = Loop(make_scheduler())
    followed = Followed(loop.manager)
    loop.add([*A, *B, 9])
    loop.launch()
    assert len(followed.flush()) == 2
    loop.fail()
    assert followed.flush() == set()


def test_a_reset_empties_the_index_at_once():
    followed = Followed(make_manager(8))
    computed(followed.manager, [*A, *B])
    followed.manager.reset_prefix_cache()
    assert followed.index.held == set()
    computed(followed.manager, C)
    assert followed.is_exact() and len(followed.index.held) == 1


def test_a_batch_is_hardly_more_than_its_hashes():
    batches = []
    manager = make_manager(200)
    BlockEvents.follow(manager, StepObservers(), batches.append)
    computed(manager, list(range(100 * SIZE)), max_model_len=512)
    manager.observer.flush()
    (events,) = batches
    assert len(events) == 100
    assert len(encode(events)) == 100 * 16 + 5
    assert encode([event._replace(of_states=True) for event in events]) == b""


# ------------------------------------------------------------------------------------------------ batches of an engine


def test_events_come_once_a_step_and_with_the_next_request():
    manager, observers, batches = make_manager(8), StepObservers(), []
    BlockEvents.follow(manager, observers, batches.append)
    computed(manager, [*A, *B])
    assert batches == []
    observers.notify("step_ended", None, None)
    observers.notify("step_ended", None, None)
    assert [len(batch) for batch in batches] == [2]
    computed(manager, C)
    observers.notify("request_added", [])
    assert [len(batch) for batch in batches] == [2, 1]


def test_a_receiver_that_raises_is_dropped_and_the_others_are_not(caplog):
    manager, observers, batches = make_manager(8), StepObservers(), []

    def broken(events):
        raise OSError("no pipe")

    BlockEvents.follow(manager, observers, broken)
    BlockEvents.follow(manager, observers, batches.append)
    for tokens in (A, B):
        computed(manager, tokens)
        manager.observer.flush()
    assert [len(batch) for batch in batches] == [1, 1]
    assert len(caplog.records) == 1


def test_an_engine_that_holds_blocks_already_is_not_followed():
    manager = make_manager(8)
    computed(manager, A)
    with pytest.raises(RuntimeError, match="1 blocks are findable already"):
        BlockEvents.follow(manager, StepObservers(), print)


# ------------------------------------------------------------------------------------------------------- expectations


class View:
    """A replica without load."""

    num_waiting = num_running = 0

    def __init__(self):
        self.index = PrefixIndex()
        self.num_hits = self.index.num_hits


def test_a_burst_with_one_prefix_stays_on_one_replica_before_any_event():
    views, route, chosen = [View(), View(), View()], prefix_aware(), []
    for number in range(6):
        hashes = PromptHashes([*A, *B, *C, number], SIZE, hash_seed=SEED)
        chosen.append(route(hashes, views))
        views[chosen[-1]].index.expect(str(number), hashes)
    assert len(set(chosen)) == 1


def test_what_was_expected_is_forgotten_once_all_that_expect_it_have_settled():
    index, prompt = PrefixIndex(), PromptHashes([*A, *B, 9], SIZE)
    index.expect("one", prompt)
    index.expect("two", PromptHashes([*A, 9], SIZE))
    assert index.num_hits(prompt) == 2
    for settled, num_hits in (("one", 1), ("two", 0), ("two", 0)):
        index.settle(settled)
        assert index.num_hits(prompt) == num_hits


def test_what_events_confirm_stays_when_a_request_settles():
    followed = Followed(make_manager(8))
    hashes = PromptHashes([*A, *B, 9], SIZE)
    followed.index.expect("one", hashes)
    compute(followed.manager, make_sequence([*A, *B, 9]))
    followed.flush()
    followed.index.settle("one")
    assert followed.index.num_hits(hashes) == 2


def test_a_long_prompt_is_hashed_no_further_than_needed():
    known = []
    hashes = PromptHashes(range(10_000), SIZE, known=known)
    index = PrefixIndex()
    assert index.num_hits(hashes) == 0 and len(known) == 1
    index.expect("long", hashes)
    assert len(known) == MAX_EXPECTED


def test_a_restarted_replica_holds_nothing():
    followed = Followed(make_manager(8))
    computed(followed.manager, A)
    followed.flush()
    followed.index.expect("one", PromptHashes([*B, 9], SIZE))
    queue = ReplicaQueue(0)
    queue.prefixes = followed.index
    queue.bury(0.0)
    assert [followed.index.num_hits(PromptHashes([*tokens, 9], SIZE)) for tokens in (A, B)] == [0, 0]
    followed.index.settle("one")
