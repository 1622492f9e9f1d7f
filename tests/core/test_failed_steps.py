"""What `LLM` says of a failed step, and does about logits that are not finite."""

import pytest
import torch

from nanovllm import ErrorKind, StepError
from tests.support.llms import assert_idle_and_whole, fail_in_step, generate, open_llm, shared_llm, token_ids
from tests.support.tiny_models import random_prompts, tiny_model


def test_a_step_error_names_its_requests_and_its_cause(monkeypatch):
    llm = open_llm()
    generate(llm, "count me")  # so that ids do not start at 0
    cause = RuntimeError("boom")
    fail_in_step(monkeypatch, llm, 1, cause)
    with pytest.raises(StepError) as caught:
        generate(llm, ["a", "b"])
    assert sorted(caught.value.request_ids) == ["1", "2"]
    assert caught.value.__cause__ is cause
    assert all(part in str(caught.value) for part in ("RuntimeError", "boom", *caught.value.request_ids))


def test_a_request_whose_logits_are_not_finite_ends_alone_with_an_error_that_says_so():
    model = tiny_model(num_layers=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    prompts = [[p for p in prompt if p != 7] for prompt in random_prompts(3, low=40, high=60)]
    llm = open_llm(model)
    good, bad, also_good = generate(llm, [prompts[0], [*prompts[1], 7], prompts[2]])
    assert bad.outputs[0].finish_reason == "error"
    assert bad.request_id in bad.error
    assert "finite" in bad.error and bad.error_kind is ErrorKind.INTERNAL
    assert token_ids([good, also_good]) == token_ids(generate(shared_llm(), [prompts[0], prompts[2]]))
    assert_idle_and_whole(llm)


def test_the_blocks_of_a_request_driven_to_nan_harm_no_successor():
    model = tiny_model(num_layers=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    llm = open_llm(model, max_model_len=128, num_kv_blocks=10)  # so few that the successors take the same ones
    generate(llm, [[7] * 100])
    prompts = [[p for p in prompt if p != 7] for prompt in random_prompts(4, low=20, high=100)]
    assert token_ids(generate(llm, prompts)) == token_ids(generate(shared_llm(), prompts))
