"""Structured output beside everything else: the table of cells, and the tokens of `transformers` with llguidance."""

import functools
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, ErrorKind, SamplingParams
from nanovllm.models.default_model import ensure_default_model
from tests.support.llms import check_engine, generate, greedy
from tests.support.structured import EOS, FORMS, check_text, form, model, open_llm, reference
from tests.support.tiny_models import random_prompts, tiny_tokenizer

CROWDED = {"num_kv_blocks": 11, "max_model_len": 160, "max_num_batched_tokens": 80}
PROMPTS = random_prompts(4, low=20, high=90, seed=8)
KINDS = list(FORMS)[:4]  # all but the endless one
MAX_TOKENS = 60
FREE = SamplingParams(temperature=1.0, seed=1, max_tokens=60, ignore_eos=True)


def params_of(kind, **options):
    return SamplingParams(**({"max_tokens": MAX_TOKENS, "temperature": 0.0, "structured_output": form(kind)} | options))


def results(outputs):
    return [[(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs] for output in outputs]


def answers(llm, params, prompts=None):
    outputs = generate(llm, PROMPTS if prompts is None else prompts, params)
    check_engine(llm)
    assert llm.stats().num_used_blocks == 0
    return outputs


@functools.cache
def plain_llm():
    return open_llm(enable_prefix_caching=False)


def completion_of(kind, **options):
    """That of the first prompt, alone."""
    (output,) = answers(plain_llm(), params_of(kind, **options), PROMPTS[:1])
    return output.outputs[0]


@functools.cache
def one_by_one(cell="neighbours"):
    """Each request of a cell alone, without overlap, chunks, hits or neighbours, and one without structure."""
    each = [FREE, *(params_of(kind, **CELLS[cell][1]) for kind in KINDS)]
    pairs = zip([PROMPTS[0], *PROMPTS], each, strict=True)
    return [results(answers(plain_llm(), params, [prompt]))[0] for prompt, params in pairs]


def assert_complete(kinds, found, *, may_be_cut=False):
    """Every output that ended by itself is right, by validators that are not ours."""
    ends = 0
    for kind, completions in zip(kinds, found, strict=True):
        for token_ids, text, finish_reason, stop_reason in completions:
            if finish_reason == "stop" and stop_reason == EOS:
                assert token_ids[-1] == EOS
                check_text(kind, text)
                ends += 1
            else:
                assert may_be_cut or finish_reason == "length"
    assert ends or may_be_cut


@pytest.mark.costly
@pytest.mark.parametrize("kind", FORMS)
def test_greedy_tokens_equal_those_of_transformers_with_llguidance(kind):
    outputs = answers(plain_llm(), params_of(kind, max_tokens=40), PROMPTS[:3])
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        assert output.outputs[0].token_ids == reference(model(), tiny_tokenizer(), kind, prompt, 40)
        if output.outputs[0].finish_reason == "stop":
            check_text(kind, output.outputs[0].text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMS)
def test_greedy_tokens_of_the_default_model_equal_those_of_transformers_with_llguidance(kind):
    folder = ensure_default_model()
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("Describe a small red box in the form that was asked for: ")["input_ids"]
    expected = reference(module, tokenizer, kind, prompt, 40, eos=tokenizer.eos_token_id)
    for overlap in (False, True):
        with LLM(module, tokenizer=tokenizer, enforce_eager=True, max_model_len=256, overlap=overlap) as llm:
            (output,) = generate(llm, [prompt], params_of(kind, max_tokens=40))
        assert output.outputs[0].token_ids == expected
        if output.outputs[0].finish_reason == "stop":
            check_text(kind, output.outputs[0].text)


def test_penalties_act_behind_the_mask_as_in_transformers():
    params = params_of("json_schema", repetition_penalty=1.3)
    for prompt, output in zip(PROMPTS[:2], answers(plain_llm(), params, PROMPTS[:2]), strict=True):
        expected = reference(model(), tiny_tokenizer(), "json_schema", prompt, MAX_TOKENS, repetition_penalty=1.3)
        assert output.outputs[0].token_ids == expected


# What a row of the table sets in the engine, and in its requests.
CELLS = {
    "neighbours": ({}, {}),
    "chunked prefill": ({"max_num_batched_tokens": 32}, {}),
    "preempted": (CROWDED, {}),
    "n samples": ({}, {"n": 3, "temperature": 1.0, "seed": 5}),
    "penalties": ({}, {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}),
    "log-probabilities": ({}, {"logprobs": 2, "prompt_logprobs": 1}),
    "bias": ({}, {"logit_bias": {7: 9.0, 400: 9.0, 20: -4.0}}),
    "bad words": ({}, {"bad_words": ("small", "ab", "77")}),
    "seeds": ({}, {"temperature": 1.0, "seed": 9}),
    "filters": ({}, {"temperature": 1.3, "seed": 9, "top_k": 20, "top_p": 0.9, "min_p": 0.01}),
    "stop strings": ({}, {"stop": ("a", "e", "2")}),
    "minimum": ({}, {"min_tokens": 2}),
    "a processor": ({}, {"logits_processors": (lambda token_ids, row: row + (len(token_ids) % 7),)}),
}


# What a request alone draws, without overlap, is what all must draw: the other cells are then seen with overlap.
ONE_BY_ONE = ("neighbours", "preempted", "n samples")
# What a prefix in the cache may change: its chunks, its blocks, and what is reported of it.
WARM = ("neighbours", "chunked prefill", "preempted", "log-probabilities")


@pytest.mark.full
@pytest.mark.parametrize(
    "cell, overlap",
    [
        pytest.param(
            cell,
            overlap,
            id=f"{cell}-{'overlap' if overlap else 'one by one'}",
            marks=[] if overlap or cell in ONE_BY_ONE else pytest.mark.slow,
        )
        for cell in CELLS
        for overlap in (False, True)
    ],
)
def test_beside_anything_else_a_request_draws_what_it_draws_alone(cell, overlap):
    engine, options = CELLS[cell]
    with open_llm(overlap=overlap, **engine) as llm:
        for _ in range(2 if cell in WARM else 1):  # with a cold and a warm cache
            params = [FREE, *(params_of(kind, **options) for kind in KINDS)]
            assert results(answers(llm, params, [PROMPTS[0], *PROMPTS])) == one_by_one(cell)
        if cell == "preempted":
            assert llm.stats().num_preemptions > 0
    assert_complete(KINDS, one_by_one(cell)[1:], may_be_cut=cell == "stop strings")


def test_log_probabilities_are_the_models_own_and_ranks_may_be_high():
    completion = completion_of("choice", logprobs=0)
    reported = [next(iter(report.values())) for report in completion.logprobs]
    assert len(reported) == len(completion.token_ids)
    assert max(one.rank for one in reported) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_allows_what_would_be_drawn_changes_nothing(temperature):
    anything = {"regex": r"(?s:.)*"}
    options = {"temperature": temperature, "seed": 3, "max_tokens": 20, "bad_words": ("zz",)}
    printable = SamplingParams(**options, allowed_token_ids=[*range(36, 97), EOS])  # ASCII
    masked = SamplingParams(**options, allowed_token_ids=[*range(36, 97), EOS], structured_output=anything)
    assert results(answers(plain_llm(), masked)) == results(answers(plain_llm(), printable))


def test_streamed_outputs_are_those_at_once():
    with open_llm(overlap=True) as llm:
        for prompt, kind, (expected,) in zip(PROMPTS, KINDS, one_by_one()[1:], strict=True):
            *_, last = llm.stream(prompt, params_of(kind))
            assert results([last]) == [[expected]]


def test_an_aborted_request_leaves_the_others_as_they_are():
    with open_llm(overlap=True) as llm:
        stream = llm.stream(PROMPTS[3], params_of("json_object", max_tokens=100))
        next(stream)
        other = llm.stream(PROMPTS[0], params_of(KINDS[0]))
        first = next(other)
        stream.close()
        *_, last = other
        assert first.outputs[0].token_ids and results([last]) == [one_by_one()[1]]
        alone = llm.stream(PROMPTS[1], params_of(KINDS[1]))
        next(alone)
        alone.close()  # with a step in flight that is not drawn yet, of nobody
        assert results(answers(llm, params_of(KINDS[1]), [PROMPTS[1]])) == [one_by_one()[2]]


def test_a_request_that_times_out_keeps_the_beginning_of_its_output():
    with open_llm(overlap=True) as llm:
        now, late = llm._engine.clock, [0.0]
        llm._engine.clock = lambda: now() + late[0]
        endless = params_of("regex", structured_output={"regex": "[a-z]*"}, max_tokens=400, logit_bias={EOS: -100})
        slow = llm.stream(PROMPTS[0], endless, timeout=600.0)
        seen = [list(next(slow).outputs[0].token_ids) for _ in range(5)][-1]
        other = llm.stream(PROMPTS[1], params_of(KINDS[1]))
        next(other)
        late[0] = 700.0  # with a step in flight
        *_, ended = slow
        *_, last = other
    assert ended.outputs[0].finish_reason == "timeout" and ended.outputs[0].token_ids[:5] == seen
    assert re.fullmatch("[a-z]+", ended.outputs[0].text)
    assert results([last]) == [one_by_one()[2]]


def test_the_end_of_max_tokens_within_a_form_is_a_length():
    completion = completion_of("json_schema", max_tokens=5)
    assert completion.finish_reason == "length" and len(completion.token_ids) == 5


def test_a_stop_string_may_cut_a_form_and_ends_with_stop():
    completion = completion_of("json_schema", stop=("size",))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "size")
    assert completion.text.endswith(',"')


