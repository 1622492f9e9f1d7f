"""Random walks of a scheduler with a policy: any order of calls, on a loop that checks every invariant after each."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from nanovllm.block_manager import BlockManager
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_groups import CacheGroups
from nanovllm.features.groups.state_kinds import FULL, StateKind
from nanovllm.features.policies.loop import MAX_IN_FLIGHT, Loop
from nanovllm.features.policies.mock_states import check
from nanovllm.features.policies.opening import kind_of, set_policies
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence

AnyLoop = TypeVar("AnyLoop", bound=Loop)

CLIENTS = ("", "", "", "b", "c")
WEIGHTS = (None, None, {"b": 4.0}, {"b": 0.5, "c": 2.0})
AGEING = (None, None, 0.5, 4.0)  # powers of two, so that times over them are exact
KINDS: tuple[Callable[[int], list[StateKind]], ...] = (
    lambda span: [FULL],
    lambda span: [StateKind(window=span)],
    lambda span: [StateKind(chunk=span)],
    lambda span: [StateKind(window=span + 3), StateKind(window=span)],
    lambda span: [FULL, StateKind(window=span)],
    lambda span: [FULL, StateKind(window=span), StateKind(window=1 + span // 2, chunk=span)],
    lambda span: [FULL, StateKind.record(5000)],
    lambda span: [FULL, StateKind(window=span), StateKind.record(5000)],
)
# Prompts begin with one of these, cut anywhere, so that prefixes are shared, and end inside a block as often as not.
STEMS = ([0] * 24, [1, 2, 3, 4, 5, 6, 7, 0] * 3, [1, 2, 3, 4, 5, 6, 7, 1] * 3)


class Sizes(NamedTuple):
    """Sizes of a random engine: pools hardly larger than one sequence needs, and limits as tight.

    kinds: kind of each cache group.
    num_blocks: blocks of each group's pool.
    """

    kinds: list[StateKind]
    num_blocks: list[int]
    block_size: int
    limits: dict[str, Any]

    @classmethod
    def drawn(cls, rng: random.Random) -> Sizes:
        kinds = rng.choice(KINDS)(rng.randint(1, 12))
        block_size = rng.choice((1, 2, 3, 4))
        max_num_seqs = rng.randint(1, 6)
        max_model_len = rng.randint(8, 28)
        max_long = rng.choice((1, 1, 2, 6))
        limits = {
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_seqs + block_size + rng.randint(0, 16),
            "long_prefill_token_threshold": rng.randint(1, 6) * block_size,
            "max_long_partial_prefills": max_long,
            "max_num_partial_prefills": max(max_long, rng.randint(1, 4)),
            "priority_ageing_s": rng.choice(AGEING),
            "client_weights": rng.choice(WEIGHTS),
        }
        counts = [1 + kind.max_blocks(max_model_len, block_size) + rng.randint(0, 6) for kind in kinds]
        return cls(kinds, counts, block_size, limits)


def check_policy(
    policy: Callable[..., Any] | str, *, num_walks: int = 40, num_calls: int = 200, first_seed: int = 0
) -> None:
    """Walk at random with a queue or a budget, without a model; every invariant has to hold after each call.

    Each walk draws an engine with scarce blocks, slots and tokens, with full attention, windows or recurrent states,
    and calls in any order: requests of clients with priorities, salts and samples, steps in flight, failed and undone
    ones, aborts, NaN. After each call: blocks are neither lost nor given out twice, steps keep their budget and the
    limits, tokens in flight and outcomes are right, every request that waits is in the queue once, sequences advance;
    at the end every request has the tokens that it has alone.

    Args:
        policy: Class, function or name, as in `EngineConfig.policies`.
        num_calls: Calls of each walk, before all requests run to their end.
        first_seed: Seed of the first walk; the others follow.

    Raises AssertionError with seed, step and invariant for a policy that breaks one, from the error itself; ValueError
    or TypeError for anything but a policy.
    """
    kind = kind_of(policy)
    for seed in range(first_seed, first_seed + num_walks):
        _walk(kind, policy, seed, num_calls)


def _walk(kind: str, policy: Callable[..., Any] | str, seed: int, num_calls: int) -> None:
    rng = random.Random(seed)
    options = {"policies": {kind: policy}, "enable_prefix_caching": seed % 5 != 3}
    loop = Loop(scheduler_of(Sizes.drawn(rng), options))
    try:
        set_policies(loop.scheduler, lambda: loop.now)
        walk_at_random(loop, rng, num_calls)
    except Exception as error:
        raise AssertionError(
            f"policy {policy!r} breaks an invariant in the walk of seed {seed}, step "
            f"{loop.scheduler.stats.num_steps}: {type(error).__name__}: {error}. "
            f"check_policy(..., num_walks=1, first_seed={seed}) repeats it."
        ) from error


def scheduler_of(sizes: Sizes, options: dict[str, Any]) -> Scheduler:
    """A scheduler of these sizes, with further options in its config."""
    config = make_config(num_kv_blocks=sizes.num_blocks[0], **(sizes.limits | {"client_weights": None} | options))
    caches = config.enable_prefix_caching
    manager = (
        BlockManager(config.num_kv_blocks, sizes.block_size, enable_prefix_caching=caches)
        if sizes.kinds == [FULL]
        else CacheGroups(
            sizes.kinds,
            sizes.num_blocks,
            sizes.block_size,
            max_model_len=config.max_model_len,
            max_chunk_tokens=config.long_prefill_token_threshold,
            enable_prefix_caching=caches,
        )
    )
    return Scheduler(config, manager)


def make_config(**limits: Any) -> EngineConfig:
    """A resolved config; limits that a test does not set are out of reach."""
    defaults: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 64,
        "num_kv_blocks": 1025,
        "max_num_partial_prefills": 64,
        "max_long_partial_prefills": 64,
        "long_prefill_token_threshold": 1024,
    }
    return EngineConfig(**(defaults | limits))


def make_prompt(stem: int, length: int, tail: list[int]) -> list[int]:
    return STEMS[stem][:length] + tail


def reset_prefix_cache(loop: Loop) -> None:
    loop.manager.reset_prefix_cache()
    loop.check()


def drop_computed(loop: Loop) -> None:
    """Compute all KV again, as the engine does after its weights changed."""
    while loop.in_flight:
        loop.read()
    loop.scheduler.preempt_all()
    loop.manager.reset_prefix_cache()
    loop.check()


def end(loop: Loop, depth: int) -> None:
    """Run to the end; Loop.drain bounds the number of steps, so that starvation is an error."""
    loop.drain(depth)
    loop.check_outputs()
    loop.manager.reset_prefix_cache()
    loop.check()
    check(loop.launch() is None, "something is left to do behind the end")


class Walk:
    """Calls of a loop in random order.

    Args:
        samples: Numbers of samples that a request may have.
        max_unfinished: Number of requests from which on none is added.
    """

    def __init__(self, loop: Loop, rng: random.Random, *, samples: tuple[int, ...], max_unfinished: int) -> None:
        self.loop = loop
        self.rng = rng
        self.samples = samples
        self.max_unfinished = max_unfinished
        self.max_model_len = loop.scheduler.config.max_model_len
        self.depth = rng.randint(1, MAX_IN_FLIGHT)

    def calls(self) -> dict[Callable[[], object], int]:
        """Each call with its weight."""
        loop = self.loop
        return {
            self.add: 30, self.launch: 100, self.read: 10, self.fail: 5, self.abort: 4, self.turn_non_finite: 4,
            self.undo: 2, self.fork: 8, lambda: reset_prefix_cache(loop): 1, lambda: drop_computed(loop): 1,
        }  # fmt: skip

    def add(self) -> None:
        rng = self.rng
        if len(self.loop.unfinished) < self.max_unfinished:
            tail = [rng.randrange(8) for _ in range(rng.randint(1, 3))]
            self.loop.add_samples(
                rng.choice(self.samples) if len(self.samples) > 1 else self.samples[0],
                make_prompt(rng.randrange(len(STEMS)), rng.randint(0, 24), tail)[: self.max_model_len - 1],
                priority=rng.choice((0, 0, 0, 1, -1)),
                cache_salt=rng.choice(("", "", "", "salt")),
                client=rng.choice(CLIENTS),
                max_tokens=rng.choice((None, rng.randint(1, 12))),
                stop_token_ids=rng.choice(((), (), (0,), (3, 5))),
            )

    def launch(self, non_finite: tuple[str, ...] = ()) -> None:
        self.loop.now += self.rng.choice((0, 0, 1, 3))
        if len(self.loop.in_flight) >= self.depth:
            self.loop.read()
        self.loop.launch(non_finite)

    def read(self) -> None:
        if self.loop.in_flight:
            self.loop.read()

    def one_of_the_unfinished(self) -> list[Sequence]:
        return [self.rng.choice(self.loop.unfinished)] if self.loop.unfinished else []

    def fail(self) -> None:
        if self.loop.in_flight:
            self.loop.fail(self.rng.randrange(len(self.loop.in_flight)))

    def abort(self) -> None:
        for sequence in self.one_of_the_unfinished():
            self.loop.abort(sequence)

    def undo(self) -> None:
        """Undo steps as an engine without requests does, or compute all KV again."""
        if self.loop.in_flight:
            self.loop.fail(has_failed=False)
        if self.rng.random() < 0.3:
            self.loop.scheduler.preempt_all()
            self.loop.check()

    def fork(self) -> None:
        loop = self.loop
        rng = self.rng
        if loop.scheduler.running and len(loop.unfinished) < self.max_unfinished:
            source = rng.choice(loop.scheduler.running)
            num_known = len(source.token_ids)
            at = rng.choice((num_known, rng.randint(1, num_known)))
            if at < self.max_model_len:
                loop.fork(source, at, client=rng.choice(CLIENTS), max_tokens=rng.choice((None, rng.randint(1, 12))))

    def turn_non_finite(self) -> None:
        self.launch(tuple(sequence.request_id for sequence in self.one_of_the_unfinished()))


def walk_at_random(
    loop: AnyLoop,
    rng: random.Random,
    num_calls: int,
    *,
    samples: tuple[int, ...] = (1, 1, 1, 2, 4),
    more: Mapping[Callable[[], object], int] | None = None,
    max_unfinished: int = 12,
) -> AnyLoop:
    """`num_calls` calls in random order, then to the end.

    Args:
        samples: Numbers of samples that a request may have.
        more: Calls besides those of any scheduler, each with its weight; `launch` has 100.
        max_unfinished: Number of requests from which on none is added.
    """
    walk = Walk(loop, rng, samples=samples, max_unfinished=max_unfinished)
    calls = walk.calls() | dict(more or {})
    for call in rng.choices(list(calls), list(calls.values()), k=num_calls):
        call()
    end(loop, walk.depth)
    return loop
