"""`LLM` after a failed step, logits that are not finite, and a device error."""

from __future__ import annotations

import pytest

from nanovllm import LLM, StepError
from nanovllm.core.errors import DeviceError
from tests.support.llms import GREEDY, assert_idle_and_whole, fail_in_step, generate, open_llm, shared_llm, token_ids
from tests.support.tiny_models import random_prompts


def test_what_a_failed_step_was_to_compute_is_not_found_in_the_prefix_cache(monkeypatch):
    llm, prompt = open_llm(), random_prompts(1, low=100, high=100)[0]
    fail_in_step(monkeypatch, llm, 1, RuntimeError("boom"))
    with pytest.raises(StepError):
        generate(llm, prompt)
    assert generate(llm, prompt)[0].num_cached_tokens == 0


def test_an_error_in_a_stream_frees_its_blocks(monkeypatch):
    llm = open_llm()
    fail_in_step(monkeypatch, llm, 3, RuntimeError("boom"))
    with pytest.raises(StepError):
        list(llm.stream([5] * 40, GREEDY))
    assert_idle_and_whole(llm)


def kill(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    fail_in_step(monkeypatch, llm, 1, DeviceError("the device fell off the bus"))
    with pytest.raises(StepError, match="fell off the bus"):
        generate(llm, [5, 6, 7])


def test_a_dead_engine_can_be_closed_and_another_one_opened(monkeypatch):
    llm = open_llm()
    kill(monkeypatch, llm)
    llm.close()
    assert token_ids(generate(open_llm(), [5, 6, 7])) == token_ids(generate(shared_llm(), [5, 6, 7]))
