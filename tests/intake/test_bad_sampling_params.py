"""Bad sampling parameters: refused with the name, the value and the limit."""

import math
import re

import pytest

from nanovllm import SamplingParams
from tests.support.refusals import GREEDY, assert_names, refused

OUT_OF_RANGE = [
    ({"temperature": -0.1}, "temperature is -0.1; it must be a finite number of at least 0"),
    ({"temperature": math.nan}, "temperature is nan; .* at least 0"),
    ({"temperature": math.inf}, "temperature is inf; .* finite"),
    ({"temperature": 1e-7}, "temperature is 1e-07; the smallest above 0 is 1e-06. Use 0 for greedy"),
    ({"top_p": 0.0}, r"top_p is 0; it must lie in \(0, 1\].*temperature=0"),
    *(
        ({name: value}, f"{name} is {value}; it must be between 0 and 1")
        for name in ("top_p", "min_p")
        for value in (-0.5, 1.01, math.nan)
    ),
    ({"top_k": -2}, "top_k is -2; it must be at least -1"),
    ({"top_k": 2**64}, f"top_k is {2**64}; .* between -1 and {2**63 - 1}"),
    ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
    ({"max_tokens": 2**63}, f"max_tokens is {2**63}; .* between 1 and {2**63 - 1}"),
    ({"min_tokens": -1}, "min_tokens is -1; it must be at least 0"),
    ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens is 9, above max_tokens \(8\)"),
    *(({"seed": value}, f"seed is {value}; it must be between 0 and {2**64 - 1}") for value in (-1, 2**64)),
    *(({"truncate_prompt_tokens": value}, f"truncate_prompt_tokens is {value}") for value in (0, -1)),
]


@pytest.mark.parametrize(("options", "message"), OUT_OF_RANGE, ids=[text for _, text in OUT_OF_RANGE])
def test_a_parameter_out_of_range_is_refused_with_its_name_value_and_limit(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


REALS = ["temperature", "top_p", "min_p"]
INTEGERS = ["top_k", "max_tokens", "min_tokens", "seed", "truncate_prompt_tokens"]
SWITCHES = ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens"]
WRONG_TYPES = [
    *((name, value, "must be a number") for name in REALS for value in ("1", None, True, [0.1])),
    *((name, value, "must be a whole number") for name in INTEGERS for value in ("1", 1.0, 1.5, True)),
    *((name, None, "must be a whole number") for name in ("top_k", "min_tokens")),
    *((name, value, "must be True or False") for name in SWITCHES for value in (1, None)),
    *(("stop_token_ids", value, "must be a list of token ids") for value in (5, "5")),
    *(("stop", value, "must be a string or a list of them") for value in (5, b"end")),
]
WRONG_ITEMS = [
    *(("stop_token_ids", value, "must be a whole number") for value in ("5", 2.0)),
    *(("stop", value, "must hold strings") for value in (5, None)),
]


@pytest.mark.parametrize(("name", "value", "said"), WRONG_TYPES)
def test_a_parameter_of_a_wrong_type_is_refused_with_its_name(name, value, said):
    with pytest.raises(TypeError, match=re.escape(f"{name} {said}, not {value!r}")):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value", "said"), WRONG_ITEMS)
def test_an_item_of_a_wrong_type_is_refused_with_its_name(name, value, said):
    with pytest.raises(TypeError, match=f"{name} {said}, not {value!r}"):
        SamplingParams(**{name: [value]})


@pytest.mark.costly
@pytest.mark.parametrize("params", [{"temperature": 0.0}, "greedy", 5, 0, "", False], ids=repr)
def test_sampling_params_of_a_wrong_type_are_refused(params):
    assert_names(refused(TypeError, [[5], [6]], params), "sampling_params", "SamplingParams")


def test_sampling_params_of_a_wrong_type_in_a_list_are_refused():
    assert_names(refused(TypeError, [[5], [6]], [GREEDY, None]), "sampling_params", "SamplingParams", "None")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_lists_of_different_lengths_are_refused_with_both_lengths(count):
    message = refused(ValueError, [[5], [6]], [GREEDY] * count)
    assert_names(message, "sampling_params", f"{count} entries", "2 prompts", "one for all, or one each")


def test_min_tokens_beyond_the_room_is_refused_with_the_numbers():
    message = refused(ValueError, [5] * 100, SamplingParams(min_tokens=29))
    assert_names(message, "min_tokens is 29", "100 tokens", "max_model_len (128)", "28")
