"""SamplingParams: normalised values, and refusals that name parameter, value and limit."""

import copy
import json
import pickle
import re
from dataclasses import FrozenInstanceError, asdict, fields, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from nanovllm.features.option_checks import FrozenDict
from nanovllm.features.sampling_params import EmbeddingParams, SamplingParams
from nanovllm.sampling_params import MAX_SEED, MIN_TEMPERATURE

NAN, INFINITY = float("nan"), float("inf")
REALS, INTEGERS = ("temperature", "top_p", "min_p"), ("top_k", "max_tokens", "min_tokens", "seed")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -0.1, "temperature is -0.1; it must be a finite number of at least 0"),
        ("temperature", NAN, "temperature is nan"),
        ("temperature", INFINITY, "temperature is inf"),
        ("temperature", -INFINITY, "temperature is -inf"),
        pytest.param("temperature", 10**400, "temperature is .* a finite number", id="temperature-beyond-any-float"),
        ("temperature", 1e-7, "temperature is 1e-07; the smallest above 0 is 1e-06. Use 0 for greedy"),
        ("top_k", -2, "top_k is -2; it must be at least -1"),
        ("top_p", 0, "top_p is 0; it must lie in .*temperature=0"),
        ("top_p", -0.5, "top_p is -0.5; it must be between 0 and 1"),
        ("top_p", 1.01, "top_p is 1.01; it must be between 0 and 1"),
        ("top_p", NAN, "top_p is nan"),
        ("min_p", -0.01, "min_p is -0.01; it must be between 0 and 1"),
        ("min_p", 1.5, "min_p is 1.5; it must be between 0 and 1"),
        ("min_p", NAN, "min_p is nan"),
        ("max_tokens", 0, "max_tokens is 0; it must be at least 1"),
        ("max_tokens", -5, "max_tokens is -5; it must be at least 1"),
        ("min_tokens", -1, "min_tokens is -1; it must be at least 0"),
        ("stop_token_ids", [3, -1], "stop_token_ids is -1; it must be at least 0"),
        ("stop", "", "stop holds an empty string"),
        ("stop", ["end", ""], "stop holds an empty string"),
        ("seed", -1, "seed is -1; it must be between 0 and 18446744073709551615"),
        ("seed", 2**64, "seed is 18446744073709551616; it must be between 0 and 18446744073709551615"),
    ],
)
def test_a_value_out_of_range_is_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *[(name, "1", f"{name} must be a number, not '1'") for name in REALS],
        *[(name, None, f"{name} must be a number, not None") for name in REALS],
        *[(name, True, f"{name} must be a number, not True") for name in REALS],
        *[(name, 1.0, f"{name} must be a whole number, not 1.0") for name in INTEGERS],
        *[(name, "1", f"{name} must be a whole number, not '1'") for name in INTEGERS],
        *[(name, True, f"{name} must be a whole number") for name in INTEGERS],
        ("top_k", None, "top_k must be a whole number, not None"),
        ("min_tokens", None, "min_tokens must be a whole number, not None"),
        ("ignore_eos", 1, "ignore_eos must be True or False, not 1"),
        ("ignore_eos", None, "ignore_eos must be True or False, not None"),
        ("stop_token_ids", 5, "stop_token_ids must be a list of token ids, not 5"),
        ("stop_token_ids", "5", "stop_token_ids must be a list of token ids, not '5'"),
        ("stop_token_ids", ["5"], "stop_token_ids must be a whole number, not '5'"),
        ("stop_token_ids", [2.0], "stop_token_ids must be a whole number, not 2.0"),
        ("stop", 5, "stop must be a string or a list of them, not 5"),
        ("stop", b"end", "stop must be a string or a list of them, not b'end'"),
        ("stop", [5], "stop must hold strings, not 5. Token ids belong in stop_token_ids"),
        ("stop", ["end", None], "stop must hold strings, not None"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(name, value, message):
    with pytest.raises(TypeError, match=message):
        SamplingParams(**{name: value})


def test_an_unknown_parameter_is_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(ValueError, match=r"min_tokens is 5, above max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=4).max_tokens is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", MIN_TEMPERATURE),
        ("temperature", 100.0),
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", 10**6),
        ("top_p", 1e-9),
        ("top_p", 1),
        ("min_p", 0),
        ("min_p", 1),
        ("max_tokens", 1),
        ("min_tokens", 0),
        ("seed", 0),
        ("seed", MAX_SEED),
    ],
)
def test_the_ends_of_each_range_are_accepted(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_only_a_temperature_of_zero_is_greedy():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=-0.0).is_greedy
    assert not SamplingParams(temperature=MIN_TEMPERATURE).is_greedy
    assert not SamplingParams().is_greedy


