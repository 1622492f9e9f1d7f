"""Requests with pictures where other features meet them: tiers, drafts, goals, options of sampling, faults, updates."""

import copy
import random

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import StepError
from nanovllm.features.media import steps
from tests.support.llms import assert_idle_and_whole, fail_in_step, generate, token_ids
from tests.support.logprobs import assert_reports
from tests.support.picture_models import (
    expected,
    mixed_parts,
    own_inputs,
    picture_model,
    picture_prompt,
    pictures_of,
)
from tests.support.tiny_models import tiny_tokenizer

FAMILIES = pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
OPTIONS = {"block_size": 16, "max_num_seqs": 4, "max_model_len": 200, "num_kv_blocks": 14, "max_num_batched_tokens": 20}
OPTIONS["enforce_eager"] = True
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SCARCE = {"num_kv_blocks": 5, "max_model_len": 64, "max_num_seqs": 1}
ENGINES = {
    "host memory": SCARCE | {"prefix_cache_host_bytes": 2**24},
    "files": SCARCE | {"prefix_cache_host_bytes": 2**24, "prefix_cache_dir": "folder", "enforce_eager": False},
    "drafts": {"speculation": "suffix"},
    "goals": {"itl_goal": 0.5, "ttft_goal": 60.0},
    "clients": {"client_weights": {"one": 2.0}},
    "no prefix cache": {"enable_prefix_caching": False, "overlap": False},
}


def prompts_of(family):
    return [picture_prompt(family, *parts) for parts in mixed_parts(family)]


@pytest.mark.parametrize("name", ENGINES)
@FAMILIES
def test_an_engine_of_any_kind_answers_as_transformers(family, name, tmp_path):
    options = OPTIONS | ENGINES[name]
    model = picture_model(family)
    if "prefix_cache_dir" in options:
        options |= {"prefix_cache_dir": str(tmp_path / "files"), "skip_tokenizer_init": True, "dtype": "float32"}
        model.save_pretrained(tmp_path)
        model = tmp_path
    own = [expected(family, *parts) for parts in mixed_parts(family)]
    for _ in range(2 if name == "files" else 1):
        with LLM(model, **options) as llm:
            for seed in range(6):
                order = random.Random(seed).sample(range(len(own)), len(own))
                prompts = prompts_of(family)
                answers = [token_ids(generate(llm, [prompts[index]], GREEDY))[0] for index in order]
                assert answers == [own[index] for index in order]
            assert token_ids(generate(llm, prompts, GREEDY)) == own
            assert_idle_and_whole(llm)
            tiers = llm.stats().tiers
    if "prefix_cache_host_bytes" in options:
        assert tiers.num_loaded_blocks or tiers.num_recomputes
    if name == "files":
        assert tiers.num_read_blocks


@FAMILIES
def test_penalties_and_reports_read_placeholders(family):
    parts = mixed_parts(family)[2]
    own = expected(family, *parts, repetition_penalty=1.7)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, repetition_penalty=1.7, logprobs=3)
    with LLM(picture_model(family), **OPTIONS) as llm:
        (output,) = generate(llm, [picture_prompt(family, *parts)], params)
        *_, last = llm.stream(picture_prompt(family, *parts), params)
    assert token_ids([output, last]) == [own, own]
    inputs = own_inputs(family, *parts, more=own)
    with torch.no_grad():
        logits = picture_model(family)(**inputs).logits[0, len(output.prompt_token_ids) - 1 :]
    for report, row, token_id in zip(output.outputs[0].logprobs, logits.log_softmax(dim=-1), own, strict=False):
        assert_reports(report, row, token_id, 3)


def test_a_form_a_bad_word_and_samples():
    texts = ("cat", "the dog", "a bird")
    prompt = picture_prompt("llava", *mixed_parts("llava")[2])
    own = expected("llava", *mixed_parts("llava")[2])
    kinds = [
        SamplingParams(seed=1, n=2, max_tokens=12, structured_output={"choice": texts}),
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logit_bias={own[0]: -100.0}),
    ]
    with LLM(picture_model("llava"), tokenizer=tiny_tokenizer(), **OPTIONS) as llm:
        formed, biased, plain = generate(llm, [prompt] * 3, [*kinds, GREEDY])
        assert all(sample.text in texts for sample in formed.outputs)
        assert own[0] not in biased.outputs[0].token_ids and token_ids([plain]) == [own]


@pytest.mark.parametrize("number", range(1, 9))
@FAMILIES
def test_a_step_that_fails_is_undone_and_its_pictures_stay(family, number, monkeypatch):
    own = [expected(family, *parts) for parts in mixed_parts(family)]
    with LLM(picture_model(family), **OPTIONS) as llm:
        fail_in_step(monkeypatch, llm, number, RuntimeError("for the test"))
        with pytest.raises(StepError, match="for the test"):
            generate(llm, prompts_of(family), GREEDY)
        assert token_ids(generate(llm, prompts_of(family), GREEDY)) == own
        assert_idle_and_whole(llm)


def test_more_features_than_are_kept_do_not_hold_a_request_back(monkeypatch):
    """Features of one picture make room for those of the other, while another request runs."""
    monkeypatch.setattr(steps, "PICTURE_BYTES", 1)
    parts = mixed_parts("llava")[2]
    own = expected("llava", *parts, max_tokens=2)
    with LLM(picture_model("llava"), **OPTIONS) as llm:
        long, short = (SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (150, 2))
        running = llm.stream([5, 6, 7], long)
        next(running)
        assert token_ids(generate(llm, [picture_prompt("llava", *parts)], short)) == [own]
        assert llm.stats().num_running == 1
        running.close()


@FAMILIES
def test_streams_that_are_left_at_any_step_leave_nothing(family):
    parts = mixed_parts(family)
    own = [expected(family, *each) for each in parts]
    with LLM(picture_model(family), **OPTIONS) as llm:
        for number in range(5):
            streams = [llm.stream(picture_prompt(family, *each), GREEDY) for each in parts]
            for _ in range(number):
                seen = [next(stream) for stream in streams]
            if number:
                assert token_ids(seen) == [each[: len(got)] for each, got in zip(own, token_ids(seen), strict=True)]
            for stream in streams:
                stream.close()
        assert_idle_and_whole(llm)
        assert token_ids(generate(llm, prompts_of(family), GREEDY)) == own


@pytest.mark.parametrize("is_announced", [False, True])
def test_weights_of_the_encoder_may_change_between_calls(is_announced):
    (picture,) = pictures_of("llava", 1)
    model = copy.deepcopy(picture_model("llava"))
    prompt = picture_prompt("llava", [5, 6], picture, [7])
    ids = torch.tensor([list(prompt)])
    answers = []
    with LLM(model, **OPTIONS) as llm:
        for _ in range(2):
            own = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), **picture, max_new_tokens=8, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            answers.append(own[0, ids.shape[1] :].tolist())
            assert token_ids(generate(llm, [prompt], GREEDY)) == answers[-1:]
            for name, parameter in model.named_parameters():
                if "multi_modal_projector" in name:
                    torch.manual_seed(len(name))
                    change = 2.0 * torch.randn_like(parameter)
                    if is_announced:
                        parameter.data.add_(change)
                    else:
                        with torch.no_grad():
                            parameter.add_(change)
            if is_announced:
                llm.weights_changed()
    assert answers[0] != answers[1]
