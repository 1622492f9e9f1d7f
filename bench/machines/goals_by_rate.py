"""Latency goals against fixed budgets on real traffic, at shares of the capacity: simulated, and on this machine.

    python bench/machines/goals_by_rate.py                          an 8B model on an H200, simulated by arithmetic
    python bench/machines/goals_by_rate.py --costs costs.json       a machine of `nanovllm calibrate`, simulated
    python bench/machines/goals_by_rate.py --noise quiet --seeds 6  steps that vary as measured ones do, six plays a row
    python bench/machines/goals_by_rate.py --measure --minutes 20   this machine, measured too

Measured are the embedded model on a CPU, and random weights in the shape of Qwen3-0.6B on a GPU.

The capacity of a workload is the highest rate at which a fixed budget of the list still keeps `--kept` of the requests
within the limits of `--goal-ttft` and `--goal-itl`, by simulation. At each share of it all settings play the same
requests; each rate draws others. Rows are printed as they come, those of the goal first, and a verdict for each rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.machines.assumed_costs import NOISE, by_arithmetic, noisy
from bench.machines.random_models import NoText, checkpoint, device
from bench.machines.traffic_engines import OurStreaming, play
from bench.machines.traffic_requests import params_of
from nanovllm.features.engine_config import EngineConfig
from nanovllm.outputs import RequestMetrics
from nanovllm.tools.bench.replay import Replay
from nanovllm.tools.simulate.calibrate import calibrate
from nanovllm.tools.simulate.calibration import Calibration
from nanovllm.tools.simulate.simulator import figures, simulate
from nanovllm.tools.tune.goals import RequestGoals, add_request_goal_flags, duration
from nanovllm.tools.workloads.specs import build
from nanovllm.tools.workloads.workloads import Workload

DEFAULT_MODEL, GPU_SHAPE = "smollm2-135m-instruct", "0.6b"
WARM_UPS = 16  # requests
AT_LEAST = {"share": -0.01, "throughput": 0.98, "itl": 1.1}  # of the goal against the best fixed budget

Options = dict[str, Any]
Play = Callable[[Workload, Options], list[RequestMetrics]]


@dataclass(frozen=True, slots=True)
class Preset:
    """Defaults for a machine; times in seconds."""

    budgets: tuple[int, ...]
    itl_goal: float
    limits: RequestGoals
    requests: int
    scale: float


PRESETS = {
    "8b": Preset((256, 512, 768, 1024, 8192), 0.025, RequestGoals(1.0, 0.03), 2000, 1.0),
    "cpu": Preset((128, 256, 512, 1024), 0.1, RequestGoals(2.0, 0.12), 400, 0.25),
    "cuda": Preset((512, 1024, 2048, 8192), 0.01, RequestGoals(0.5, 0.012), 2000, 1.0),
}


# --------------------------------------------------------------------------------------------------------- experiments


@dataclass(frozen=True, slots=True)
class Row:
    """One setting at one rate. Latencies are in seconds.

    kept: share of the requests within the limits.
    """

    source: str
    traffic: str
    share: float
    rate: float
    setting: str
    kept: float
    ttft: dict[str, float]
    itl: dict[str, float]
    tokens_per_second: float

    def __str__(self) -> str:
        times = f"{self.ttft['p50']:.3f} / {self.ttft['p99']:.3f}"
        gaps = f"{1e3 * self.itl['p99']:.0f} / {1e3 * self.itl['max']:.0f}"
        head = f"| {self.source} | {self.traffic} | {self.share:g}: {self.rate:.3g}/s | {self.setting} "
        return f"{head}| {self.kept:.3f} | {times} | {gaps} | {self.tokens_per_second:,.0f} |"


HEAD = """| | traffic | of capacity | budget | within limits | TTFT p50 / p99 s | ITL p99 / worst ms | tokens/s |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class Bench:
    """What is compared.

    settings: engine options by name; those with an `itl_goal` come first.
    """

    options: argparse.Namespace
    limits: RequestGoals
    settings: dict[str, Options]

    def workload(self, traffic: str, rate: float, seed: int) -> Workload:
        scale, requests = self.options.scale, round(self.options.requests / self.options.scale)
        return build(f"{traffic}:requests={requests},scale={scale},rate={rate:.4g},seed={seed}")

    def row(self, source: str, traffic: str, share: float, rate: float, setting: str, play: Play) -> Row:
        first, options = 1 + round(100 * share), self.settings[setting]
        plays = [play(self.workload(traffic, rate, first + 1000 * n), options) for n in range(self.options.seeds)]
        requests = [request for played in plays for request in played]
        found, kept = figures(requests, []), self.limits.figures(requests, 1.0)["share"]
        tokens_per_second = mean(figures(played, [])["output_tokens_per_second"] for played in plays)
        return Row(source, traffic, share, rate, setting, kept, found["ttft"], found["itl"], tokens_per_second)

    def capacity(self, traffic: str, play: Play) -> tuple[float, str]:
        """Requests a second, and the budget that reaches them, by bisection to 4 %."""
        budgets = [name for name, options in self.settings.items() if "itl_goal" not in options]

        def keeper(rate: float) -> str | None:
            workload = self.workload(traffic, rate, seed=0)
            for name in list(budgets):
                kept = self.limits.figures(play(workload, self.settings[name]), 1.0)["share"]
                print(f"  {traffic} at {rate:.3g}/s: budget {name} keeps {kept:.3f}", flush=True)
                if kept >= self.options.kept:
                    budgets.remove(name)
                    budgets.insert(0, name)  # it is the likeliest at the next rate
                    return name
            return None

        whole = self.workload(traffic, 1.0, seed=0).hurried()
        ends = [metrics.finished_time or 0.0 for metrics in play(whole, self.settings[budgets[-1]])]
        high = len(whole.requests) / max(ends)
        low, best = 0.0, budgets[0]
        while high > 1.04 * low:
            rate = (low * high) ** 0.5 if low else high / 2
            if (name := keeper(rate)) is not None:
                low, best = rate, name
            else:
                high = rate
            if high < 1e-3:
                raise RuntimeError(f"no rate of {traffic} keeps {self.options.kept:.0%} of the requests within limits")
        return low, best