def test_min_tokens_beyond_the_longest_form_is_an_error_of_the_request_that_names_both():
    bad, good = answers(
        plain_llm(), [params_of("choice", min_tokens=30), params_of(KINDS[1])], [PROMPTS[0], PROMPTS[1]]
    )
    assert bad.outputs[0].finish_reason == "error" and bad.error_kind is ErrorKind.REQUEST
    assert "structured_output, min_tokens" in bad.error
    assert results([good]) == [one_by_one()[2]]


@pytest.mark.parametrize(
    ("overlap", "form", "words"),
    [
        # The first token is cheap; the limits of llguidance are met behind some more.
        (
            False,
            {"regex": r"([a-z]{0,500}[0-9]{0,500}){0,300}z"},
            "structured_output.regex cannot be followed any further (lexer error: too many expr",
        ),
        # Each token multiplies the ways in which the text can be read, below all of llguidance's limits.
        (
            True,
            {"grammar": 'start: a\na: a a a a | a a a | a a | "x" | "y" | "xy" | "yx"\n'},
            "structured_output.grammar takes too long for its masks",
        ),
    ],
    ids=["limits", "masks"],
)
def test_a_grammar_that_takes_too_much_work_on_the_way_ends_its_request_alone(overlap, form, words):
    params = SamplingParams(seed=1, max_tokens=300, structured_output=form, logit_bias={EOS: -100})
    with open_llm(overlap=overlap) as llm:
        bad, good = answers(llm, [params, params_of(KINDS[1])], PROMPTS[:2])
        assert bad.outputs[0].finish_reason == "error" and bad.error_kind is ErrorKind.REQUEST
        assert words in bad.error
        assert results([good]) == [one_by_one()[2]]


