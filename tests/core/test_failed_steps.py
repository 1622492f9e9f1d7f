"""`LLM` after a failed step, logits that are not finite, and a device error."""

import pytest
import torch

from nanovllm import EngineDeadError, ErrorKind, StepError
from nanovllm.errors import DeviceError
from tests.support.llms import GREEDY, assert_idle_and_whole, fail_in_step, generate, open_llm, shared_llm, token_ids
from tests.support.tiny_models import random_prompts, tiny_model


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize(
    ("error", "raised"),
    [(RuntimeError("boom"), StepError), (KeyboardInterrupt("boom"), KeyboardInterrupt)],
    ids=["error", "interrupt"],
)
def test_an_error_or_an_interrupt_in_a_step_leaves_the_engine_usable_and_no_block_leaked(
    monkeypatch, number, error, raised
):
    llm, prompts = open_llm(max_num_batched_tokens=96, max_num_seqs=8), random_prompts(6, low=20, high=100)
    fail_in_step(monkeypatch, llm, number, error)
    with pytest.raises(raised, match="boom"):
        generate(llm, prompts)
    assert_idle_and_whole(llm)
    assert token_ids(generate(llm, prompts)) == token_ids(generate(shared_llm(), prompts))


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


def kill(monkeypatch, llm):
    fail_in_step(monkeypatch, llm, 1, DeviceError("the device fell off the bus"))
    with pytest.raises(StepError, match="fell off the bus"):
        generate(llm, [5, 6, 7])


def test_after_a_device_error_the_engine_is_dead_and_says_why(monkeypatch):
    llm = open_llm()
    kill(monkeypatch, llm)
    with pytest.raises(EngineDeadError, match="fell off the bus"):
        generate(llm, [5, 6, 7])
    with pytest.raises(EngineDeadError, match="fell off the bus"):
        next(llm.stream([5, 6, 7]))


def test_a_dead_engine_can_be_closed_and_another_one_opened(monkeypatch):
    llm = open_llm()
    kill(monkeypatch, llm)
    llm.close()
    assert token_ids(generate(open_llm(), [5, 6, 7])) == token_ids(generate(shared_llm(), [5, 6, 7]))