def verdict(rows: list[Row], itl_goal: float) -> Iterator[str]:
    """For each rate, the goal against the best fixed budget, which is the one that keeps most requests."""
    for source, traffic, share in dict.fromkeys((row.source, row.traffic, row.share) for row in rows):
        at = [row for row in rows if (row.source, row.traffic, row.share) == (source, traffic, share)]
        fixed = [row for row in at if not row.setting.startswith("goal")]
        if not fixed:
            continue
        best = max(fixed, key=lambda row: (round(row.kept, 3), row.tokens_per_second))
        for row in (row for row in at if row not in fixed):
            more, itl = row.kept - best.kept, row.itl["p99"] / itl_goal
            ratio = row.tokens_per_second / best.tokens_per_second
            is_met = more >= AT_LEAST["share"] and ratio >= AT_LEAST["throughput"] and itl <= AT_LEAST["itl"]
            yield (
                f"{source} {traffic} {share:g}: {row.setting} against {best.setting}: within limits {more:+.3f}, "
                f"tokens/s x {ratio:.3f}, ITL p99 {itl:.2f} x goal: {'met' if is_met else 'MISSED'}"
            )


# ------------------------------------------------------------------------------------------------------------- players


def simulated(calibration: Calibration, noise: str | None = None) -> Play:
    def player(workload: Workload, options: Options) -> list[RequestMetrics]:
        config, costs = calibration.resolve(EngineConfig(**options)), calibration.cost_model
        if noise is not None:
            costs = noisy(costs, noise, round(1e6 * workload.requests[-1].arrival))
        return simulate(workload, config, costs, pools=calibration.pools(config)).requests

    return player


def metrics_of(played: Replay) -> list[RequestMetrics]:
    """Metrics as seen by the client; token times of one output are equal."""
    made = []
    for arrival, ended in zip(played.arrivals, played.finished, strict=True):
        times = ended.token_times
        itls = [later - earlier for earlier, later in pairwise(times)]
        made.append(
            RequestMetrics(
                arrival_time=arrival, first_token_time=times[0], last_token_time=times[-1], finished_time=times[-1],
                num_output_tokens=len(times), max_itl=max(itls, default=None), itls=itls,
            )
        )  # fmt: skip
    return made


class Machine:
    """This machine's engine, one at a time; another setting opens another."""

    def __init__(self, model: str, fixed: Options, idle: float) -> None:
        self._model, self._fixed, self._idle = model, fixed, idle
        self._opened: Options | None = None
        self._engine: OurStreaming | None = None
        self._loop = asyncio.new_event_loop()

    def __call__(self, workload: Workload, options: Options) -> list[RequestMetrics]:
        return self._loop.run_until_complete(self._play(workload, options))

    async def _play(self, workload: Workload, options: Options) -> list[RequestMetrics]:
        if self._opened != options:
            await self.close()
            self._engine, self._opened = OurStreaming(self._model, self._fixed | options), options
            first = workload.first(WARM_UPS).hurried()
            await play(self._engine, first, params_of(first))
            await asyncio.sleep(self._idle)  # graphs are captured while idle
        assert self._engine is not None
        await self._engine.reset_prefix_cache()
        return metrics_of(await play(self._engine, workload, params_of(workload)))

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()
        self._engine = self._opened = None

    def end(self) -> None:
        self._loop.run_until_complete(self.close())
        self._loop.close()


