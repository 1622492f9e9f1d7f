"""A model with recurrent states in the other features of the engine: what they answer, and what is refused by name."""

import random
from dataclasses import replace

import pytest
import torch

from nanovllm import LLM, SamplingParams, TraceWriter
from nanovllm.serving.server.metrics import EngineFigures
from nanovllm.serving.streaming.heartbeat import Heartbeat
from tests.support.class_cases import own_answers
from tests.support.llms import generate, greedy, token_ids
from tests.support.logprobs import assert_right
from tests.support.replicas import completions
from tests.support.tiny_classes import VOCAB_SIZE, tiny_class_model
from tests.support.tiny_models import tiny_tokenizer

CLASS = "Qwen3_5ForCausalLM"
NUM_TOKENS = 8
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)
OPTIONS = {
    "max_model_len": 256, "max_num_seqs": 4, "num_kv_blocks": 40, "max_num_batched_tokens": 90, "block_size": 64,
}  # fmt: skip


def prompts():
    """Two with a common beginning of two blocks, and others."""
    choice = random.Random(3)
    shared, *own = [[choice.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (130, 9, 40, 70, 200)]
    return [shared + own[0], shared + own[1], own[2], own[3]]


@pytest.fixture(scope="module")
def model():
    return tiny_class_model(CLASS)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("hybrid")
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(model):
    return own_answers(model, prompts(), NUM_TOKENS)


def answers(llm, params=GREEDY):
    return token_ids(generate(llm, prompts(), params))


def chosen(model, prompt, change):
    """Greedy tokens by whole passes of the model, with its logits changed."""
    known = list(prompt)
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([known])).logits[0, -1].float()
        known.append(int(change(known, logits).argmax()))
    return known[len(prompt) :]


@pytest.mark.full
def test_two_replicas_answer_alike_and_share_prefixes(folder, expected):
    with LLM(folder, data_parallel_size=2, **OPTIONS) as llm:
        assert answers(llm) == expected
        before = llm.stats().prefix_cache_hits
        assert answers(llm) == expected
        stats = llm.stats()
        assert stats.prefix_cache_hits >= before + 2 * 128 + 64
        (of_states,) = [group for group in stats.cache_groups if group.record_bytes is not None]
        assert of_states.num_blocks == 2 * (of_states.num_blocks // 2)


@pytest.mark.costly
@pytest.mark.parametrize("options", [{"itl_goal": 0.02}, {"client_weights": {"a": 2.0}}, {"priority_ageing_s": 1.0}])
def test_goals_shares_and_priorities_change_no_token(model, expected, options):
    with LLM(model, **OPTIONS, **options) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected


def test_samples_drawn_with_a_seed_are_the_same_behind_a_prefix(model):
    params = [SamplingParams(seed=number, max_tokens=NUM_TOKENS, ignore_eos=True, n=2) for number in range(4)]
    with LLM(model, **OPTIONS) as llm, LLM(model, enable_prefix_caching=False, **OPTIONS) as uncached:
        found = [completions(generate(llm, prompts(), params)) for _ in range(2)]
        assert found[0] == found[1] == completions(generate(uncached, prompts(), params))


def test_processors_and_allowed_tokens_are_applied(model):
    def favour(token_ids, logits):
        logits[token_ids[-1] % 7 :: 7] += 5.0
        return logits

    allowed = (3, 5, 8, 13, 21)
    mask = torch.full((VOCAB_SIZE,), -torch.inf)
    mask[list(allowed)] = 0.0
    with LLM(model, **OPTIONS) as llm:
        by_processor = answers(llm, replace(GREEDY, logits_processors=(favour,)))
        within = answers(llm, replace(GREEDY, allowed_token_ids=allowed))
    assert by_processor == [chosen(model, prompt, favour) for prompt in prompts()]
    assert within == [chosen(model, prompt, lambda _, logits: logits + mask) for prompt in prompts()]


def test_logprobs_of_answers_are_those_of_whole_passes(model, expected):
    params = replace(GREEDY, logprobs=1)
    with LLM(model, **OPTIONS) as llm:
        outputs = generate(llm, prompts(), params)
    assert token_ids(outputs) == expected
    for output in outputs:
        assert_right(model, output, params, atol=1e-3)


def test_new_weights_of_a_live_module_and_a_reset_forget_states(expected):
    model = tiny_class_model(CLASS)
    with LLM(model, **OPTIONS) as llm:
        assert answers(llm) == expected
        before = llm.stats().prefix_cache_hits
        llm.reset_prefix_cache()
        assert answers(llm) == expected
        assert llm.stats().prefix_cache_hits - before < 2 * 128, "only hits within the call"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        assert answers(llm) == own_answers(model, prompts(), NUM_TOKENS)


def test_traces_and_metrics_name_states(model, tmp_path):
    figures = EngineFigures("tiny")
    with TraceWriter(tmp_path / "trace.json") as trace, LLM(model, trace=trace, **OPTIONS) as llm:
        answers(llm)
        figures.heartbeat = Heartbeat(stats=llm.stats(), age=0.0)
    assert '"recurrent states":' in (tmp_path / "trace.json").read_text()
    (blocks,) = [metric for metric in figures.collect() if metric.name.endswith("kv_group_blocks")]
    assert {sample.labels["window"] for sample in blocks.samples} == {"", "state"}


def test_several_ranks_are_refused_by_name(folder):
    with pytest.raises(ValueError, match="recurrent state"):
        LLM(folder, tensor_parallel_size=2, **OPTIONS)
