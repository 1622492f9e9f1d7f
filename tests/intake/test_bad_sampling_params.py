"""Bad sampling parameters: refused with the name, the value and the limit."""

import math

import pytest

from nanovllm import SamplingParams
from tests.support.refusals import GREEDY, assert_names, refused
from tests.support.tiny_models import VOCAB_SIZE


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"temperature": -0.1}, "at least 0"),
        ({"temperature": math.nan}, "at least 0"),
        ({"temperature": math.inf}, "finite"),
        ({"temperature": 1e-9}, "Use 0 for greedy"),
        ({"top_p": 0.0}, "(0, 1]"),
        ({"top_p": -0.5}, "between 0 and 1"),
        ({"top_p": 1.5}, "between 0 and 1"),
        ({"top_p": math.nan}, "between 0 and 1"),
        ({"min_p": -0.5}, "between 0 and 1"),
        ({"min_p": 1.5}, "between 0 and 1"),
        ({"min_p": math.nan}, "between 0 and 1"),
        ({"top_k": -2}, "at least -1"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_tokens": -5}, "at least 1"),
        ({"max_tokens": 2**63}, "between 1 and 9223372036854775807"),
        ({"top_k": 2**64}, "between -1 and 9223372036854775807"),
        ({"min_tokens": -1}, "at least 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "max_tokens (8)"),
        ({"stop_token_ids": [-1]}, "at least 0"),
        ({"stop": ""}, "empty string"),
        ({"stop": ["a", ""]}, "empty string"),
        ({"seed": -1}, "between 0 and"),
        ({"seed": 2**64}, "between 0 and"),
    ],
    ids=str,
)
def test_a_parameter_out_of_range_is_refused_with_its_name_value_and_limit(options, allowed):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**options)
    name, value = next(iter(options.items()))
    assert_names(str(caught.value), name, allowed)
    if isinstance(value, (int, float)) and value == value and value != 0.0:
        assert_names(str(caught.value), value)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": "hot"},
        {"temperature": None},
        {"temperature": True},
        {"top_p": "0.9"},
        {"min_p": [0.1]},
        {"top_k": 1.5},
        {"top_k": "5"},
        {"max_tokens": 2.0},
        {"max_tokens": True},
        {"min_tokens": None},
        {"ignore_eos": 1},
        {"stop_token_ids": 5},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": [1.0]},
        {"stop": 5},
        {"stop": [5]},
        {"stop": b"x"},
        {"seed": 1.5},
        {"seed": "one"},
    ],
    ids=str,
)
def test_a_parameter_of_a_wrong_type_is_refused_with_its_name(options):
    with pytest.raises(TypeError) as caught:
        SamplingParams(**options)
    assert_names(str(caught.value), next(iter(options)))


def test_an_unknown_sampling_parameter_is_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)


def test_sampling_params_cannot_be_changed_after_their_check():
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.temperature = -1.0
    assert params.temperature == 1.0


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


@pytest.mark.parametrize(("name", "values"), [("priority", [1]), ("cache_salt", ["a", "b", "c"])])
def test_other_options_of_another_length_are_refused(name, values):
    message = refused(ValueError, [[5], [6]], GREEDY, **{name: values})
    assert_names(message, name, f"{len(values)} entries", "2 prompts")


@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", "high"), ("priority", 1.5), ("priority", True), ("cache_salt", 5), ("cache_salt", None)],
)
def test_other_options_of_a_wrong_type_are_refused(name, value):
    assert_names(refused(TypeError, [[5], [6]], GREEDY, **{name: value}), name, repr(value))


def test_a_stop_token_outside_the_vocabulary_is_refused_with_the_limit():
    message = refused(ValueError, [5], SamplingParams(stop_token_ids=[5, VOCAB_SIZE]))
    assert_names(message, "stop_token_ids", VOCAB_SIZE, "vocabulary")


def test_min_tokens_beyond_the_room_is_refused_with_the_numbers():
    message = refused(ValueError, [5] * 100, SamplingParams(min_tokens=29))
    assert_names(message, "min_tokens is 29", "100 tokens", "max_model_len (128)", "28")


def test_an_unknown_argument_of_generate_is_a_type_error():
    assert_names(refused(TypeError, [5], GREEDY, temperature=0.0), "temperature")
