"""An option's declaration alone gives its check, its flag and its refusals."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from dataclasses import dataclass

import pytest

from nanovllm import EngineConfig
from nanovllm import config as plain_config
from nanovllm.cli.flags import add_flags, options_given
from nanovllm.config import check_fields, option
from nanovllm.features.option_checks import string
from nanovllm.features.refusals import RAY, REPLICAS, TENSOR_PARALLEL, check_options
from nanovllm.serving.server.settings import ServerSettings
from tests.support.refusals import invalid

FIELDS = [(cls, field.name) for cls in (EngineConfig, ServerSettings) for field in dataclasses.fields(cls)]


@dataclass(frozen=True)
class Options:
    plain: int = option(3, "a whole number.")
    named: int | None = option(None, "not set, or a whole number.", flag="other_name")
    text: str = option("a", "a text.", refused={REPLICAS: "it is read here. Leave it out."})

    def __post_init__(self):
        check_fields(self, {"str": string})


@pytest.mark.parametrize("cls, name", FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_every_option_refuses_an_object_that_is_no_value_by_its_name(cls, name):
    with pytest.raises((TypeError, ValueError), match=rf"^{name} "):
        cls(**{name: pathlib.Path("x")})


def test_without_a_check_an_option_has_that_of_its_annotation():
    with invalid("plain is 0; it must be at least 1"):
        Options(plain=0)
    with invalid("named is 0; it must be at least 1"):
        Options(named=0)
    with pytest.raises(TypeError, match="text must be a string, not 5"):
        Options(text=5)


def test_a_default_is_not_checked():
    assert Options(named=None).named is None
    with pytest.raises(TypeError, match="plain must be a whole number, not None"):
        Options(plain=None)


def test_a_flag_may_have_another_name_than_its_field():
    parser = argparse.ArgumentParser()
    add_flags(parser, Options, {})
    assert options_given(parser.parse_args(["--other-name", "5"]), Options) == {"named": 5}


def test_an_option_is_refused_in_the_modes_that_it_names():
    check_options(Options(plain=5), REPLICAS)
    check_options(Options(text="b"), TENSOR_PARALLEL)
    with invalid(r"^text does not work with data_parallel_size: it is read here\. Leave it"):
        check_options(Options(text="b"), REPLICAS)


@pytest.mark.parametrize("field", dataclasses.fields(EngineConfig), ids=lambda field: field.name)
def test_an_engine_option_names_no_mode_that_does_not_exist(field):
    assert field.metadata["refused"].keys() <= {REPLICAS, TENSOR_PARALLEL, RAY}


def test_quantised_weights_on_ranks_are_refused_by_the_options_alone():
    with invalid(r"^quantization does not work with tensor_parallel_size: "):
        EngineConfig(quantization="int8", tensor_parallel_size=2)


def test_the_engine_resolves_its_own_options_without_those_of_features():
    given = {"device": "cpu", "max_num_seqs": 4, "block_size": 32}
    own = plain_config.EngineConfig.from_options(**given).resolve_limits("cpu", 128)
    public = EngineConfig.from_options(**given).resolve_limits("cpu", 128)
    assert isinstance(public, plain_config.EngineConfig) and not isinstance(own, EngineConfig)
    values = dataclasses.asdict(own)
    assert values == {name: getattr(public, name) for name in values} and len(values) < len(dataclasses.fields(public))
    with pytest.raises(TypeError, match="unknown engine option 'itl_goal'"):
        plain_config.EngineConfig.from_options(itl_goal=0.1)
