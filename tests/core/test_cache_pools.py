"""How memory is split among cache groups, and which layers form one."""

import pytest

from nanovllm.features.composition.block_managers import build_block_manager
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.groups.cache_groups import CacheGroups
from nanovllm.features.groups.cache_pools import CacheGroup, CachePools, cache_groups_of, resolve_pools
from nanovllm.features.groups.state_kinds import StateKind
from nanovllm.layout import LayerTraits, Sight
from tests.support.refusals import invalid

FULL, WINDOW = CacheGroup((0,), 1000), CacheGroup((1, 2), 5000, StateKind(window=64))
RECORD = CacheGroup((), 5000, StateKind.record(5000))


def layer(*, shares=None, **sight):
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "value_dim": 16}
    return LayerTraits(**heads, sight=Sight(**sight), shares=shares)


def resolve(*groups, memory=0, is_set=True, **options):
    options = {"max_model_len": 1600, "block_size": 16, "max_num_seqs": 8} | options
    config = EngineConfig(**options).resolve_limits("cpu", 4096)
    return resolve_pools(config, groups, memory, max_model_len_is_set=is_set)


def test_layers_that_see_the_same_form_a_group_and_the_full_one_comes_first():
    layers = [layer(window=8), layer(), layer(window=8), layer(chunk=32), layer(shares=1)]
    groups = cache_groups_of(layers, [10, 20, 30, 40, 50], 100)
    assert groups == (
        CacheGroup((1, 4), 20), CacheGroup((0, 2), 40, StateKind(window=8)), CacheGroup((3,), 40, StateKind(chunk=32))
    )  # fmt: skip


def test_a_window_that_holds_max_model_len_is_full_attention():
    layers = [layer(), layer(window=100)]
    assert cache_groups_of(layers, [1, 1], 100) == (CacheGroup((0, 1), 2),)
    assert len(cache_groups_of(layers, [1, 1], 101)) == 2


def test_one_table_serves_layers_that_read_the_cache_of_one_with_another_sight():
    layers = [layer(), layer(window=8), layer(window=8, shares=0)]
    assert cache_groups_of(layers, [1, 1, 1], 100) == (CacheGroup((0, 1, 2), 2),)


def test_memory_is_split_by_what_sequences_of_half_the_longest_need():
    config, pools = resolve(FULL, WINDOW, memory=10**7, max_num_seqs=1000)
    full, window = pools.num_blocks
    assert config.num_kv_blocks == full
    assert full / window == pytest.approx(50 / 5, rel=0.02)
    assert 0.99 * 10**7 < pools.num_bytes <= 10**7


def test_the_share_of_windows_can_be_set():
    _, pools = resolve(FULL, WINDOW, memory=10**7, max_num_seqs=1000, window_pool_share=0.25)
    assert pools.num_blocks[1] * WINDOW.block_bytes / pools.num_bytes == pytest.approx(0.25, rel=0.01)


def test_a_number_of_blocks_is_that_of_the_first_group():
    _, pools = resolve(FULL, WINDOW, num_kv_blocks=201)
    assert pools.num_blocks == (201, 20)
    assert resolve(WINDOW, num_kv_blocks=10)[1].num_blocks == (10,)


def test_no_window_pool_is_smaller_than_one_sequence_needs():
    _, pools = resolve(FULL, WINDOW, num_kv_blocks=101, window_pool_share=0.001)
    assert pools.num_blocks == (101, 1 + WINDOW.kind.max_blocks(1600, 16))


def test_by_default_no_more_memory_is_taken_than_can_be_used():
    _, pools = resolve(FULL, WINDOW, memory=10**12)
    assert pools.num_blocks[0] == 8 * 100 + 1
    assert 8 * 5 < pools.num_blocks[1] < 250


def test_max_model_len_is_lowered_to_the_full_group_unless_it_was_set():
    config, _ = resolve(FULL, WINDOW, kv_cache_memory_bytes=60_000, is_set=False)
    assert 16 <= config.max_model_len < 1600
    with invalid(r"1 layers with full attention has .* needs 101"):
        resolve(FULL, WINDOW, kv_cache_memory_bytes=60_000)


def test_a_pool_without_room_for_a_window_is_refused():
    with invalid(r"2 layers with window 64 has 4 blocks of 16 tokens .* needs 6"):
        resolve(WINDOW, num_kv_blocks=4)


@pytest.mark.parametrize("share", [0, 1, 1.0, -0.1, float("nan"), "0.5", True])
def test_a_share_out_of_range_is_refused(share):
    with invalid(r"window_pool_share is .* above 0 and at most 0.99"):
        EngineConfig(window_pool_share=share)


def test_recurrent_states_of_all_layers_are_one_group_behind_the_others():
    layers = [layer(window=8), layer()]
    groups = cache_groups_of(layers, [10, 20], 100, record_bytes=5000)
    assert groups == (
        CacheGroup((1,), 20), CacheGroup((0,), 10, StateKind(window=8)), RECORD
    )  # fmt: skip
    pools = CachePools(groups, (9, 8, 7))
    assert pools.are_records == (False, False, True)
    assert pools.paged == CachePools(groups[:2], (9, 8))
    assert pools.groups_of_layers() == [1, 0]


def test_each_sequence_of_half_the_longest_gets_two_states():
    config, pools = resolve(FULL, RECORD, memory=10**7, max_num_seqs=150)
    full, states = pools.num_blocks
    assert full / states == pytest.approx(50 / 2, rel=0.02)
    assert 0.99 * 10**7 < pools.num_bytes <= 10**7
    assert isinstance(build_block_manager(config, pools), CacheGroups)


def test_states_of_all_running_sequences_take_up_to_half_of_the_memory():
    _, pools = resolve(FULL, RECORD, memory=10**7, max_num_seqs=300)
    assert pools.num_blocks[1] == 1 + 630
    _, pools = resolve(FULL, RECORD, memory=10**7, max_num_seqs=1000)
    assert pools.num_blocks == (5000, 1000)


def test_memory_holds_two_states_of_each_running_sequence_and_two_cached_ones_at_most():
    _, pools = resolve(FULL, RECORD, memory=10**9)
    assert pools.num_blocks == (8 * 100 + 1, 8 * 2 * 2 + 1)


def test_states_alone_have_blocks_without_bytes_for_the_prefix_index():
    groups = cache_groups_of([], [], 1600, record_bytes=5000)
    assert [(group.layers, group.block_bytes) for group in groups] == [((), 0), ((), 5000)]
    config, pools = resolve(*groups, memory=10**6, max_num_seqs=64)
    names, states = pools.num_blocks
    assert (states, pools.num_bytes) == (200, 10**6)
    assert (names, config.max_model_len) == (100 * 50, 1600)
    _, scarce = resolve(*groups, memory=15_000)
    assert scarce.num_blocks == (101, 3)
    with invalid("but all layers"):
        resolve(*groups, memory=10**6, window_pool_share=0.5)
