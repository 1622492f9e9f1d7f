"""Checks of a refusal's message, and that the engine stays usable."""

import functools

import pytest

from nanovllm import LLM, SamplingParams
from tests.support.llms import check_engine
from tests.support.tiny_models import tiny_model, tiny_tokenizer

OPTIONS = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 33, "max_model_len": 128}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@functools.cache
def shared_llm():
    return LLM(tiny_model(), tokenizer=tiny_tokenizer(), **OPTIONS)


@functools.cache
def llm_without_tokenizer():
    return LLM(tiny_model(), **OPTIONS)


@functools.cache
def expected_answer():
    return answer_of(LLM(tiny_model(), **OPTIONS))


def answer_of(llm):
    return llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def invalid(message):
    return pytest.raises(ValueError, match=message)


def refused(kind, *arguments, llm=None, **options):
    """Return the message of a refused call of generate; checks that the engine is unchanged and usable."""
    llm = llm or shared_llm()
    before = llm.stats()
    with pytest.raises(kind) as caught:
        llm.generate(*arguments, use_tqdm=False, **options)
    assert llm.stats() == before, "work had started, or something was left in the queue"
    check_engine(llm)
    assert answer_of(llm) == expected_answer()
    return str(caught.value)


def assert_names(message, *parts):
    for part in parts:
        assert str(part) in message, f"{part!r} is not in {message!r}"
