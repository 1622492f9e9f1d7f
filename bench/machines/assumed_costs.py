"""Costs of machines that are not here: of an H200 by arithmetic, and of any machine with the noise of a real one."""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import asdict, dataclass, field, replace

from bench.machines.random_models import SHAPES, token_bytes, weight_bytes
from nanovllm.features.costs.cost_model import CostModel, DeviceCost, HostCost, StepWork
from nanovllm.tools.simulate.calibration import Calibration

READ_RATE, FLOP_RATE, PAIR_RATE, H200_BYTES = 4e12, 600e12, 400e12, 126e9  # of an H200: bytes, FLOP a second; 0.9 of it
# Quantiles of measured / median seconds, as (share of the steps, factor) with straight lines between.
NOISE = {
    "quiet": ((0.0, 1.0), (0.9, 1.0), (0.9, 1.34), (1.0, 1.34)),
    # 130 steps of an engine on two of four threads of a machine that others used too
    "shared": ((0.0, 0.9), (0.5, 1.0), (0.75, 1.13), (0.9, 1.3), (0.95, 1.55), (0.98, 1.76), (0.99, 1.94), (1.0, 2.2)),
}


def by_arithmetic(shape: str) -> Calibration:
    """Costs of a shape on an H200: bytes over its bandwidth, FLOP over the rate of large products."""
    num_bytes, kv_bytes, sizes = weight_bytes(shape), token_bytes(shape), SHAPES[shape]
    group = sizes["num_attention_heads"] / sizes["num_key_value_heads"]
    cost = DeviceCost(
        128, fixed=num_bytes / READ_RATE + 3e-4, per_token_below=2e-6,
        per_token_above=num_bytes / FLOP_RATE,  # two bytes and two FLOP a weight
        per_decode=1e-6, per_chunk=2e-5, per_context_token=kv_bytes / READ_RATE,
        per_shared_context_token=kv_bytes / READ_RATE, per_chunk_pair=group * kv_bytes / PAIR_RATE, per_sample=1e-6,
        both=2e-4,
    )  # fmt: skip
    host = CostModel(
        HostCost(5e-5, 1e-6, 5e-6), cost, HostCost(5e-5, 2e-6), HostCost(3e-4, 1e-6, 5e-6), launch_blocks=False
    )
    return Calibration(
        model=shape, dtype="bfloat16", device="cuda", attention_backend="flex", enforce_eager=False, cuda_graphs=True,
        block_size=64, max_position_embeddings=40_960, kv_token_bytes=kv_bytes,
        kv_cache_bytes=int(H200_BYTES) - num_bytes, hardware={"gpu": "an H200 by arithmetic"}, versions={},
        num_samples=0, residuals={}, cost_model=host,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class NoisyCost(DeviceCost):
    """A `DeviceCost` whose steps of decodes and chunks together take a random factor longer or shorter."""

    quantiles: tuple[tuple[float, float], ...] = ((0.0, 1.0), (1.0, 1.0))
    rng: random.Random = field(default_factory=lambda: random.Random(0), compare=False)

    def seconds(self, work: StepWork) -> float:
        seconds = DeviceCost.seconds(self, work)
        return seconds * self._factor(self.rng.random()) if work.num_decodes and work.num_chunks else seconds

    def _factor(self, share: float) -> float:
        place = max(1, bisect_left(self.quantiles, (share, 0.0)))
        (low, less), (high, more) = self.quantiles[place - 1 : place + 1]
        return less + (more - less) * (share - low) / (high - low) if high > low else more


def noisy(cost_model: CostModel, kind: str, seed: int) -> CostModel:
    """The cost model with noise of a kind of `NOISE`; one seed gives the same steps the same factors."""
    cost = NoisyCost(**asdict(cost_model.device), quantiles=NOISE[kind], rng=random.Random(seed))
    return replace(cost_model, device=cost)
