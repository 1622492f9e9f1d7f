"""Forecasts for models whose layers form cache groups: pools, blocks that are freed, and tokens in sight."""

from dataclasses import replace

import pytest

from nanovllm.features.costs.cost_model import DeviceCost, HostCost, StepWork
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_pools import CacheGroup
from nanovllm.features.groups.state_kinds import StateKind
from nanovllm.tools.simulate.calibrate import calibrate
from nanovllm.tools.simulate.calibration import Calibration
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.tools.workloads.workloads import TimedRequest, Workload
from tests.support import sweeps
from tests.support.layer_kinds import WINDOW, model
from tests.support.scheduling import Loop, make_group_scheduler

COST = replace(sweeps.COST, schedule=HostCost(), update=HostCost(),
               device=DeviceCost(knee=8, fixed=0.001, per_context_token=1e-6))  # fmt: skip
CALIBRATION = replace(
    sweeps.CALIBRATION, enforce_eager=False, block_size=64, max_position_embeddings=4096, kv_token_bytes=6000,
    kv_cache_bytes=400 * 64 * 1000, cost_model=COST, cache_groups=((None, None, 1000), (128, None, 5000)),
)  # fmt: skip
FEW = Workload("few", [TimedRequest(0.0, [number] * 1000, 200) for number in range(4)], {})


def test_recurrent_states_are_simulated_in_slots(tmp_path):
    groups = ((None, None, 1000), (None, None, 0, 640_000))
    replace(CALIBRATION, cache_groups=groups).save(tmp_path / "calibration.json")
    found = Calibration.load(tmp_path / "calibration.json")
    config = found.resolve(EngineConfig(max_model_len=2048, max_num_seqs=8))
    pools = found.pools(config)
    assert pools.are_records == (False, True) and pools.groups[1].block_bytes == 640_000
    prompt = [*range(1000)]
    asked = Workload("shared", [TimedRequest(0.0, [*prompt, number], 20) for number in range(4)], {})
    simulated = simulate(asked, config, COST, pools=pools)
    assert simulated.stats[0].cache_groups[1].record_bytes == 640_000
    assert simulated.stats[0].prefix_cache_hits == 3 * (1000 // 64 * 64)


def test_a_decode_counts_its_state_as_the_tokens_with_as_many_bytes():
    """It is read and written, in addition to the context; chunks have none of it."""
    groups = [CacheGroup((0,), 4 * 10), CacheGroup((), 150, StateKind.record(150))]
    loop = Loop(make_group_scheduler([group.kind for group in groups], [40, 40]))
    loop.add(range(8), max_tokens=5)
    first, _, decode = loop.step(), loop.step(), loop.step()
    assert StepWork.from_batch(first, 4, groups=groups)[3:6] == (0, 0, 4 * 5 // 2)
    assert StepWork.from_batch(decode, 4, groups=groups).num_context_tokens == 9 + 2 * 150 // 10
    assert StepWork.from_batch(decode, 4, groups=groups).with_chunk(0, 8, groups=groups).num_chunk_pairs == 36
    without = [CacheGroup(), groups[1]]  # no layer attends
    assert StepWork.from_batch(decode, 4, groups=without) == StepWork.from_batch(decode, 4)


def test_a_simulated_engine_has_the_pools_of_the_measured_one():
    config = CALIBRATION.resolve(EngineConfig(max_model_len=2048))
    pools = CALIBRATION.pools(config)
    assert [group.kind.window for group in pools.groups] == [None, 128]
    assert config.num_kv_blocks == pools.num_blocks[0]
    assert 0.9 * CALIBRATION.kv_cache_bytes < pools.num_bytes <= CALIBRATION.kv_cache_bytes


def test_windows_make_steps_shorter_and_their_pools_are_counted():
    config = CALIBRATION.resolve(EngineConfig(max_model_len=2048))
    windows = simulate(FEW, config, COST, pools=CALIBRATION.pools(config))
    full = simulate(FEW, config, COST)
    (of_full, of_window), ends = windows.stats[0].cache_groups, [r.finished_time for r in windows.requests]
    assert (of_full.window, of_window.window) == (None, 128)
    assert max(ends) < max(r.finished_time for r in full.requests)


@pytest.mark.parametrize(
    "groups", [[CacheGroup((), 1), CacheGroup((), 3, StateKind(window=6))], [CacheGroup((), 1, StateKind(window=6))]]
)
def test_a_step_counts_the_tokens_in_sight_by_their_share_of_the_bytes(groups):
    loop = Loop(make_group_scheduler([group.kind for group in groups], [40] * len(groups)))
    loop.add(range(8), max_tokens=5)
    prefill, decode = loop.step(), loop.step()
    of_full, of_window = (8 * 9 // 2, 9), (6 * 7 // 2 + 2 * 6, 6)
    expected = [round((a + 3 * b) / 4) for a, b in zip(of_full, of_window, strict=True)]
    expected = expected if len(groups) == 2 else list(of_window)
    assert StepWork.from_batch(prefill, 4, groups=groups).num_chunk_pairs == expected[0]
    assert StepWork.from_batch(decode, 4, groups=groups).num_context_tokens == expected[1]


@pytest.mark.slow
def test_a_model_with_windows_is_calibrated_with_its_groups():
    options = {"block_size": 16, "max_model_len": 160, "max_num_seqs": 4, "enforce_eager": True}
    found = calibrate(model("Gemma3Text"), repeats=1, **options)
    assert [group[0] for group in found.cache_groups] == [None, WINDOW]
    assert sum(group[2] for group in found.cache_groups) == found.kv_token_bytes
    config = found.resolve(EngineConfig(**(options | {"enforce_eager": False})))
    simulated = simulate(
        Workload("one", [TimedRequest(0.0, [1] * 100, 8)], {}), config, found.cost_model, pools=found.pools(config)
    )
    assert isinstance(found.pools(config).groups[1], CacheGroup)
    assert simulated.requests[0].num_output_tokens == 8
