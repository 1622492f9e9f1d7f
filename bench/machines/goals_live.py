"""Latency goals and fixed budgets on one loaded engine, in turn: a figure for a GPU in minutes, loading included.

    python bench/machines/goals_live.py                                      an 8B model, random weights
    python bench/machines/goals_live.py --shape 135m --goals 100ms --budgets 1024 128 --scale 0.25

A batch of everything at once comes first, with each setting: its price in tokens/s. Its rate with the largest budget,
times `--of-batch`, counts as the capacity; then all settings play the same requests at shares of that. Opening an
engine for each setting, as `goals_by_rate.py` does, would load the weights each time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.machines.goals_by_rate import metrics_of
from bench.machines.random_models import checkpoint, device
from bench.machines.traffic_engines import OurStreaming, play
from bench.machines.traffic_requests import params_of
from nanovllm.features.goals.step_budget import StepBudget
from nanovllm.scheduler import WholeBudget
from nanovllm.tools.simulate.simulator import figures
from nanovllm.tools.tune.goals import RequestGoals, duration
from nanovllm.tools.workloads.specs import build
from nanovllm.tools.workloads.workloads import Workload

LIMIT = 1.2  # of a gap over the goal
HEAD = "| traffic | budget | TTFT p50 / p99 s | ITL p50 / p99 / worst ms | {} | tokens/s | margin, error |"

Switch = Callable[[Any], None]


class Live(OurStreaming):
    """One engine whose budget is switched between plays; its costs learn from all of them."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        super().__init__(model, options)
        engine = self._llm._engine_thread._engine
        self._budget, self._config = engine.scheduler.budget, engine.scheduler.config

    async def switch(self, goal: float | None, budget: int) -> None:
        """Set the goal and the largest budget, while nothing runs."""
        whole = self._config
        threshold = max(whole.block_size, whole.long_prefill_token_threshold * budget // whole.max_num_batched_tokens)
        config = replace(whole, itl_goal=goal, max_num_batched_tokens=budget, long_prefill_token_threshold=threshold)

        def apply(engine: Any) -> None:
            scheduler = engine.scheduler
            scheduler.config = scheduler.admission.config = config
            scheduler.budget = (
                WholeBudget(config) if goal is None else StepBudget(config, self._budget._costs, engine.clock)
            )

        await asyncio.wrap_future(self._llm._engine_thread.submit(apply))

    @property
    def fit(self) -> str:
        fit = self._budget._costs.fit
        return f"{fit.margin:.2f}, {fit.error or 0.0:.1%}"


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begin = time.monotonic()
        self.settings = [(None, budget) for budget in options.budgets]
        self.settings[1:1] = [(goal, options.budgets[0]) for goal in options.goals]
        self.limits = [RequestGoals(options.goal_ttft, LIMIT * goal) for goal in options.goals]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def workload(self, count: int, rate: float, seed: int) -> Workload:
        scale = self.options.scale
        return build(
            f"{self.options.traffic}:requests={round(count / scale)},scale={scale},rate={rate:.4g},seed={seed}"
        )

    async def row(self, engine: Live, name: str, workload: Workload, setting: tuple[float | None, int]) -> float:
        """Play and print; returns the requests a second."""
        goal, budget = setting
        await engine.switch(goal, budget)
        await engine.reset_prefix_cache()
        requests = metrics_of(await play(engine, workload, params_of(workload)))
        found = figures(requests, [])
        kept = " / ".join(f"{limits.figures(requests, 1.0)['share']:.3f}" for limits in self.limits)
        ttft, itl = found["ttft"], [1e3 * found["itl"][key] for key in ("p50", "p99", "max")]
        print(
            f"| {name} | {f'goal {1e3 * goal:g} ms' if goal else budget} | {ttft['p50']:.3f} / {ttft['p99']:.3f} "
            f"| {itl[0]:.1f} / {itl[1]:.1f} / {itl[2]:.1f} | {kept} | {found['output_tokens_per_second']:,.0f} "
            f"| {engine.fit} |",
            flush=True,
        )
        return len(requests) / float(found["seconds"])

    async def run(self) -> None:
        options = self.options
        model = str(checkpoint(options.shape))
        print(f"weights of {options.shape} written after {self.seconds:.0f} s", flush=True)
        engine = Live(model, {"dtype": "bfloat16", "max_num_batched_tokens": options.budgets[0],
                              "itl_goal": options.goals[0], "max_num_seqs": options.max_num_seqs})  # fmt: skip
        print(f"engine ready after {self.seconds:.0f} s: {engine.fit}", flush=True)
        warm = self.workload(options.batch, 1.0, seed=9).first(options.batch // 4).hurried()
        await play(engine, warm, params_of(warm))
        await asyncio.sleep(options.idle)  # graphs are captured while idle
        limits = ", ".join(map(str, self.limits))
        print(HEAD.format(f"within {limits}") + f"\n{'|---' * 7}|", flush=True)
        whole = self.workload(options.batch, 1.0, seed=0).hurried()
        rates = {setting: await self.row(engine, "at once", whole, setting) for setting in self.settings}
        capacity = options.of_batch * rates[self.settings[0]]
        for share in options.shares:
            workload = self.workload(round(options.play * share * capacity), share * capacity, round(100 * share))
            for setting in self.settings:
                if self.seconds + 1.3 * options.play > options.seconds:
                    print(f"{share:g} {setting}: left out after {self.seconds:.0f} s", flush=True)
                    continue
                await self.row(engine, f"{share:g}: {share * capacity:.3g}/s", workload, setting)
        await engine.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", help="of the model with random weights")
    parser.add_argument("--traffic", default="azure-conv", help="workload with a rate")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--goals", nargs="+", type=duration, default=[0.05, 0.025], metavar="TIME", help="of ITL")
    parser.add_argument("--goal-ttft", type=duration, default=1.0, metavar="TIME", help="limit of a first token")
    parser.add_argument("--budgets", nargs="+", type=int, default=[8192, 512], help="fixed ones, the goals' first")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.8, 1.0, 0.5], help="of the capacity")
    parser.add_argument("--of-batch", type=float, default=0.84, help="capacity over the rate of a batch at once")
    parser.add_argument("--batch", type=int, default=200, help="requests at once")
    parser.add_argument("--play", type=float, default=13.0, help="seconds in which a play's requests arrive")
    parser.add_argument("--idle", type=float, default=15.0 if device() == "cuda" else 0.0, help="seconds of captures")
    parser.add_argument("--max-num-seqs", type=int, default=256 if device() == "cuda" else 64)
    parser.add_argument("--seconds", type=float, default=240.0, help="no play begins that would end later")
    options = parser.parse_args(arguments)
    options.budgets.sort(reverse=True)
    asyncio.run(Bench(options).run())


if __name__ == "__main__":
    main()
