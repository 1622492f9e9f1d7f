"""Settings, runs, machines and sweeps for tests of `nanovllm tune`."""

import json

from nanovllm.features.costs.cost_model import CostModel, DeviceCost, HostCost
from nanovllm.features.engine_config import EngineConfig
from nanovllm.tools.simulate.calibration import Calibration
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.tools.tune.goals import Goal
from nanovllm.tools.tune.halving import MeasurementError, Sweep, rounds_for
from nanovllm.tools.tune.settings import SWEPT, Resolver
from nanovllm.tools.workloads.files import read_trace

ITL_40 = Goal("itl", "p99", 0.04)
TTFT_500 = Goal("ttft", "p99", 0.5)


def setting(budget, num_seqs=16, block_size=64, itl_goal=None):
    options = {"max_num_batched_tokens": budget, "max_num_seqs": num_seqs, "block_size": block_size}
    return Resolver("cpu", {}).resolve(options | ({"itl_goal": itl_goal} if itl_goal else {}))


def run(rate, *, ttft=0.1, itl=0.01, arrivals=None):
    """A run with `rate` tokens/s, and equal latencies in all statistics."""
    names = "mean", "p50", "p90", "p99"
    return {
        "rate": arrivals, "output_tokens_per_second": rate, "ttft": dict.fromkeys(names, ttft),
        "itl": dict.fromkeys(names, itl), "environment": {"torch": "2"}, "config": {"a": 1},
    }  # fmt: skip


class Machine:
    """Returns runs from a table; records the calls."""

    def __init__(self, runs, failing=()):
        self.runs, self.failing = runs, failing
        self.asked = []

    def __call__(self, of, share, repeat):
        self.asked.append((of, share, repeat))
        if of in self.failing:
            raise MeasurementError("out of memory")
        return [self.runs[of]]


def build_sweep(runs, *, goals=(), smallest=0.0, repeats=2):
    return Sweep(list(runs), list(goals), rounds_for(len(runs), smallest), repeats)


COST = CostModel(HostCost(1e-4, 1e-6), DeviceCost(knee=16, fixed=0.01, per_token_above=1e-4), HostCost(1e-4))
CALIBRATION = Calibration(
    model="m", dtype="float32", device="cpu", attention_backend="sdpa", enforce_eager=True, cuda_graphs=False,
    block_size=16, max_position_embeddings=512, kv_token_bytes=100, kv_cache_bytes=100 * 16 * 512, hardware={},
    versions={}, num_samples=1, residuals={}, cost_model=COST,
)  # fmt: skip


def as_played(workload, options):
    """Figures of a simulation, with the rate from the start of the workload as in `bench.replay`."""
    simulation = simulate(workload, CALIBRATION.resolve(EngineConfig(**options)), COST)
    seconds = max(metrics.finished_time for metrics in simulation.requests)
    rate = workload.num_output_tokens / seconds
    return simulation.figures() | {"seconds": seconds, "output_tokens_per_second": rate}


class Engines:
    """In the place of engine processes: simulations, which note options; a budget of 512 tokens kills them."""

    def __init__(self):
        self.options = []
        self.interrupt_at = None

    def run_in_subprocess(self, engine, traces, settings, folder):
        if len(self.options) == self.interrupt_at:
            raise KeyboardInterrupt
        self.options.append(engine.options)
        if engine.options["max_num_batched_tokens"] == 512:
            raise RuntimeError("nanovllm: its process ended with -9\n")
        about = {"environment": {"torch": "9", "cores": None}, "config": engine.options}
        limits = {name: value for name, value in engine.options.items() if name in (*SWEPT, "itl_goal")}
        return [as_played(read_trace(trace), limits) | about for trace in traces]


def result_in(output):
    return json.loads((output / "result.json").read_text())
