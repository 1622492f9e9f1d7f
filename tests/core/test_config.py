"""Engine options: defaults yield to what is set, contradictions are refused, every refusal names the remedy."""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from nanovllm.config import BLOCK_SIZES, DEVICE_DEFAULTS
from nanovllm.features.engine_config import EngineConfig
from nanovllm.one_pool import resolve_pool as resolve_pool_of

POSITIONS = 8192


def resolve(device="cpu", positions=POSITIONS, **options):
    return EngineConfig.from_options(**options).resolve_limits(device, positions)


def invalid(message):  # not of tests.support.refusals, which imports torch: these tests run on every Python without it
    return pytest.raises(ValueError, match=message)


def limits(config):
    return config.max_num_batched_tokens, config.max_num_seqs, config.block_size


# ------------------------------------------------------------------------------------------------- option names


def test_an_unknown_option_is_a_type_error_that_lists_the_near_names():
    with pytest.raises(TypeError, match=r"unknown engine option 'max_seqs'.*Did you mean.*max_num_seqs"):
        EngineConfig.from_options(max_seqs=4)


def test_an_unknown_option_that_resembles_none_lists_them_all():
    with pytest.raises(TypeError, match=r"unknown engine option 'zzzz'.*The options are: dtype, device, max_model_len"):
        EngineConfig.from_options(zzzz=1)


def test_an_unknown_option_is_refused_beside_known_ones():
    with pytest.raises(TypeError, match="unknown engine option 'pipeline_parallel_size'"):
        EngineConfig.from_options(max_num_seqs=4, pipeline_parallel_size=2)


def test_a_config_is_immutable():
    config = EngineConfig()
    with pytest.raises(FrozenInstanceError):
        config.max_num_seqs = 4


# -------------------------------------------------------------------------------------------------- bad values

COUNTS = (
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "kv_cache_memory_bytes",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "long_prefill_token_threshold",
    "block_size",
    "num_kv_blocks",
)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1])
def test_a_count_below_its_least_value_is_refused(name, value):
    with invalid(rf"{name} is {value}; it must be at least"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("name", [*COUNTS, "seed"])
@pytest.mark.parametrize("value", ["64", 64.0, True, float("nan"), [64]])
def test_a_count_that_is_no_whole_number_is_refused(name, value):
    with pytest.raises(TypeError, match=rf"{name} must be a whole number, not "):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"block_size": 48}, ValueError, r"block_size is 48; it must be one of 16, 32, 64, 128, 256"),
        ({"block_size": 512}, ValueError, "block_size is 512"),
        ({"num_kv_blocks": 1}, ValueError, "num_kv_blocks is 1; it must be at least 2"),
        ({"seed": -1}, ValueError, "seed is -1; it must be between 0 and"),
        ({"seed": 2**64}, ValueError, f"seed is {2**64}; it must be between 0 and {2**64 - 1}"),
        ({"seed": None}, TypeError, "seed must be a whole number, not None"),
        ({"dtype": "float64"}, ValueError, "dtype is 'float64'; it must be one of auto, float32, bfloat16, float16"),
        ({"dtype": None}, ValueError, "dtype is None"),
        ({"kv_cache_touch": "busy"}, ValueError, "kv_cache_touch is 'busy'; it must be one of idle, none"),
        (
            {"attention_backend": "paged"},
            ValueError,
            "attention_backend is 'paged'; it must be one of auto, flex, sdpa",
        ),
        ({"device": "tpu"}, ValueError, "device is 'tpu'; it must be 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ({"device": "cuda:one"}, ValueError, "device is 'cuda:one'; it must be 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ({"device": "cuda:"}, ValueError, "device is 'cuda:'"),
        ({"device": "auto:1"}, ValueError, "device is 'auto:1'"),
        ({"device": 0}, ValueError, "device is 0"),
        ({"gpu_memory_utilization": 0}, ValueError, "gpu_memory_utilization is 0; it must be a number above 0"),
        ({"gpu_memory_utilization": 1.5}, ValueError, "gpu_memory_utilization is 1.5; .* at most 1"),
        ({"gpu_memory_utilization": float("nan")}, ValueError, "gpu_memory_utilization is nan"),
        ({"gpu_memory_utilization": "90%"}, ValueError, "gpu_memory_utilization is '90%'"),
        ({"gpu_memory_utilization": True}, ValueError, "gpu_memory_utilization is True"),
        ({"enable_prefix_caching": 1}, TypeError, "enable_prefix_caching must be True or False, not 1"),
        ({"enforce_eager": "no"}, TypeError, "enforce_eager must be True or False, not 'no'"),
        ({"trust_remote_code": None}, TypeError, "trust_remote_code must be True or False, not None"),
        ({"revision": 3}, TypeError, "revision must be a string, not 3"),
    ],
)
def test_a_bad_value_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        EngineConfig(**options)


