"""Shares in the simulator: a client's flood delays another hardly more than if that one had strict priority."""

import random

import pytest

from nanovllm.features.engine_config import EngineConfig
from nanovllm.observability.percentiles import percentiles
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.tools.workloads.workloads import TimedRequest, Workload
from tests.support.sweeps import CALIBRATION

FLOODS = {
    "many requests": [TimedRequest(0.0, [number % 97] * 60, 50, client="batch") for number in range(600)],
    "many samples": [TimedRequest(0.0, [5] * 40, 400, client="batch")] * 64,
}


def last_percent(flood, priority):
    """TTFT p99 of short requests, two a second, that come beside a flood."""
    rng, time = random.Random(7), 1.0
    requests = list(FLOODS[flood])
    for _ in range(60):
        time += rng.expovariate(2.0)
        prompt = [rng.randrange(100, 50_000) for _ in range(rng.randint(5, 120))]
        requests.append(TimedRequest(time, prompt, rng.randint(1, 30), client="one", priority=priority))
    config = CALIBRATION.resolve(EngineConfig(max_num_seqs=16, max_num_batched_tokens=128))
    run = simulate(Workload(flood, requests), config, CALIBRATION.cost_model)
    ttfts = [metrics.ttft for metrics, asked in zip(run.requests, requests, strict=True) if asked.client == "one"]
    return percentiles(ttfts)["p99"]


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_delays_another_client_a_fifth_more_than_strict_priority_over_it(flood):
    assert last_percent(flood, 0) <= 1.2 * last_percent(flood, -1)