def test_a_request_without_structure_asks_for_no_mask(monkeypatch):
    def refuse(*_):
        raise AssertionError("a mask was asked for")

    monkeypatch.setattr("nanovllm.features.penalties.penalties.token_masks", refuse)
    answers(plain_llm(), greedy(4, bad_words="a"))


def test_steps_in_flight_are_drawn_once_the_step_before_was_read():
    with open_llm(overlap=True) as llm:
        runner, events = llm._engine.model_runner, []
        launch, update = runner.launch, llm._engine.scheduler.update

        def watched_launch(batch):
            draw = launch(batch)
            events.append(("forward", batch.step_id))
            return lambda: (events.append(("draw", batch.step_id)), draw())[1]

        runner.launch = watched_launch
        llm._engine.scheduler.update = lambda batch, *drawn: (
            events.append(("read", batch.step_id)), update(batch, *drawn)
        )[1]  # fmt: skip
        (output,) = generate(llm, [PROMPTS[0]], params_of("regex"))
    assert output.outputs[0].finish_reason == "stop"
    assert events[:9] == [
        ("forward", 1), ("draw", 1), ("forward", 2), ("read", 1), ("draw", 2),
        ("forward", 3), ("read", 2), ("draw", 3), ("forward", 4),
    ]  # fmt: skip