def test_compiled_attention_contradicts_eager_mode():
    with invalid(r"attention_backend='flex' needs compilation.*attention_backend='sdpa'"):
        EngineConfig(attention_backend="flex", enforce_eager=True)


def test_the_retired_backend_runs_as_flex_and_says_so_once(caplog):
    config = EngineConfig(attention_backend="flash", block_size=64)
    assert config == replace(config) == EngineConfig(attention_backend="flex", block_size=64)
    assert caplog.text.count("attention_backend='flash' is retired and runs as 'flex'") == 1


def test_a_preferred_block_size_yields_to_options_that_were_set():
    assert EngineConfig().resolve_limits("cuda", 4096, block_size=128).block_size == 128
    assert EngineConfig(block_size=32).resolve_limits("cuda", 4096, block_size=128).block_size == 32
    # a preference yields to a limit that was set
    assert EngineConfig(max_num_batched_tokens=80).resolve_limits("cuda", 4096, block_size=128).block_size == 64


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:11"])
def test_every_spelling_of_a_device_is_accepted(device):
    assert EngineConfig(device=device).device == device


@pytest.mark.parametrize("name", [*COUNTS, "seed"])
def test_numbers_of_numpy_become_plain_ones_which_do_not_overflow(name):
    assert type(getattr(EngineConfig(**{name: np.int32(64)}), name)) is int


