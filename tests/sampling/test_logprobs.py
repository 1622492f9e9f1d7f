"""Logprobs against the log-softmax of a plain forward pass, under any chunking, preemption and overlap."""

import sys

import pytest
import torch
from torch import Tensor

from nanovllm import SamplingParams, StepError
from nanovllm.features.logprobs.logprobs import ROWS_AT_ONCE, Measured, PackedMeasured
from tests.support import llms
from tests.support.llms import OVERLAP, POOLS, check_engine, greedy, open_llm, token_ids
from tests.support.logprobs import assert_reports, assert_right, mixed_requests
from tests.support.nuclei import random_logits
from tests.support.tiny_models import VOCAB_SIZE, random_prompts, save_tiny, tiny_model


def generate(llm, prompts, params):
    outputs = llms.generate(llm, prompts, params)
    check_engine(llm)
    return outputs


def assert_all_right(model, outputs, params):
    for output, wanted in zip(outputs, params, strict=True):
        assert_right(model, output, wanted)


@pytest.mark.costly
@pytest.mark.parametrize(
    "pool, overlap",
    [*((pool, True) for pool in POOLS), ("tiny pool", False)],
    ids=[*(f"{pool}-overlap" for pool in POOLS), "tiny pool-one by one"],
)
def test_they_are_the_log_softmax_of_transformers(pool, overlap):
    model = tiny_model("qwen3")
    prompts, params = mixed_requests()
    with open_llm(model, overlap=overlap, **POOLS[pool]) as llm:
        assert_all_right(model, generate(llm, prompts, params), params)
        again = generate(llm, prompts, params)
        assert_all_right(model, again, params)
        assert any(output.num_cached_tokens for output in again)
        assert (llm.stats().num_preemptions > 0) == (pool == "tiny pool")


