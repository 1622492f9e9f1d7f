"""Routing policies on 1 to 1,024 simulated replicas; prints the table and draws the plot of docs/guide/simulator.md.

    python bench/machines/simulator_replicas.py --plot docs/images/routing.svg

The workload is of P1's kind: each request has one of several long system prompts, drawn evenly, and a few tokens of its
own; arrivals are Poisson, so many a second for each replica. Without --calibration the costs are `COSTS`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from nanovllm.core.config import EngineConfig
from nanovllm.core.one_pool import resolve_pool
from nanovllm.execution.cost_model import CostModel, DeviceCost, HostCost
from nanovllm.replicas.routing import POLICIES
from nanovllm.tools.simulate.calibration import Calibration
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.tools.workloads.workloads import TimedRequest, Workload

# Round figures of the order of a model of 0.6 billion parameters on one H200, not a calibration: weights and small
# kernels 1.8 ms, 3.3 us of arithmetic a token, K and V of 115 kB a token at 4.3 TB/s.
COSTS = CostModel(
    schedule=HostCost(5e-5, 1e-6),
    device=DeviceCost(
        knee=64,
        fixed=1.8e-3,
        per_token_above=3.3e-6,
        per_decode=2.5e-6,
        per_context_token=27e-9,
        per_shared_context_token=27e-9,
        per_chunk_pair=2e-10,
    ),
    update=HostCost(5e-5, 1e-6),
    launch_blocks=False,
)
# The pool holds half of the system prompts, or a few of them beside the requests that run.
OPTIONS = {"num_kv_blocks": 513, "max_model_len": 4096}


def p1_like(
    num_requests: int, rate: float, *, num_prompts: int, shared_tokens: int, own_tokens: int, output_tokens: int
) -> Workload:
    """Poisson arrivals, `rate` a second in all; token ids are drawn from a seed."""
    r = random.Random(0)
    prompts = [r.choices(range(10_000), k=shared_tokens) for _ in range(num_prompts)]
    requests, now = [], 0.0
    for _ in range(num_requests):
        now += r.expovariate(rate)
        requests.append(TimedRequest(now, r.choice(prompts) + r.choices(range(10_000), k=own_tokens), output_tokens))
    return Workload(f"{num_requests} requests of {num_prompts} system prompts, {rate:g}/s", requests)


def default_config() -> EngineConfig:
    limits = EngineConfig(**OPTIONS).resolve_limits("cuda", OPTIONS["max_model_len"])
    return resolve_pool(limits, 1, 0, max_model_len_is_set=True)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    cost_model, config = COSTS, default_config()
    if options.calibration:
        calibration = Calibration.load(options.calibration)
        cost_model, config = calibration.cost_model, calibration.resolve(EngineConfig(**OPTIONS))
    rows = []
    print(
        f"{'replicas':>8} {'policy':<14}{'requests':>9}{'tokens/s':>11}{'hit rate':>9}{'TTFT p50':>10}{'p99 ms':>10}"
        f"{'ITL p50':>10}{'p99 ms':>10}{'virtual s':>10}{'took s':>8}"
    )
    for num_replicas in options.replicas:
        workload = p1_like(
            options.requests * num_replicas,
            options.rate * num_replicas,
            num_prompts=options.prompts,
            shared_tokens=options.shared,
            own_tokens=options.own,
            output_tokens=options.output,
        )
        for policy in options.policies:
            if num_replicas == 1 and policy != "round-robin":
                continue  # there is nothing to choose
            begin = time.process_time()
            simulation = simulate(workload, config, cost_model, num_replicas=num_replicas, route=POLICIES[policy]())
            took, figures = time.process_time() - begin, simulation.figures()
            rows.append({"replicas": num_replicas, "policy": policy, "took": took} | figures)
            milliseconds = [1e3 * figures[name][key] for name in ("ttft", "itl") for key in ("p50", "p99")]
            print(
                f"{num_replicas:>8} {policy:<14}{len(workload.requests):>9}{figures['output_tokens_per_second']:>11.0f}"
                f"{figures['hit_rate']:>9.1%}" + "".join(f"{value:>10.1f}" for value in milliseconds)
                + f"{figures['seconds']:>10.2f}{took:>8.1f}",
                flush=True,
            )  # fmt: skip
    return rows


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Hit rate and p99 TTFT over the number of replicas (needs the extra `plot`)."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "nanovllm"  # the same bytes each time
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    panels = (
        ("prompt tokens from the prefix cache, %", lambda row: 100 * row["hit_rate"]),
        ("time to first token, p50, ms", lambda row: 1e3 * row["ttft"]["p50"]),
        ("time to first token, p99, ms", lambda row: 1e3 * row["ttft"]["p99"]),
    )
    for axis, (title, value) in zip(axes, panels, strict=True):
        for policy in POLICIES:
            of_policy = [row for row in rows if row["policy"] == policy or row["replicas"] == 1]
            axis.plot([row["replicas"] for row in of_policy], list(map(value, of_policy)), marker="o", label=policy)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("replicas")
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64, 1024])
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--requests", type=int, default=32, help="for each replica")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second, for each replica")
    parser.add_argument("--prompts", type=int, default=32, help="different system prompts")
    parser.add_argument("--shared", type=int, default=2000, help="tokens of a system prompt")
    parser.add_argument("--own", type=int, default=64, help="tokens of a request's own")
    parser.add_argument("--output", type=int, default=64, help="tokens that a request generates")
    parser.add_argument("--calibration", metavar="FILE", help="costs from `nanovllm calibrate`")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--plot", metavar="FILE", help="draw the figures")
    options = parser.parse_args()
    rows = measure(options)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
