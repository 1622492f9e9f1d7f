"""Structured outputs behind replicas: the front checks them, each engine process compiles its own."""

from __future__ import annotations

import pytest

from nanovllm import LLM, SamplingParams, StructuredOutput
from tests.support.replicas import OPTIONS, REPLICAS, completions, kill
from tests.support.structured import EOS, FORMS, check_text, form
from tests.support.tiny_models import random_prompts, save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), eos_token_ids=[EOS]))


@pytest.fixture(scope="module")
def pool(folder):
    with LLM(folder, **REPLICAS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(folder, **OPTIONS) as llm:
        return completions(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


KINDS = [kind for kind in FORMS if kind != "json_object"] * 2
PROMPTS = random_prompts(len(KINDS), seed=3)
PARAMS = [SamplingParams(seed=n, max_tokens=60, structured_output=form(kind)) for n, kind in enumerate(KINDS)]


def test_every_kind_crosses_to_an_engine_process_and_draws_what_one_engine_draws(pool, expected):
    assert completions(pool.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    for kind, ((_, _, text, finish_reason, _),) in zip(KINDS, expected, strict=True):
        assert finish_reason == "stop"
        check_text(kind, text)


def test_the_front_refuses_what_cannot_be_compiled(pool):
    with pytest.raises(ValueError, match=r"structured_output\.regex cannot be compiled"):
        pool.generate([5, 6], SamplingParams(structured_output=StructuredOutput(regex="(")), use_tqdm=False)
    assert not pool._engine.requests


def test_a_request_whose_process_dies_goes_on_within_its_form(pool, expected):
    stream = pool.stream(PROMPTS[0], PARAMS[0])
    assert not [next(stream) for _ in range(4)][-1].finished
    busy = next(replica.index for replica in pool.replicas() if replica.num_running)
    kill(pool, busy)
    assert completions(list(stream)[-1:]) == expected[:1]
