"""Bad engine options: refused with the name, the value and the limit, before a model is loaded."""

import math

import pytest

from nanovllm import LLM, EngineConfig
from tests.support.refusals import OPTIONS, answer_of, assert_names, expected_answer
from tests.support.tiny_models import tiny_model


def test_an_unknown_option_is_a_type_error_that_lists_the_near_names():
    with pytest.raises(TypeError) as caught:
        LLM(tiny_model(), max_num_batch_tokens=128)
    assert_names(str(caught.value), "max_num_batch_tokens", "Did you mean", "max_num_batched_tokens")


def test_an_unknown_option_like_no_other_lists_them_all():
    with pytest.raises(TypeError) as caught:
        LLM(tiny_model(), qqq=1)
    assert_names(str(caught.value), "qqq", "block_size", "enforce_eager", "gpu_memory_utilization")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_model_len": 0}, ["0", "at least 1"]),
        ({"max_model_len": 4096}, ["4096", "2048"]),
        ({"max_num_batched_tokens": 0}, ["0", "at least 1"]),
        ({"max_num_batched_tokens": 16}, ["16", "17", "block_size"]),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 64}, ["64", "max_num_seqs", "80"]),
        ({"max_num_seqs": -1}, ["-1", "at least 1"]),
        ({"block_size": 48}, ["48", "16, 32, 64"]),
        ({"num_kv_blocks": 1}, ["1", "at least 2"]),
        ({"kv_cache_memory_bytes": 0}, ["0", "at least 1"]),
        ({"gpu_memory_utilization": 0.0}, ["0.0", "above 0"]),
        ({"gpu_memory_utilization": 1.5}, ["1.5", "at most 1"]),
        ({"gpu_memory_utilization": math.nan}, ["nan", "above 0"]),
        ({"long_prefill_token_threshold": 8, "block_size": 16}, ["8", "16"]),
        ({"max_long_partial_prefills": 5, "max_num_partial_prefills": 2}, ["5", "2"]),
        ({"attention_backend": "paged"}, ["paged", "flex", "sdpa"]),
        ({"attention_backend": "flex", "enforce_eager": True}, ["flex", "enforce_eager", "sdpa"]),
        ({"dtype": "int8"}, ["int8", "bfloat16"]),
        ({"device": "tpu"}, ["tpu", "cuda"]),
        ({"device": "cuda:one"}, ["cuda:one", "cuda:N"]),
        ({"client_weights": {"a": 0.0}}, ["client_weights", "'a'", "0.0", "between 0.001 and 1000"]),
        ({"client_weights": {"a": math.inf}}, ["'a'", "inf", "between 0.001 and 1000"]),
        ({"client_weights": {"a": math.nan}}, ["'a'", "nan", "between 0.001 and 1000"]),
        ({"client_weights": {"a": "2"}}, ["'a'", "'2'", "a number"]),
        ({"step_timeout": 0.0}, ["0.0", "at least 0.001"]),
        ({"step_timeout": math.inf}, ["inf", "at least 0.001"]),
        ({"seed": -1}, ["-1", "between 0 and"]),
        ({"seed": 2**64}, [2**64, 2**64 - 1]),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused_with_its_name_value_and_limit(options, named):
    with pytest.raises(ValueError) as caught:
        LLM(tiny_model(), **options)
    assert_names(str(caught.value), next(iter(options)), *named)


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": "128"},
        {"max_num_seqs": 2.0},
        {"block_size": True},
        {"enforce_eager": 1},
        {"enable_prefix_caching": "yes"},
        {"trust_remote_code": None},
        {"step_timeout": "10 min"},
        {"seed": None},
        {"seed": 0.5},
        {"revision": 5},
    ],
    ids=str,
)
def test_an_option_of_a_wrong_type_is_refused_with_its_name_and_value(options):
    with pytest.raises(TypeError) as caught:
        LLM(tiny_model(), **options)
    ((name, value),) = options.items()
    assert_names(str(caught.value), name, repr(value))


def test_a_config_cannot_be_changed_after_its_check():
    config = EngineConfig()
    with pytest.raises(AttributeError):
        config.block_size = 48
    assert config.block_size is None


@pytest.mark.parametrize("pool", [{"num_kv_blocks": 8}, {"kv_cache_memory_bytes": 8 * 16 * 2 * 2 * 2 * 64 * 4}])
def test_a_pool_smaller_than_one_sequence_is_refused_and_names_what_would_fit(pool):
    """Eight blocks of 16 tokens, one of them the null block: 112 tokens fit, max_model_len asks for 128."""
    options = OPTIONS | {"num_kv_blocks": None} | pool
    with pytest.raises(ValueError) as caught:
        LLM(tiny_model(), **options)
    assert_names(str(caught.value), "8 blocks", "max_model_len is 128", "at most 112", "9 blocks", "num_kv_blocks")


def test_a_pool_of_exactly_one_sequence_is_accepted():
    assert answer_of(LLM(tiny_model(), **(OPTIONS | {"num_kv_blocks": 9}))) == expected_answer()


def test_a_default_max_model_len_is_cut_to_what_the_pool_holds():
    options = OPTIONS | {"max_model_len": None, "num_kv_blocks": 8}
    assert LLM(tiny_model(), **options).config.max_model_len == 112