# ------------------------------------------------------------------------------------------ limits that yield


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_options_the_device_decides(device):
    defaults = DEVICE_DEFAULTS[device]
    config = resolve(device)
    assert limits(config) == (defaults.max_num_batched_tokens, defaults.max_num_seqs, defaults.block_size)
    assert config.max_model_len == POSITIONS
    assert config.long_prefill_token_threshold == defaults.max_num_batched_tokens // 2
    assert (config.max_num_partial_prefills, config.max_long_partial_prefills) == (4, 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_small_budget_alone_works(device):
    config = resolve(device, max_num_batched_tokens=128)
    assert limits(config) == (128, 64, 64)
    assert config.long_prefill_token_threshold == 64


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("budget", [17, 18, 31, 32, 33, 64, 65, 80, 100, 127, 320, 100_000])
def test_any_budget_from_the_smallest_on_works_alone(device, budget):
    config = resolve(device, max_num_batched_tokens=budget)
    assert config.max_num_batched_tokens == budget
    assert budget >= config.max_num_seqs + config.block_size
    assert config.block_size in BLOCK_SIZES
    assert config.long_prefill_token_threshold >= config.block_size


def test_an_unset_budget_grows_with_the_sequences_that_were_asked_for():
    assert limits(resolve(max_num_seqs=2000)) == (2064, 2000, 64)
    assert limits(resolve(max_num_seqs=1000, block_size=256)) == (1256, 1000, 256)


def test_an_unset_block_size_yields_to_budget_and_sequences():
    assert limits(resolve(max_num_batched_tokens=100, max_num_seqs=64)) == (100, 64, 32)
    assert limits(resolve(max_num_batched_tokens=80, max_num_seqs=64)) == (80, 64, 16)


def test_an_unset_number_of_sequences_yields_to_budget_and_block_size():
    assert limits(resolve("cuda", max_num_batched_tokens=300, block_size=256)) == (300, 44, 256)
    assert limits(resolve(max_num_batched_tokens=257, block_size=256)) == (257, 1, 256)


def test_options_that_fit_together_are_left_alone():
    assert limits(resolve(max_num_batched_tokens=24, max_num_seqs=8, block_size=16)) == (24, 8, 16)


@pytest.mark.parametrize(
    "options, numbers",
    [
        ({"max_num_batched_tokens": 16}, (16, 1, 16, 17)),
        ({"max_num_batched_tokens": 100, "max_num_seqs": 90}, (100, 90, 16, 106)),
        ({"max_num_batched_tokens": 64, "block_size": 64}, (64, 1, 64, 65)),
        ({"max_num_batched_tokens": 128, "max_num_seqs": 65, "block_size": 64}, (128, 65, 64, 129)),
    ],
)
def test_a_budget_too_small_for_what_was_asked_for_names_the_numbers_and_the_remedy(options, numbers):
    budget, num_seqs, block_size, needed = numbers
    message = (
        rf"max_num_batched_tokens is {budget}, but max_num_seqs \({num_seqs}\).* one block of {block_size} .*"
        rf"Set it to at least {needed}, or lower"
    )
    with invalid(message):
        resolve(**options)
    assert resolve(**options | {"max_num_batched_tokens": needed}).max_num_batched_tokens == needed


def test_the_model_bounds_max_model_len():
    assert resolve(max_model_len=POSITIONS).max_model_len == POSITIONS
    with invalid(r"max_model_len is 8193, but the model has positions for 8192.* at most 8192"):
        resolve(max_model_len=POSITIONS + 1)


def test_a_threshold_below_one_block_is_refused():
    with pytest.raises(
        ValueError, match=r"long_prefill_token_threshold is 63, less than one block of 64.* at least 64"
    ):
        resolve(long_prefill_token_threshold=63)
    assert resolve(long_prefill_token_threshold=64).long_prefill_token_threshold == 64


def test_more_long_partial_prefills_than_partial_prefills_are_refused():
    with invalid(r"max_long_partial_prefills is 3, above max_num_partial_prefills \(2\)"):
        resolve(max_num_partial_prefills=2, max_long_partial_prefills=3)


@pytest.mark.parametrize(
    "options, resolved",
    [
        ({"max_num_partial_prefills": 1}, (1, 1)),
        ({"max_long_partial_prefills": 3}, (4, 3)),
        ({"max_long_partial_prefills": 8}, (8, 8)),
        ({"max_num_partial_prefills": 2, "max_long_partial_prefills": 2}, (2, 2)),
    ],
)
def test_an_unset_limit_on_partial_prefills_yields_to_the_other(options, resolved):
    config = resolve(**options)
    assert (config.max_num_partial_prefills, config.max_long_partial_prefills) == resolved


def test_resolving_leaves_the_given_config_as_it_was():
    given = EngineConfig(max_num_batched_tokens=128)
    given.resolve_limits("cuda", POSITIONS)
    assert given == EngineConfig(max_num_batched_tokens=128)


# ------------------------------------------------------------------------------------------------------- the pool

BLOCK_BYTES = 1000


def resolve_pool(memory_bytes=0, *, max_model_len_is_set=True, **options):
    config = resolve(block_size=16, max_num_seqs=4, **options)
    return resolve_pool_of(config, BLOCK_BYTES, memory_bytes, max_model_len_is_set=max_model_len_is_set)


def test_the_number_of_blocks_goes_before_bytes_and_bytes_before_what_the_device_has():
    options = {"max_model_len": 32}
    assert resolve_pool(5000, **options).num_kv_blocks == 5
    assert resolve_pool(5000, kv_cache_memory_bytes=6999, **options).num_kv_blocks == 6
    assert resolve_pool(5000, kv_cache_memory_bytes=6999, num_kv_blocks=7, **options).num_kv_blocks == 7


def test_no_more_blocks_are_taken_from_the_device_than_can_ever_be_used():
    assert resolve_pool(10**9, max_model_len=33).num_kv_blocks == 4 * 3 + 1


def test_the_pool_holds_one_longest_sequence_beside_the_null_block():
    assert resolve_pool(num_kv_blocks=3, max_model_len=32).max_model_len == 32
    with invalid("at most 32 tokens, but max_model_len is 33"):
        resolve_pool(num_kv_blocks=3, max_model_len=33)


@pytest.mark.parametrize(
    "memory, options", [(0, {"num_kv_blocks": 5}), (0, {"kv_cache_memory_bytes": 5999}), (5999, {})]
)
def test_a_pool_too_small_names_the_numbers_and_the_largest_max_model_len_that_fits(memory, options):
    message = (
        r"5 blocks of 16 tokens \(5,000 bytes; block 0 is reserved\).* at most 64 tokens, but max_model_len is 100\. "
        r"Set max_model_len to at most 64, or give the cache at least 8 blocks \(8,000 bytes\) through num_kv_blocks, "
        r"kv_cache_memory_bytes or gpu_memory_utilization"
    )
    with invalid(message):
        resolve_pool(memory, max_model_len=100, **options)
    assert resolve_pool(memory, max_model_len=64, **options).num_kv_blocks == 5
    assert resolve_pool(num_kv_blocks=8, max_model_len=100).max_model_len == 100


def test_a_max_model_len_that_nobody_set_yields_to_the_pool():
    config = resolve_pool(num_kv_blocks=5, max_model_len_is_set=False)
    assert (config.num_kv_blocks, config.max_model_len) == (5, 64)


@pytest.mark.parametrize("memory", [-10_000, 0, 999, 1999])
def test_a_pool_without_a_block_to_give_is_refused_with_the_size_that_would_do(memory):
    with invalid(r"[Gg]ive the cache at least 3 blocks \(3,000 bytes\)") as caught:
        resolve_pool(memory, max_model_len=32, max_model_len_is_set=False)
    assert "max_model_len to at most 0" not in str(caught.value)  # no remedy: max_model_len is at least 1
    assert "of -10 blocks" not in str(caught.value)