# ---------------------------------------------------------------------------------------------------------------- main


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traffic", nargs="+", default=["azure-conv", "azure-code"], help="workloads with a rate")
    parser.add_argument("--costs", metavar="FILE", help="of `nanovllm calibrate` (default: an 8B model on an H200 by"
                        " arithmetic; with --measure this machine is calibrated)")  # fmt: skip
    parser.add_argument("--measure", action="store_true", help="measure this machine after simulating it")
    parser.add_argument("--budgets", nargs="+", type=int, help="fixed budgets; the largest also bounds the goal's")
    parser.add_argument("--itl-goal", type=duration, metavar="TIME", help="of the engine with a goal, such as 25ms")
    parser.add_argument("--ttft-goal", type=duration, metavar="TIME", help="of that engine (default none)")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.8, 1.0], help="of the capacity")
    parser.add_argument("--kept", type=float, default=0.9, help="share of the requests within limits at the capacity")
    parser.add_argument("--capacity", type=float, help="requests a second, instead of looking for it")
    parser.add_argument("--requests", type=int, help="of each rate")
    parser.add_argument("--scale", type=float, help="of all lengths")
    parser.add_argument("--noise", choices=list(NOISE), help="of the simulated steps with decodes and prompts")
    parser.add_argument("--seeds", type=int, default=1, help="plays of other requests in each row")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no play begins after so many")
    parser.add_argument("--out", type=Path, help="JSON file of the rows, written after each")
    add_request_goal_flags(parser)
    options = parser.parse_args(arguments)
    preset = PRESETS["8b" if not (options.costs or options.measure) else device() if options.measure else "cpu"]
    for name in ("budgets", "itl_goal", "requests", "scale"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(preset, name))
    options.goal_ttft, options.goal_itl = options.goal_ttft or preset.limits.ttft, options.goal_itl or preset.limits.itl
    options.budgets = sorted(options.budgets)
    if min(options.shares) <= 0.0 or not 0.0 < options.kept <= 1.0:
        parser.error("--shares must be above 0, and --kept above 0 and at most 1")
    return options


def settings_of(options: argparse.Namespace) -> dict[str, Options]:
    goal: Options = {"max_num_batched_tokens": options.budgets[-1], "itl_goal": options.itl_goal}
    name = f"goal {1e3 * options.itl_goal:g} ms"
    if options.ttft_goal is not None:
        goal["ttft_goal"], name = options.ttft_goal, f"{name}, TTFT {options.ttft_goal:g} s"
    return {name: goal} | {str(budget): {"max_num_batched_tokens": budget} for budget in options.budgets}


def opened(options: argparse.Namespace) -> tuple[Calibration, str, Options]:
    """Costs, and model and options of the engines that are measured."""
    if not (options.measure or options.costs):
        return by_arithmetic("8b"), "", {}
    is_gpu = options.measure and device() == "cuda"
    model, fixed = (str(checkpoint(GPU_SHAPE)) if is_gpu else DEFAULT_MODEL), {"dtype": "bfloat16"}
    if options.costs:
        return Calibration.load(options.costs), model, fixed
    return calibrate(model, tokenizer=NoText() if is_gpu else None, repeats=1, **fixed), model, fixed


def main(arguments: list[str] | None = None) -> int:
    begin, options = time.monotonic(), parsed(arguments)
    bench = Bench(options, RequestGoals(options.goal_ttft, options.goal_itl), settings_of(options))
    calibration, model, fixed = opened(options)
    print(f"{calibration.model} on {calibration.hardware}: limits {bench.limits}, scale {options.scale:g}", flush=True)
    players: dict[str, Play] = {"simulated": simulated(calibration, options.noise)}
    machine = Machine(model, fixed, idle=25.0 if calibration.device == "cuda" else 0.0)
    if options.measure:
        players["measured"] = machine
    rates: dict[str, float] = {}
    for traffic in options.traffic:
        if options.capacity is None:
            rates[traffic], best = bench.capacity(traffic, players["simulated"])
            about = f"where budget {best} keeps {options.kept:.0%}"
        else:
            rates[traffic], about = options.capacity, "as given"
        print(f"capacity of {traffic}: {rates[traffic]:.3g}/s, {about}", flush=True)
    rows: list[Row] = []
    print(HEAD)
    tasks = ((*task, setting) for task in players.items() for setting in bench.settings)
    for source, player, setting in tasks:
        for traffic, share in ((traffic, share) for traffic in options.traffic for share in options.shares):
            if time.monotonic() - begin > 60.0 * options.minutes:
                print(f"{source} {traffic} {share:g} {setting}: left out after {options.minutes:g} minutes", flush=True)
                continue
            rows.append(bench.row(source, traffic, share, share * rates[traffic], setting, player))
            print(rows[-1], flush=True)
            if options.out:
                options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    machine.end()
    verdicts = list(verdict(rows, options.itl_goal))
    print("\n" + "\n".join(verdicts), flush=True)
    return any(line.endswith("MISSED") for line in verdicts)


if __name__ == "__main__":
    sys.exit(main())
