"""Structured outputs on a GPU: masks within the draw and in captured heads, beside all that requests may ask for."""

import functools

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.batch import NON_FINITE, NOTHING_LEFT
from nanovllm.device import find_kernel
from nanovllm.errors import StepError
from nanovllm.fast.fast_draws import fast_sampler
from nanovllm.features.groups.block_checks import check_scheduler
from nanovllm.features.token_masks import keep_bits, keep_bits_by_kernel
from nanovllm.sampler import DrawInputs, draw
from nanovllm.sequence import NewRequest, Sequence
from tests.support.llms import check_engine
from tests.support.structured import EOS, form
from tests.support.tiny_models import random_prompts, save_tiny

TokenMasks = find_kernel("bit_masks", "TokenMasks")  # by name, since its file needs Triton
OPTIONS = {"num_kv_blocks": 200, "max_model_len": 300, "max_num_seqs": 32, "block_size": 16}
WAYS = {
    "graphs, overlapped": {},
    "graphs, one by one": {"overlap": False},
    "no graphs, overlapped": {"cuda_graphs": False},
}
KINDS = ["json_schema", "regex", "grammar", "choice"]
EXTRAS = [
    {"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 20, "min_p": 0.02},
    {"min_tokens": 6}, {"frequency_penalty": 0.4, "top_k": 40}, {"logprobs": 3},
    {"temperature": 0.0, "logprobs": 0, "presence_penalty": 0.5}, {"n": 2}, {"logit_bias": {9: 2.0}},
    {"temperature": 0.0, "repetition_penalty": 1.3}, {"stop": ["a"]},
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------- the kernels


def own_masks(vocab_size, num_rows, seed):
    """Random masks, one of them empty; and which row has which, -1 for none."""
    generator = np.random.default_rng(seed)
    shares = generator.choice([0.5, 0.0005, 0.99], (num_rows, 1))
    is_allowed = generator.random((num_rows, -(-vocab_size // 32) * 32 + 32)) < shares
    is_allowed[np.arange(num_rows), generator.integers(0, vocab_size, num_rows)] = True
    is_allowed[2] = False
    rows = np.arange(num_rows, dtype=np.int32)
    rows[1::4] = -1
    return np.packbits(is_allowed, axis=1, bitorder="little").view(np.int32), rows


def draw_inputs(num_rows):
    ways = [
        {"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 1e-3}, {"min_p": 0.2, "top_k": 300},
        {"top_k": 40, "top_p": 0.7},
    ]  # fmt: skip
    requests = [
        Sequence(
            NewRequest("r", [1], SamplingParams(**ways[n % len(ways)])), arrival=0, max_model_len=100, seed=n
        )
        for n in range(num_rows)
    ]  # fmt: skip
    return DrawInputs.from_sequences(requests, [5] * num_rows).to_device(torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [500, 50_257, 151_936])
def test_a_draw_with_masks_is_the_draw_from_masked_logits(vocab_size, dtype):
    logits = 4 * torch.randn(40, vocab_size, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    logits[3, 7], logits[4, 9], logits[7] = torch.nan, torch.inf, -torch.inf
    logits = logits.to(dtype)
    words, rows = own_masks(vocab_size, len(logits), seed=vocab_size)
    masks = TokenMasks(torch.from_numpy(rows).cuda(), torch.from_numpy(words).cuda())
    expected, has_mask = logits.to(torch.float32, copy=True), np.flatnonzero(rows >= 0).tolist()
    keep_bits(expected, has_mask, words[rows[has_mask]])
    given = logits.clone()
    for has_filters in (True, False):
        inputs = draw_inputs(len(logits))
        if not has_filters:
            none = torch.zeros_like(inputs.top_p)
            inputs = inputs._replace(top_k=none.int(), top_p=none, min_p=none, is_cold=none.int())
        right = draw(expected, inputs, has_filters=has_filters)
        assert (right[[2, 3, 4, 7]] == NON_FINITE).all()
        right[2] = NOTHING_LEFT  # forbidden by the request, not missing from the model
        drawn = fast_sampler(compiles=True).draw(given, inputs, has_filters=has_filters, masks=masks)
        assert drawn[[2, 3, 4, 7]].tolist() == right[[2, 3, 4, 7]].tolist()
        assert (drawn != right).sum() <= 1, "rounding may decide between two"
    assert torch.equal(given.nan_to_num(), logits.nan_to_num()), "log-probabilities are of the logits as they come"


def test_masks_added_by_a_kernel_are_those_added_by_torch():
    logits = torch.randn(40, 5001, device="cuda")
    logits[0, 4] = torch.nan
    words, rows = own_masks(5001, 40, seed=0)
    has_mask = np.flatnonzero(rows >= 0).tolist()
    ours, right = logits.clone(), logits.clone()
    keep_bits(right, has_mask, words[rows[has_mask]])
    keep_bits_by_kernel(ours, has_mask, words[rows[has_mask]])
    torch.testing.assert_close(ours, right, rtol=0, atol=0, equal_nan=True)
    on_host = logits.cpu()
    keep_bits(on_host, has_mask, words[rows[has_mask]])
    torch.testing.assert_close(ours.cpu(), on_host, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------------------------------- the engines


@pytest.fixture(autouse=True)
def heads_are_captured_at_once(monkeypatch):
    monkeypatch.setattr("nanovllm.fast.gpu.forward_graphs.STEPS_TO_CAPTURE", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), eos_token_ids=[EOS])


def requests(*, is_structured=True):
    """Every kind with something else to ask for, each beside a plain request."""
    prompts, params = random_prompts(2 * len(EXTRAS), low=4, high=60, seed=4), []
    for number, extra in enumerate(EXTRAS):
        own = form(KINDS[number % len(KINDS)]) if is_structured else None
        params.append(SamplingParams(**({"seed": number, "max_tokens": 40, "structured_output": own} | extra)))
        params.append(SamplingParams(temperature=0.7 * (number % 2), seed=number, max_tokens=25, ignore_eos=True))
    return prompts, params


def answers(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    check_engine(llm)
    assert llm.stats().num_used_blocks == 0
    return [[(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs] for output in outputs]


def open_llm(folder, **options):
    return LLM(folder, dtype="float32", **(OPTIONS | options))


_found = {}


def by_host_sampler(folder, *, is_structured=True):
    if is_structured not in _found:
        with open_llm(folder, enforce_eager=True) as llm:
            _found[is_structured] = answers(llm, *requests(is_structured=is_structured))
    return _found[is_structured]


@pytest.mark.parametrize("way", WAYS)
def test_structured_outputs_of_every_kind_and_their_neighbours_are_those_of_the_host_sampler(folder, way):
    expected = by_host_sampler(folder)
    plain = by_host_sampler(folder, is_structured=False)
    assert expected[1::2] == plain[1::2] and expected[0] != plain[0]
    with open_llm(folder, **WAYS[way]) as llm:
        assert answers(llm, *requests()) == expected
        assert answers(llm, *requests()) == expected, "with a warm cache"
        prompts, params = requests()
        chosen = [n for n in range(len(prompts)) if not {"logit_bias", "min_tokens"} & EXTRAS[n // 2].keys()]
        for _ in range(3):  # without those that take every row of their steps to the host's sampler
            found = answers(llm, [prompts[n] for n in chosen], [params[n] for n in chosen])
            assert found == [expected[n] for n in chosen]
        heads = {head for head in llm._engine.model_runner.executor._heads.graphs if head.has_masks}
        assert bool(heads) == (way != "no graphs, overlapped")
        if heads:
            assert {head.has_filters for head in heads} == {True, False}
            assert any(head.num_top is not None for head in heads) and any(head.penalises for head in heads)


def test_preempted_structured_requests_end_the_same(folder):
    with open_llm(folder, num_kv_blocks=17, max_model_len=140, max_num_batched_tokens=80) as llm:
        assert answers(llm, *requests()) == by_host_sampler(folder)
        assert llm.stats().num_preemptions > 0


def test_a_stream_and_an_abort_leave_the_others_as_they_are(folder):
    (prompts, params), expected = requests(), by_host_sampler(folder)
    with open_llm(folder) as llm:
        doomed = llm.stream(prompts[0], params[0])
        next(doomed)
        seen = llm.stream(prompts[2], params[2])
        next(seen)
        doomed.close()  # with a step of it in flight
        *_, last = seen
        assert [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in last.outputs] == expected[2]
        assert answers(llm, prompts, params) == expected


def test_structured_steps_do_not_make_the_host_wait(folder):
    """Torch raises for every operation that would."""
    chosen = [0, 1, 2, 3, 4, 5]
    prompts, params = ([values[n] for n in chosen] for values in requests())
    with open_llm(folder) as llm:
        expected = answers(llm, prompts, params)  # captures what is needed
        launch = llm._engine.model_runner.launch_step

        def checked(run, *arguments):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return run(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        llm._engine.model_runner.launch_step = lambda *step: functools.partial(checked, checked(launch, *step))
        assert answers(llm, prompts, params) == expected


def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(folder, monkeypatch):
    from nanovllm.fast.gpu import mask_buffer

    prompts, params = ([values[n] for n in (0, 1, 4)] for values in requests())
    begin = mask_buffer.begin_masks

    def refuse(sequences, positions, masks, threads):
        begun = begin(sequences, positions, masks, threads)
        begun.finish({})
        for row, sequence in enumerate(sequences):
            if list(sequence.token_ids[: len(prompts[0])]) == prompts[0] and sequence.num_output_tokens >= 3:
                masks[row] = 0
        return begun._replace(failed={}, wait=None)

    with open_llm(folder) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        monkeypatch.setattr(mask_buffer, "begin_masks", refuse)
        first, *others = llm.generate(prompts, params, use_tqdm=False)
    assert first.outputs[0].finish_reason == "error" and "no token is left to draw" in first.error
    assert [output.outputs[0].token_ids for output in others] == expected[1:]


# ------------------------------------------------------------------------------------------------- masks in threads


@pytest.fixture
def late_draws(monkeypatch):
    """Masks go to threads from two samples on; the list grows by each late draw."""
    from nanovllm.fast.gpu import head_extras

    made = []  # not the draws: those of undone steps must go

    class Noted(head_extras.LateDraw):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(id(self))

    monkeypatch.setattr("nanovllm.features.grammar.mask_threads.ROWS_A_LEXER", 1)
    monkeypatch.setattr("nanovllm.features.grammar.mask_threads.perf_counter", lambda: 0.0)  # no mask is slow
    monkeypatch.setattr(head_extras, "LateDraw", Noted)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_late_draws_with_masks_from_threads_change_no_token(folder, late_draws, way):
    with open_llm(folder, **WAYS[way]) as llm:
        assert answers(llm, *requests()) == by_host_sampler(folder)
        prompts, params = requests()
        chosen = [n for n in range(len(prompts)) if not {"logit_bias", "min_tokens"} & EXTRAS[n // 2].keys()]
        for _ in range(3):
            found = answers(llm, [prompts[n] for n in chosen], [params[n] for n in chosen])
            assert found == [by_host_sampler(folder)[n] for n in chosen]
    assert len(late_draws) > 20


def test_late_draws_of_preempted_requests_change_no_token(folder, late_draws):
    prompts, params = requests()
    chosen = [n for n in range(len(prompts)) if params[n].temperature and not params[n].penalises]
    with open_llm(folder, num_kv_blocks=17, max_model_len=140, max_num_batched_tokens=80) as llm:
        for _ in range(2):
            answers(llm, prompts, params)
            found = answers(llm, [prompts[n] for n in chosen], [params[n] for n in chosen])
            assert found == [by_host_sampler(folder)[n] for n in chosen]
        assert llm.stats().num_preemptions > 0
    assert late_draws


def test_a_step_that_fails_with_a_late_draw_in_flight_leaves_the_matchers_right(folder, late_draws):
    prompts, params = requests()
    chosen = [n for n in range(0, len(prompts), 2) if not {"logit_bias", "min_tokens"} & EXTRAS[n // 2].keys()]
    prompts, params = [prompts[n] for n in chosen], [params[n] for n in chosen]
    with open_llm(folder) as llm:
        expected = answers(llm, prompts, params)
        runner = llm._engine.model_runner
        plan, made = runner.backend.plan, len(late_draws)

        def fails_once(layout):
            if len(late_draws) > made + 5:
                runner.backend.plan = plan
                raise RuntimeError("this step was to fail")
            return plan(layout)

        runner.backend.plan = fails_once
        engine = llm._engine
        engine.add(*engine.input_processor.process(prompts, params, request_ids=map(str, range(len(prompts)))))
        failures, found = 0, {}
        while engine.has_unfinished:
            try:
                engine.step()
            except StepError:
                failures += 1
            found |= {int(o.request_id): o for o in engine.outputs if o.finished}
            engine.outputs.clear()
        check_scheduler(engine.scheduler)
    assert failures == 1
    outputs = [found[n].outputs for n in range(len(prompts))]
    assert [[(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in each] for each in outputs] == expected
