"""Hit rate of conversations on replicas whose router learns of their caches late; a table of docs/guide/simulator.md.

    python bench/machines/stale_index.py

One replica with the blocks of all is the measure. Costs are those of `simulator_replicas.py`; times are virtual.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from simulator_replicas import COSTS, default_config

from nanovllm.replicas.routing import POLICIES
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.tools.workloads.workloads import chat, poisson


def measure(num_replicas: int, num_blocks: int, delays: list[int]) -> None:
    workload = poisson(chat(conversations=50 * num_replicas, turns=6), 10.0 * num_replicas)
    config = replace(default_config(), num_kv_blocks=num_blocks + 1)
    pooled = replace(config, num_kv_blocks=num_replicas * num_blocks + 1)
    alone = simulate(workload, pooled, COSTS).figures()
    print(
        f"{num_replicas} replicas of {num_blocks} blocks; one of {num_replicas * num_blocks}: {alone['hit_rate']:.1%}"
    )
    rows = [("round-robin", None), ("prefix-aware", None), *(("prefix-aware", delay) for delay in delays)]
    for policy, delay in rows:
        simulation = simulate(
            workload, config, COSTS, num_replicas=num_replicas, route=POLICIES[policy](), index_delay=delay
        )
        found = simulation.figures()
        late = "sees the cache" if delay is None else f"{delay} steps late"
        print(
            f"  {policy:<14}{late:<16}{found['hit_rate']:>7.1%}{found['hit_rate'] / alone['hit_rate']:>7.3f}"
            f"{found['evictions']:>7} evictions{1e3 * found['ttft']['p99']:>8.1f} ms TTFT p99",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--blocks", type=int, nargs="+", default=[512, 1024], help="for each replica")
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 10, 100, 1000], help="in steps")
    options = parser.parse_args()
    for num_replicas in options.replicas:
        for num_blocks in options.blocks:
            measure(num_replicas, num_blocks, options.delays)


if __name__ == "__main__":
    main()
