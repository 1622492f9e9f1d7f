"""Hit rate of conversations on replicas whose router learns of their caches late; a table of docs/guide/simulator.md.

    python bench/machines/stale_index.py

One replica with the blocks of all is the measure. Costs are those of `simulator_replicas.py`; times are virtual.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import mean

from simulator_replicas import COSTS, default_config

from nanovllm.replicas.routing import POLICIES
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.tools.workloads.workloads import chat, poisson


def measure(num_replicas: int, num_blocks: int, delays: list[int], seeds: list[int]) -> None:
    config = replace(default_config(), num_kv_blocks=num_blocks + 1)
    pooled = replace(config, num_kv_blocks=num_replicas * num_blocks + 1)
    workloads = [
        poisson(chat(conversations=50 * num_replicas, turns=6, seed=seed), 10.0 * num_replicas, seed=seed)
        for seed in seeds
    ]
    alone = [simulate(workload, pooled, COSTS).figures()["hit_rate"] for workload in workloads]
    print(f"{num_replicas} replicas of {num_blocks} blocks; one of {num_replicas * num_blocks}: {mean(alone):.1%}")
    rows = [("round-robin", None), ("prefix-aware", None), *(("prefix-aware", delay) for delay in delays)]
    for policy, delay in rows:
        found = []
        for workload in workloads:
            route = POLICIES[policy]()
            run = simulate(workload, config, COSTS, num_replicas=num_replicas, route=route, index_delay=delay)
            found.append((run.figures(), [run.replica_of.count(index) for index in range(num_replicas)]))
        late = "sees the cache" if delay is None else f"{delay} steps late"
        ratios = [figures["hit_rate"] / whole for (figures, _), whole in zip(found, alone, strict=True)]
        print(
            f"  {policy:<14}{late:<16}{mean(figures['hit_rate'] for figures, _ in found):>7.1%}"
            f"  of one replica's {mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            f"{1e3 * mean(figures['ttft']['p99'] for figures, _ in found):>8.1f} ms TTFT p99"
            f"  requests each {min(min(each) for _, each in found)} to {max(max(each) for _, each in found)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--blocks", type=int, nargs="+", default=[512, 1024], help="for each replica")
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 10, 100, 1000], help="in steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    for num_replicas in options.replicas:
        for num_blocks in options.blocks:
            measure(num_replicas, num_blocks, options.delays, options.seeds)


if __name__ == "__main__":
    main()
