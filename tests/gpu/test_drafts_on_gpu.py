"""Drafts on a GPU, with graphs and without: the tokens without drafts, and steps in the shapes of decodes."""

import functools

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.features.speculation import lengths
from tests.support import layer_kinds
from tests.support.equality import model, prompts, reference
from tests.support.llms import assert_idle_and_whole
from tests.support.mock_drafts import KnownAnswers
from tests.support.structured import EOS, form
from tests.support.tiny_models import VOCAB_SIZE, random_prompts, save_tiny, tiny_tokenizer

OPTIONS = {"num_kv_blocks": 200, "max_model_len": 300, "max_num_seqs": 48, "block_size": 16}
PROMPTS = random_prompts(6, low=5, high=90, seed=1)
KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "cold": {"temperature": 1e-4, "top_k": 20},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.6},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
    "prompt logprobs": {"temperature": 0.0, "prompt_logprobs": 1},
    "bad words": {"temperature": 0.0, "bad_words": ["the cat", "e", "a"]},
    "min_tokens": {"temperature": 1.0, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 9)), "min_tokens": 9},
    "n": {"temperature": 1.0, "n": 3},
    "structured": {"temperature": 1.0, "structured_output": form("json_schema")},
    "structured, penalties": {"structured_output": form("json_schema"), "presence_penalty": 0.4, "logprobs": 1},
}  # fmt: skip
WAYS = {
    "graphs, overlapped": {},
    "graphs, one by one": {"overlap": False},
    "no graphs, overlapped": {"cuda_graphs": False},
    "small pool": {"num_kv_blocks": 22, "max_num_batched_tokens": 80},
}


@pytest.fixture(autouse=True)
def _steps_are_free(monkeypatch):
    """Every draft is verified."""
    monkeypatch.setattr(lengths, "PLAIN_WINDOW", 10**9)  # drafts never rest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("model"), eos_token_ids=[EOS]))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("other"), "qwen3", num_layers=1, seed=3))


def open_llm(folder, **options):
    return LLM(folder, dtype="float32", **(OPTIONS | options))


def params_of(name):
    return SamplingParams(**{"seed": 5, "max_tokens": 40} | KINDS[name])


def answers(llm, name):
    outputs = llm.generate(PROMPTS, params_of(name), use_tqdm=False)
    assert not any(output.error for output in outputs)
    assert_idle_and_whole(llm)
    return [[c.token_ids for c in output.outputs] for output in outputs]


@functools.cache
def expected(folder):
    with open_llm(folder) as llm:
        return {name: answers(llm, name) for name in KINDS}


def known(folder, name):
    return dict(zip(map(tuple, PROMPTS), expected(folder)[name], strict=True))


def mostly_right(_, drafts):
    """Wrong from the sixth on, and at every seventh token."""
    return [(d + 1) % VOCAB_SIZE if index > 4 or d % 7 == 0 else d for index, d in enumerate(drafts)]


@pytest.mark.parametrize("way", WAYS)
def test_requests_of_every_kind_have_the_tokens_without_drafts(folder, way):
    answers_of = {}
    changes = [lambda _, drafts: drafts, mostly_right]
    with open_llm(folder, speculation=KnownAnswers(answers_of, lambda *some: changes[0](*some)), **WAYS[way]) as llm:
        for name in KINDS:
            answers_of |= known(folder, name)
            for _ in changes:
                changes.reverse()
                before = llm.stats().speculation.num_accepted_tokens
                assert answers(llm, name) == expected(folder)[name], name
                assert llm.stats().speculation.num_accepted_tokens > before + 20, name


@pytest.mark.parametrize("name", ["greedy", "top-p"])
def test_repeated_text_is_drafted(folder, name):
    with open_llm(folder, speculation="suffix") as llm:
        for _ in "cold", "drafted from the first":
            before = llm.stats().num_steps
            assert answers(llm, name) == expected(folder)[name]
        assert llm.stats().num_steps - before < 25
        assert llm.stats().speculation.by_source["suffix"][1] > 100


def test_a_copy_of_the_model_draws_its_tokens_and_another_changes_none(folder, other):
    for draft_model in (folder, other):
        with open_llm(folder, speculation="draft", draft_model=draft_model) as llm:
            for name in ("greedy", "sampled", "top-p", "penalties"):
                assert answers(llm, name) == expected(folder)[name], name
            stats = llm.stats().speculation
            assert stats.num_failures == 0 and stats.num_draft_tokens > 100
            assert draft_model != folder or stats.num_accepted_tokens > 0.98 * stats.num_draft_tokens


def test_greedy_tokens_are_those_of_transformers():
    batch, wanted = prompts(), [reference(model("qwen3"), prompt) for prompt in prompts()]
    drafter = KnownAnswers({tuple(p): [tokens] for p, tokens in zip(batch, wanted, strict=True)}, mostly_right)
    greedy = SamplingParams(temperature=0.0, max_tokens=len(wanted[0]))
    with LLM(model("qwen3"), tokenizer=tiny_tokenizer(), speculation=drafter, **OPTIONS) as llm:
        for _ in "cold", "warm":
            outputs = llm.generate(batch, greedy, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == wanted


@pytest.mark.parametrize("family", ["Gemma3Text", "Mistral"])
def test_windows_have_the_tokens_of_transformers(family, tmp_path):
    layer_kinds.model(family).save_pretrained(tmp_path)
    batch, wanted = layer_kinds.prompts(), layer_kinds.expected(family, 40)
    drafter = KnownAnswers({tuple(p): [tokens] for p, tokens in zip(batch, wanted, strict=True)}, mostly_right)
    own = {"speculation": drafter, "max_model_len": 256, "dtype": "float32", "tokenizer": tiny_tokenizer()}
    with LLM(str(tmp_path), **(OPTIONS | own)) as llm:
        outputs = llm.generate(batch, SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == wanted
        assert llm.stats().speculation.num_accepted_tokens > 40


def test_steps_with_drafts_replay_the_graphs_of_decodes(folder, monkeypatch):
    with open_llm(folder, speculation=KnownAnswers(known(folder, "greedy"))) as llm:
        executor, shapes = llm._engine.model_runner.executor, []
        captured = executor._captured_shape

        def noted(shape, *head):
            shapes.append((shape, captured(shape, *head) in executor._forwards.graphs))
            return captured(shape, *head)

        monkeypatch.setattr(executor, "_captured_shape", noted)
        assert answers(llm, "greedy") == expected(folder)["greedy"]
        drafted = [(shape, is_captured) for shape, is_captured in shapes if not shape.num_tiles]
        assert len(drafted) > 3 and all(is_captured for _, is_captured in drafted)
        assert max(shape.num_rows for shape, _ in drafted) == 48  # 8 rows of each of 6 sequences


def test_drafts_run_through_in_bfloat16(folder):
    with LLM(folder, dtype="bfloat16", speculation="suffix", **OPTIONS) as llm:
        for name in ("greedy", "sampled", "structured"):
            for _ in "cold", "drafted from the first":
                outputs = llm.generate(PROMPTS, params_of(name), use_tqdm=False)
                assert not any(output.error for output in outputs)
        assert llm.stats().speculation.num_accepted_tokens > 100
        assert_idle_and_whole(llm)
