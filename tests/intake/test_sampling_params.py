"""SamplingParams: normalised values, and refusals that name parameter, value and limit."""

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, asdict, fields, replace
from fractions import Fraction

import numpy as np
import pytest

from nanovllm.features.option_checks import FrozenDict
from nanovllm.features.sampling_params import EmbeddingParams, SamplingParams
from nanovllm.sampling_params import MAX_SEED, MIN_TEMPERATURE

ENDS = {
    "temperature": (0, MIN_TEMPERATURE, 100.0),
    "top_k": (-1, 0, 10**6),
    "top_p": (1e-9, 1),
    "min_p": (0, 1),
    "max_tokens": (1,),
    "min_tokens": (0,),
    "seed": (0, MAX_SEED),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_ends_of_each_range_are_accepted(name):
    assert [getattr(SamplingParams(**{name: value}), name) for value in ENDS[name]] == list(ENDS[name])
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4


def test_only_a_temperature_of_zero_is_greedy():
    found = [SamplingParams(temperature=value).is_greedy for value in (0, -0.0, MIN_TEMPERATURE, 1.0)]
    assert found == [True, True, False, False]


def test_stop_strings_become_a_tuple_of_their_own():
    given = ["a", "bc"]
    params = SamplingParams(stop=given)
    given.append("d")
    assert (params.stop, SamplingParams(stop="end").stop) == (("a", "bc"), ("end",))


@pytest.mark.parametrize("token_ids", [[5, 0], (5, 0), np.array([5, 0]), iter([5, 0]), {5: None, 0: None}])
def test_any_collection_of_stop_token_ids_becomes_a_tuple_of_ints(token_ids):
    stored = SamplingParams(stop_token_ids=token_ids).stop_token_ids
    assert stored == (5, 0)
    assert {type(token_id) for token_id in stored} == {int}


def test_numbers_of_numpy_and_fractions_become_plain_numbers():
    reals = {"temperature": np.float32(0.5), "top_p": Fraction(1, 2), "min_p": np.float16(0.5)}
    integers = {
        "top_k": np.int64(5), "max_tokens": np.int32(7), "min_tokens": np.uint8(2), "seed": np.uint64(MAX_SEED),
        "n": np.int8(2), "logprobs": np.int64(3), "prompt_logprobs": np.int64(0),
        "truncate_prompt_tokens": np.int16(9),
    }  # fmt: skip
    params = SamplingParams(**reals, **integers)
    assert params == SamplingParams(
        **{name: float(value) for name, value in reals.items()},
        **{name: int(value) for name, value in integers.items()},
    )
    for field in fields(params):
        assert type(getattr(params, field.name)) in (float, int, bool, tuple, FrozenDict, type(None)), field.name


CHANGES_OF_A_DICT = {
    "__setitem__": (9, 1e9),
    "__delitem__": (5,),
    "__ior__": ({9: 1e9},),
    "clear": (),
    "pop": (5,),
    "popitem": (),
    "setdefault": (9, 1e9),
    "update": ({9: 1e9},),
}


@pytest.mark.parametrize("change", CHANGES_OF_A_DICT)
def test_no_bias_goes_past_the_checks_by_a_change_of_what_is_handed_out(change):
    params = SamplingParams(logit_bias={5: 1.0})
    with pytest.raises(TypeError, match="cannot be changed; build new options"):
        getattr(params.logit_bias, change)(*CHANGES_OF_A_DICT[change])
    assert params.logit_bias == {5: 1.0}


def test_biases_are_a_copy_that_is_handed_on_like_any_dict():
    given = {5: 1.0}
    params = SamplingParams(logit_bias=given)
    given[6] = 2.0
    assert params.logit_bias == {5: 1.0} and repr(params.logit_bias) == "{5: 1.0}"
    assert json.loads(json.dumps(params.logit_bias)) == {"5": 1.0}
    assert asdict(params)["logit_bias"] == {5: 1.0}
    for copied in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), copy.copy(params), replace(params)):
        assert copied == params and hash(copied) == hash(params) and repr(copied) == repr(params)
        with pytest.raises(TypeError, match="cannot be changed"):
            copied.logit_bias[9] = 1e9
    assert replace(params, logit_bias=params.logit_bias | {7: 3.0}).logit_bias == {5: 1.0, 7: 3.0}


def test_params_are_immutable_and_can_be_shared():
    params = SamplingParams(stop=["a"], stop_token_ids=[3])
    with pytest.raises(FrozenInstanceError):
        params.temperature = 0.0
    assert len({params, SamplingParams(stop="a", stop_token_ids=(3,))}) == 1


def test_each_option_leaves_a_request_plain_or_names_a_stage_of_sampling_beyond_the_draw():
    stages = {
        "allowed_token_ids": [5], "structured_output": {"regex": "a"}, "bad_words": ["a"], "logit_bias": {5: 1.0},
        "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1, "logits_processors": [max],
        "logprobs": 0, "prompt_logprobs": 0, "min_tokens": 1,
    }  # fmt: skip
    plain = {
        "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "n": 2, "seed": 3, "truncate_prompt_tokens": 5,
        "max_tokens": 5, "ignore_eos": True, "stop_token_ids": [5], "stop": ["a"], "include_stop_str_in_output": True,
        "skip_special_tokens": False, "itl_goal": 0.5, "ttft_goal": 0.5,
    }  # fmt: skip
    of_stages = {"prompt_logprobs_start"}  # beside prompt_logprobs
    assert stages.keys() | plain.keys() | of_stages == {field.name for field in fields(SamplingParams)}
    assert SamplingParams().is_plain and SamplingParams(**plain).is_plain and not EmbeddingParams().is_plain
    assert [name for name, value in stages.items() if SamplingParams(**{name: value}).is_plain] == []