def test_they_are_right_with_packed_weights_and_compiled_kernels(tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    prompts, params = mixed_requests()
    with open_llm(folder, dtype="float32", enforce_eager=False, **POOLS["small chunks"]) as llm:
        assert_all_right(tiny_model(), generate(llm, prompts, params), params)


def test_ties_share_the_better_rank_and_a_row_without_a_token_harms_no_other():
    logits = torch.tensor([[0.0, 2.0, 2.0, -torch.inf], [1.0, 0.0, 0.0, 0.0], [torch.nan] * 4])
    measured = Measured.from_logits(logits, torch.tensor([2, 3, -1]), 2)
    assert measured.ranks.tolist()[:2] == [1, 2]
    torch.testing.assert_close(measured.logprobs[:2, 0], logits[:2].log_softmax(dim=-1)[[0, 1], [2, 3]])


@pytest.mark.parametrize("num_rows", [1, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, 2 * ROWS_AT_ONCE + 1])
def test_any_number_of_rows_is_measured(num_rows):
    logits = random_logits(num_rows, 100)
    token_ids = torch.arange(num_rows) % 100
    reports = list(Measured.from_logits(logits, token_ids, 4).rows([4] * num_rows))
    for report, row, token_id in zip(reports, logits.log_softmax(dim=-1), token_ids.tolist(), strict=True):
        assert_reports(report, row, token_id, 4)


def test_bfloat16_logits_are_normalised_in_float32():
    logits = random_logits(3, 5000).bfloat16()
    measured = Measured.from_logits(logits, torch.tensor([1, 2, 3]), 0)
    expected = logits.float().log_softmax(dim=-1)[range(3), [1, 2, 3]]
    torch.testing.assert_close(measured.logprobs[:, 0], expected, atol=1e-5, rtol=0)


def test_what_the_request_does_to_its_logits_does_not_show():
    model = tiny_model()
    forced = SamplingParams(temperature=0.3, max_tokens=4, logprobs=2, logit_bias={33: 100.0}, frequency_penalty=2.0)
    with open_llm(model) as llm:
        (output,) = generate(llm, [[5, 6, 7]], forced)
    assert output.outputs[0].token_ids == [33] * 4
    assert_right(model, output, forced)
    assert all(report[33].rank > 1 for report in output.outputs[0].logprobs)


def test_who_asks_for_them_draws_the_same_tokens():
    prompts, params = random_prompts(6, low=3, high=60, seed=1), [{"temperature": 0.0}, {"top_p": 0.8}, {}] * 2
    with open_llm() as llm:
        plain, asked = (
            generate(llm, prompts, [SamplingParams(seed=3, max_tokens=12, **asks, **p) for p in params])
            for asks in ({}, {"logprobs": 4, "prompt_logprobs": 4})
        )
    assert token_ids(plain) == token_ids(asked)


def test_who_does_not_ask_pays_no_sort_and_no_measuring(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a vocabulary was sorted")

    with open_llm() as llm:
        for name in ("topk", "sort", "argsort", "logsumexp"):
            monkeypatch.setattr(Tensor, name, refuse)
        generate(llm, [[5, 6, 7]] * 3, [SamplingParams(temperature=t, max_tokens=5) for t in (0.0, 1.0, 0.5)])
        with pytest.raises(StepError, match="a vocabulary was sorted"):
            generate(llm, [[5, 6, 7]], greedy(5, logprobs=1))


# -------------------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_with_logprobs_takes_no_hits_and_leaves_its_blocks_to_be_found():
    prompt = random_prompts(1, low=100, high=100)[0]
    asking, plain = SamplingParams(max_tokens=2, prompt_logprobs=0), SamplingParams(max_tokens=2)
    with open_llm() as llm:
        cached = [generate(llm, [prompt], params)[0].num_cached_tokens for params in (asking, asking, plain)]
        queries = llm.stats().prefix_cache_queries
    assert cached == [0, 0, 96]
    assert queries == 100  # nothing is counted as looked up that was not


def test_of_several_samples_the_first_alone_computes_the_whole_prompt():
    prompt = random_prompts(1, low=100, high=100)[0]
    with open_llm() as llm:
        (output,) = generate(llm, [prompt], SamplingParams(n=4, max_tokens=2, prompt_logprobs=1))
        assert llm.stats().num_scheduled_tokens == 100 + 4
    assert len(output.prompt_logprobs) == 100


def test_a_prompt_of_one_token_has_no_logprobs():
    with open_llm() as llm:
        (output,) = generate(llm, [[5]], SamplingParams(max_tokens=2, prompt_logprobs=3))
    assert output.prompt_logprobs == [None]


def test_a_truncated_prompt_has_logprobs_of_the_tokens_that_were_computed():
    model, params = tiny_model(), SamplingParams(max_tokens=2, prompt_logprobs=1, truncate_prompt_tokens=20)
    with open_llm(model) as llm:
        (output,) = generate(llm, random_prompts(1, low=50, high=50), params)
    assert len(output.prompt_token_ids) == 20
    assert_right(model, output, params)


def test_the_logits_of_a_long_prompt_are_made_in_pieces(monkeypatch):
    prompt = random_prompts(1, low=400, high=400)[0]
    with open_llm(max_num_batched_tokens=512) as llm:
        binding, sizes = llm._engine.model_runner.binding, []
        logits_of_rows = binding.passes.logits

        def noting(*args, **kwargs):
            logits = logits_of_rows(*args, **kwargs)
            sizes.append(len(logits))
            return logits

        monkeypatch.setattr(binding.passes, "logits", noting)
        generate(llm, [prompt], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert sum(sizes) == 400  # 399 tokens of the prompt are told of, and one is drawn
    assert max(sizes) <= ROWS_AT_ONCE


def test_the_model_runs_once_and_is_left_as_it_was():
    model, num_calls = tiny_model(), [0]
    model.model.layers[0].register_forward_hook(lambda *_: num_calls.__setitem__(0, num_calls[0] + 1))
    with open_llm(model, max_num_batched_tokens=512) as llm:
        before = {name: dict(vars(module)) for name, module in model.named_modules()}
        num_calls[0] = 0
        generate(llm, random_prompts(1, low=400, high=400), SamplingParams(max_tokens=1, prompt_logprobs=1))
        assert num_calls[0] == 1
        assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


@OVERLAP
def test_a_step_that_fails_leaves_no_report_behind(monkeypatch, overlap):
    model, params = tiny_model(), SamplingParams(max_tokens=12, logprobs=2, prompt_logprobs=2, seed=1)
    prompt = random_prompts(1, low=70, high=70)[0]
    with open_llm(model, overlap=overlap, **POOLS["small chunks"]) as llm:
        engine = llm._engine
        execute, countdown = engine.model_runner.execute, [0]

        def failing(batch):
            countdown[0] += 1
            if countdown[0] in (2, 5, 9):
                raise RuntimeError("for the test")
            return execute(batch)

        monkeypatch.setattr(engine.model_runner, "execute", failing)
        llms.submit(engine, "r", prompt, params)
        num_failures = 0
        while not engine.outputs:
            try:
                engine.step()
            except StepError:
                num_failures += 1
        assert num_failures == 3
        assert_right(model, engine.outputs.popleft(), params)


# --------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_than_the_vocabulary_is_refused_and_all_of_it_is_not(name):
    with open_llm() as llm:
        with pytest.raises(ValueError, match=f"{name} is {VOCAB_SIZE + 1}, more tokens .* at most {VOCAB_SIZE}"):
            generate(llm, [[5, 6]], SamplingParams(**{name: VOCAB_SIZE + 1}))
        assert llm.stats().num_steps == 0
        (output,) = generate(llm, [[5, 6]], SamplingParams(max_tokens=1, **{name: VOCAB_SIZE}))
    (report,) = output.outputs[0].logprobs if name == "logprobs" else output.prompt_logprobs[1:]
    assert set(report) == set(range(VOCAB_SIZE))
    assert sum(torch.tensor([logprob for logprob, _ in report.values()]).exp()) == pytest.approx(1.0, abs=1e-4)


def test_prompts_of_a_model_whose_head_cannot_be_called_apart_are_refused():
    class Whole(type(tiny_model())):
        base_model_prefix = "nothing"  # so that it is its own base model

    model = tiny_model()
    model.__class__ = Whole
    with open_llm(model) as llm:
        with pytest.raises(ValueError, match="prompt_logprobs is 1, and Whole has no base model apart from its head"):
            generate(llm, [[5, 6]], SamplingParams(prompt_logprobs=1))
        (output,) = generate(llm, [[5, 6]], SamplingParams(max_tokens=2, logprobs=1))
    assert len(output.outputs[0].logprobs) == 2


def test_a_stream_shows_as_many_as_it_shows_tokens():
    with open_llm() as llm:
        seen = list(llm.stream([5, 6, 7], SamplingParams(max_tokens=5, logprobs=1, prompt_logprobs=0)))
    assert [len(output.outputs[0].logprobs) for output in seen] == [1, 2, 3, 4, 5]
    assert all(len(output.prompt_logprobs) == 3 for output in seen)


@pytest.mark.parametrize("num_top", [0, 3])
def test_words_of_a_graph_hold_what_was_measured(num_top):
    measured = Measured.from_logits(torch.randn(5, 50), torch.tensor([3, 9, -1, 49, 0]), num_top)
    words = torch.full((Measured.num_words(8, num_top) + 10,), -1, dtype=torch.int32)
    to = Measured.from_words(words, 8, num_top)
    for name in Measured.__slots__:
        getattr(to, name)[:5] = getattr(measured, name)
    assert (words[Measured.num_words(8, num_top) :] == -1).all()
    found = PackedMeasured(words, num_rows=8, num_top=num_top, count=5).to_host()
    for name in Measured.__slots__:
        assert torch.equal(getattr(found, name), getattr(measured, name)), name


def test_only_a_step_with_a_request_that_asks_for_more_than_tokens_makes_a_report(monkeypatch):
    plain, asking = SamplingParams(max_tokens=2, top_p=0.9), SamplingParams(max_tokens=2, logprobs=1)
    with open_llm() as llm:
        stage, made = llm._engine.model_runner.sampler.stage, []
        begin = stage.new_report
        monkeypatch.setattr(stage, "new_report", lambda *rows: (made.append(rows), begin(*rows))[1])
        generate(llm, [[5, 6], [7]], plain)
        assert made == []
        _, asked = generate(llm, [[5, 6], [7]], [plain, asking])
    assert len(made) == 2
    assert len(asked.outputs[0].logprobs) == 2


def test_an_engine_without_further_options_draws_the_same_tokens_and_refuses_them_by_name(monkeypatch):
    plain, asking = SamplingParams(max_tokens=3, top_p=0.9, seed=1), SamplingParams(max_tokens=3, logprobs=1)
    with open_llm() as llm:
        [expected] = generate(llm, [[5, 6]], plain)
    monkeypatch.setitem(sys.modules, "nanovllm.features.request_options", None)
    with open_llm() as llm:
        [drawn] = generate(llm, [[5, 6]], plain)
        with pytest.raises(StepError, match="has options besides temperature and filters"):
            generate(llm, [[5, 6]], asking)
    assert drawn.outputs[0].token_ids == expected.outputs[0].token_ids