def test_one_stop_string_becomes_a_tuple_of_one():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "bc"]).stop == ("a", "bc")


def test_stops_left_out_or_none_are_empty():
    for params in (SamplingParams(), SamplingParams(stop=None, stop_token_ids=None), SamplingParams(stop=[])):
        assert params.stop == ()
        assert params.stop_token_ids == ()


@pytest.mark.parametrize("token_ids", [[5, 0], (5, 0), np.array([5, 0]), iter([5, 0]), {5: None, 0: None}])
def test_any_collection_of_stop_token_ids_becomes_a_tuple_of_ints(token_ids):
    stored = SamplingParams(stop_token_ids=token_ids).stop_token_ids
    assert stored == (5, 0)
    assert {type(token_id) for token_id in stored} == {int}


def test_numbers_of_numpy_become_plain_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(5), top_p=np.float64(0.5), min_p=np.float16(0.5),
        max_tokens=np.int32(7), min_tokens=np.uint8(2), seed=np.uint64(MAX_SEED),
        n=np.int8(2), logprobs=np.int64(3), prompt_logprobs=np.int64(0), truncate_prompt_tokens=np.int16(9),
    )  # fmt: skip
    assert params == SamplingParams(
        temperature=0.5, top_k=5, top_p=0.5, min_p=0.5, max_tokens=7, min_tokens=2, seed=MAX_SEED,
        n=2, logprobs=3, prompt_logprobs=0, truncate_prompt_tokens=9,
    )  # fmt: skip
    for field in fields(params):
        assert type(getattr(params, field.name)) in (float, int, bool, tuple, FrozenDict, type(None)), field.name


def test_fractions_are_numbers():
    assert SamplingParams(top_p=Fraction(1, 2)).top_p == 0.5


def test_a_change_to_the_list_that_was_given_changes_nothing():
    stops = ["a"]
    params = SamplingParams(stop=stops)
    stops.append("b")
    assert params.stop == ("a",)


CHANGES_OF_A_DICT = {
    "set": lambda mapping: mapping.__setitem__(9, 1e9),
    "delete": lambda mapping: mapping.__delitem__(5),
    "unite": lambda mapping: mapping.__ior__({9: 1e9}),
    "clear": lambda mapping: mapping.clear(),
    "pop": lambda mapping: mapping.pop(5),
    "popitem": lambda mapping: mapping.popitem(),
    "setdefault": lambda mapping: mapping.setdefault(9, 1e9),
    "update": lambda mapping: mapping.update({9: 1e9}),
}


@pytest.mark.parametrize("change", CHANGES_OF_A_DICT.values(), ids=CHANGES_OF_A_DICT.keys())
def test_no_bias_goes_past_the_checks_by_a_change_of_what_is_handed_out(change):
    params = SamplingParams(logit_bias={5: 1.0})
    with pytest.raises(TypeError, match="cannot be changed; build new options"):
        change(params.logit_bias)
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


def test_the_documentation_has_every_parameter_in_its_table():
    text = (Path(__file__).parents[2] / "docs" / "guide" / "api.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == {field.name for field in fields(SamplingParams)}


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
