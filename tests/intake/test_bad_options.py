"""Bad engine options: refused with the name, the value and the limit, before a model is loaded."""

import math

import pytest

from nanovllm import LLM, EngineConfig
from tests.support.refusals import OPTIONS, answer_of, assert_names, expected_answer
from tests.support.tiny_models import tiny_model


def test_the_models_positions_bound_what_is_asked_for():
    with pytest.raises(ValueError, match=r"max_model_len is 4096, .* 2048"):
        LLM(tiny_model(), max_model_len=4096)


@pytest.mark.parametrize("weight, said", [
    (0.0, "0.0"),
    (math.inf, "inf"),
    (math.nan, "nan"),
    ("2", "'2'.* a number"),
])  # fmt: skip
def test_a_weight_of_a_client_is_refused_with_its_client_value_and_limit(weight, said):
    with pytest.raises(ValueError, match=f"client_weights.*'a'.*{said}") as caught:
        EngineConfig(client_weights={"a": weight})
    assert weight == "2" or "between 0.001 and 1000" in str(caught.value)


@pytest.mark.parametrize("seconds", [0.0, math.inf])
def test_a_timeout_of_steps_is_refused_with_its_value_and_limit(seconds):
    with pytest.raises(ValueError, match=f"step_timeout.*{seconds}.*at least 0.001"):
        EngineConfig(step_timeout=seconds)


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_num_seqs", 2.0),
        ("block_size", True),
        ("enable_prefix_caching", "yes"),
        ("step_timeout", "10 min"),
        ("revision", 5),
    ],
)
def test_an_option_of_a_wrong_type_is_refused_with_its_name_and_value(name, value):
    with pytest.raises(TypeError) as caught:
        LLM(tiny_model(), **{name: value})
    assert_names(str(caught.value), name, repr(value))


def test_a_pool_of_exactly_one_sequence_is_accepted():
    assert answer_of(LLM(tiny_model(), **(OPTIONS | {"num_kv_blocks": 9}))) == expected_answer()
