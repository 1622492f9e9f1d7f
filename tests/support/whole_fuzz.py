"""One fuzz of everything that the scheduler and the block managers do together, at any size.

    python -m tests.support.whole_fuzz --steps 1000000 --seconds 180

Each walk draws a kind of cache, limits, costs and features, and calls in any order: requests of clients, samples,
forks, aborts, steps in flight, failed and undone ones, idle time. Loop checks every invariant after each call, and the
mock model every read of every step.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from nanovllm.features.groups.state_kinds import FULL
from nanovllm.features.policies.opening import set_policies
from nanovllm.features.policies.walk import Sizes, walk_at_random
from nanovllm.scheduler import Scheduler, WaitingQueue
from tests.support.mock_drafts import GuessingDrafter, with_drafts
from tests.support.scheduling import Loop, make_group_scheduler, make_scheduler
from tests.support.step_costs import RandomCosts, make_budget
from tests.support.tiers import TieredLoop, make_tiered_scheduler

NUM_CALLS = 200


def make_loop(rng: random.Random, *, has_shares: bool = True, policies: Mapping[str, type] | None = None) -> Loop:
    """A loop with pools hardly larger than one sequence needs, and any features; the plain queue without shares."""
    kinds, counts, block_size, limits = Sizes.drawn(rng)
    has_tiers, has_drafts, has_goal = (rng.random() < 0.4 for _ in range(3))
    scheduler: Scheduler
    if has_tiers:
        scheduler = make_tiered_scheduler(kinds, counts, block_size=block_size, **limits)
    elif kinds == [FULL]:
        scheduler = make_scheduler(block_size=block_size, num_kv_blocks=counts[0], **limits)
    else:
        scheduler = make_group_scheduler(kinds, counts, block_size=block_size, **limits)
    if has_goal:
        costs, most = RandomCosts(rng), limits["max_num_batched_tokens"]
        options = {"block_size": block_size, "max_num_batched_tokens": most, "ttft_goal": rng.choice((None, 1.0))}
        options["long_prefill_token_threshold"] = limits["long_prefill_token_threshold"]
        scheduler.budget = make_budget(rng.choice((1e-3, 0.1, 10.0)), costs, overlap=rng.random() < 0.5, **options)
    if not has_shares:
        scheduler.waiting = WaitingQueue()
    if policies:
        scheduler.config = replace(scheduler.config, client_weights=None, policies=policies)
        set_policies(scheduler, lambda: 0.0)
    if has_drafts:
        drafter = GuessingDrafter(rng, share_right=rng.choice((0.0, 0.5, 0.9)), share_of_steps=rng.choice((0.5, 1.0)))
        scheduler = with_drafts(scheduler, drafter, max_drafts=rng.randint(1, 7))
    if has_tiers:
        return TieredLoop(scheduler, rng, num_slots=rng.randint(2, 30), has_files=rng.random() < 0.8)
    return Loop(scheduler)


def walk(seed: int, *, policies: Mapping[str, type] | None = None) -> Loop:
    rng = random.Random(seed)
    loop = make_loop(rng, has_shares=seed % 10 != 4, policies=policies)
    more = {loop.idle: 20} if isinstance(loop, TieredLoop) else {}
    return walk_at_random(loop, rng, NUM_CALLS, more=more, max_unfinished=rng.choice((2, 4, 12)))


def main() -> int:
    """Walk until so many steps ran, or the time is over; prints the seed of each walk that breaks an invariant."""
    parser = argparse.ArgumentParser(description="Walks of scheduler and block managers that check every invariant.")
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps of all walks")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time; --seed goes on")
    parser.add_argument("--seed", type=int, default=0, help="of the first walk")
    options = parser.parse_args()
    seed, num_steps, num_broken, met = options.seed, 0, 0, Counter[str]()
    end = time.monotonic() + options.seconds
    while num_steps < options.steps and time.monotonic() < end:
        try:
            loop = walk(seed)
        except Exception:
            num_broken += 1
            print(f"seed {seed}:\n{traceback.format_exc()}", flush=True)
        else:
            num_steps += loop.scheduler.stats.num_steps
            met += loop.seen
        seed += 1
    print(f"{num_steps} steps, seeds {options.seed} to {seed - 1}, {num_broken} broken; {dict(met)}")
    return num_broken > 0


if __name__ == "__main__":
    sys.exit(main())
