"""Drafts with tensor parallelism: two ranks verify a step's drafts together, and answer as without drafts."""

import functools

import pytest

from nanovllm import LLM, SamplingParams
from tests.support.llms import OPTIONS, assert_idle_and_whole, generate, token_ids
from tests.support.mock_drafts import KnownAnswers, known_answers
from tests.support.rank_pair import one_pair_of_processes
from tests.support.structured import EOS, form
from tests.support.tiny_models import VOCAB_SIZE, random_prompts, save_tiny, tiny_tokenizer

PROMPTS = random_prompts(5, low=5, high=70, seed=1)
KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.6},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 1},
    "n": {"n": 2},
    "structured": {"structured_output": form("json_schema")},
}

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def pair():
    with one_pair_of_processes():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("model"), eos_token_ids=[EOS]))


def open_llm(folder, num_ranks, **options):
    given = OPTIONS | {"tensor_parallel_size": num_ranks} | options
    return LLM(folder, tokenizer=tiny_tokenizer(), **given)


def described(outputs):
    return [
        (c.token_ids, c.text, c.finish_reason, c.logprobs and [list(entry) for entry in c.logprobs], output.error)
        for output in outputs
        for c in output.outputs
    ]


@functools.cache
def expected(folder):
    """Outputs of two ranks without drafts."""
    with open_llm(folder, 2) as llm:
        return {name: generate(llm, PROMPTS, params_of(name)) for name in KINDS}


def params_of(name):
    return SamplingParams(**{"seed": 5, "max_tokens": 40} | KINDS[name])


def test_two_ranks_give_the_outputs_of_every_kind_of_request_with_drafts_of_any_quality(folder):
    """A drafter is rank 0's, as the suffix index is; the other rank has the rows that it decides on."""
    wanted = expected(folder)
    with open_llm(folder, 2, speculation=KnownAnswers({})) as llm:
        drafting = llm._engine.scheduler.proposer
        for name in KINDS:
            answers = {
                tuple(prompt): [c.token_ids for c in output.outputs]
                for prompt, output in zip(PROMPTS, wanted[name], strict=True)
            }
            for change in (
                lambda _, drafts: drafts,
                lambda _, drafts: [*drafts[:2], *((d + 1) % VOCAB_SIZE for d in drafts[2:])],
            ):
                drafting.drafter, before = KnownAnswers(answers, change), llm.stats().speculation.num_accepted_tokens
                assert described(generate(llm, PROMPTS, params_of(name))) == described(wanted[name]), name
                assert llm.stats().speculation.num_accepted_tokens > before + 40, name
        assert_idle_and_whole(llm)


@pytest.mark.parametrize("source", ["a draft model", "a Drafter"])
def test_the_drafter_of_two_ranks_is_that_of_the_first(folder, source):
    wanted = expected(folder)
    options = {
        "a draft model": {"speculation": "draft", "draft_model": folder},
        "a Drafter": {"speculation": known_answers(PROMPTS, token_ids(wanted["sampled"]))},
    }
    with open_llm(folder, 2, **options[source]) as llm:
        before = llm.stats().num_steps
        assert described(generate(llm, PROMPTS, params_of("sampled"))) == described(wanted["sampled"])
        counts = llm.stats().speculation
        assert counts.num_accepted_tokens > 0.9 * counts.num_draft_tokens > 60
        assert llm.stats().num_steps - before < 25
        assert_idle_and_whole(llm)


def test_after_a_refused_draft_model_the_other_rank_serves_the_next_engine(folder, tmp_path):
    other = str(save_tiny(tmp_path, vocab_size=VOCAB_SIZE + 8))
    with pytest.raises(ValueError, match="its vocabulary"):
        LLM(folder, **(OPTIONS | {"tensor_parallel_size": 2, "speculation": "draft", "draft_model": other}),
            skip_tokenizer_init=True)  # fmt: skip
    with open_llm(folder, 2) as llm:
        assert described(generate(llm, PROMPTS, params_of("greedy"))) == described(expected(folder)["greedy"])


def test_two_ranks_draft_from_outputs_of_the_same_beginning(folder):
    wanted = described(expected(folder)["top-p"])
    with open_llm(folder, 2, speculation="suffix") as llm:
        for _ in "cold", "drafted from the first":
            before = llm.stats()
            assert described(generate(llm, PROMPTS, params_of("top-p"))) == wanted
        assert llm.stats().num_steps - before.num_steps < 20
        assert llm.stats().speculation.by_source["suffix"][1] > 100
