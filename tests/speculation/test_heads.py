"""Heads of a checkpoint as drafters: answers are those of `transformers`, and each draft is that of a dense pass."""

import functools

import pytest
import torch
from transformers.generation.candidate_generator import MTPCandidateGenerator

from nanovllm import LLM, SamplingParams
from nanovllm.features.speculation.heads.head_drafter import HeadDrafter
from nanovllm.features.speculation.suffix import SuffixDrafter
from tests.support import heads as head_models
from tests.support.llms import assert_idle_and_whole, generate, greedy, token_ids

OPTIONS = {
    "dtype": "float32", "block_size": 16, "num_kv_blocks": 129, "max_model_len": 512, "max_num_seqs": 64,
    "num_speculative_tokens": 3, "enforce_eager": True,
}  # fmt: skip
LENGTHS = (4, 17, 33, 48, 70)
MAX_TOKENS = 40
ALWAYS = "roomy", "overlap, preemption", "host tier", "top-p", "n"  # in the default tier


def cells(names):
    """Each family with each name; those of the second family, and the rest, in the full tier."""
    return [
        pytest.param(family, name, marks=[] if name in ALWAYS and not number else pytest.mark.full)
        for number, family in enumerate(head_models.FAMILIES)
        for name in names
    ]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return functools.cache(
        lambda family: head_models.save(tmp_path_factory.mktemp(family), *head_models.trained(family))
    )


@functools.cache
def prompts():
    token_ids = head_models.text_ids().tolist()
    return [token_ids[90 * number : 90 * number + length] for number, length in enumerate(LENGTHS)]


@functools.cache
def reference(family):
    model, _ = head_models.trained(family)
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts()
    ]


def open_llm(folder, **options):
    return LLM(folder, **(OPTIONS | {"speculation": "heads"} | options))


@pytest.fixture
def checked_drafts(monkeypatch):
    """Compares each draft of greedy requests with that of a dense pass; returns the number of compared ones."""
    counts = []
    propose = HeadDrafter.propose

    def compared(self, requests):
        found = propose(self, requests)
        model, heads = head_models.trained(self.family)
        for request, drafts in zip(requests, found, strict=True):
            if drafts and request.params.temperature == 0.0:
                assert drafts == head_models.greedy_drafts(model, heads, request.token_ids, len(drafts))
                counts.append(len(drafts))
        return found

    monkeypatch.setattr(HeadDrafter, "propose", compared)
    return counts


SCHEDULES = {
    "roomy": {},
    "one draft": {"num_speculative_tokens": 1},
    "small chunks": {"max_num_batched_tokens": 32, "max_num_seqs": 16},
    "preemption": {"num_kv_blocks": 12, "max_model_len": 160, "max_num_batched_tokens": 80},
    "no prefix cache": {"enable_prefix_caching": False},
    "overlap": {"overlap": True},
    "overlap, preemption": {"overlap": True, "num_kv_blocks": 12, "max_model_len": 160},
    "blocks of 32": {"block_size": 32},
    "host tier": {"num_kv_blocks": 14, "max_model_len": 160, "prefix_cache_host_bytes": 8 << 20},
    "as many drafts as states": {"num_speculative_tokens": 7},
    "C++ kernels": {"attention_backend": "cpp", "enforce_eager": False},
}


@pytest.mark.costly
@pytest.mark.parametrize("family, schedule", cells(SCHEDULES))
def test_answers_are_those_of_transformers_and_drafts_those_of_a_dense_pass(
    family, schedule, folder_of, checked_drafts, monkeypatch
):
    monkeypatch.setattr(HeadDrafter, "family", family, raising=False)
    with open_llm(folder_of(family), **SCHEDULES[schedule]) as llm:
        for _ in range(2):  # cold, and from the prefix cache
            assert token_ids(generate(llm, prompts(), greedy(MAX_TOKENS))) == reference(family)
        stats = llm.stats().speculation
        assert_idle_and_whole(llm)
    assert sum(checked_drafts) == stats.num_draft_tokens > 50
    assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 1.0
    assert stats.num_failures == 0


PARAMS = {
    "T = 0.7": SamplingParams(temperature=0.7, seed=5, max_tokens=MAX_TOKENS),
    "top-p": SamplingParams(top_p=0.9, seed=5, max_tokens=MAX_TOKENS),
    "penalties": SamplingParams(seed=5, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=MAX_TOKENS),
    "logprobs": SamplingParams(seed=5, logprobs=2, prompt_logprobs=1, max_tokens=MAX_TOKENS),
    "n": SamplingParams(seed=5, n=3, max_tokens=MAX_TOKENS),
    "stop strings": SamplingParams(seed=5, stop=("th", "in"), max_tokens=MAX_TOKENS),
    "form": SamplingParams(seed=5, structured_output={"regex": "[a-z ]{10,30}"}, max_tokens=MAX_TOKENS),
}


@pytest.mark.costly
@pytest.mark.parametrize("family, name", cells(PARAMS))
def test_sampled_answers_are_those_without_drafts(family, name, folder_of):
    found = []
    for speculation in (None, "heads"):
        with open_llm(folder_of(family), speculation=speculation) as llm:
            outputs = [*generate(llm, prompts(), PARAMS[name]), *generate(llm, prompts(), PARAMS[name])]
            found.append([(c.token_ids, c.text, c.finish_reason) for output in outputs for c in output.outputs])
            stats = llm.stats().speculation
            assert_idle_and_whole(llm)
    assert found[0] == found[1]
    assert stats.num_accepted_tokens > 0


@pytest.mark.full
@pytest.mark.parametrize("family", head_models.FAMILIES)
def test_as_many_drafts_are_right_as_with_the_heads_of_transformers(family, folder_of, monkeypatch):
    """`transformers` has no row at position 0, where this engine has one of zeros."""
    model = head_models.load_reference(folder_of(family))
    matches = []
    candidates = MTPCandidateGenerator.get_candidates

    def counted(self, *args, **kwargs):
        if not kwargs["is_first_iteration"] and not self.is_main_model_prefill:
            matches.append(kwargs["n_last_matches"])
        return candidates(self, *args, **kwargs)

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", counted)
    for prompt, answer in zip(prompts(), reference(family), strict=True):
        found = model.generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, use_mtp=True)
        assert found[0, len(prompt) :].tolist() == answer
    with open_llm(folder_of(family), num_speculative_tokens=1) as llm:
        assert token_ids(generate(llm, prompts(), greedy(MAX_TOKENS))) == reference(family)
        stats = llm.stats().speculation
    assert abs(stats.num_accepted_tokens / stats.num_draft_tokens - sum(matches) / len(matches)) < 0.08


# ------------------------------------------------------------------------------------------------------- bad input


def test_a_checkpoint_without_heads_is_refused_and_auto_takes_texts(tmp_path):
    model, heads = head_models.tiny_with_heads("glm4_moe")
    folder = head_models.save(tmp_path, model, heads, without=("layers.2.",))
    with pytest.raises(ValueError, match="holds none of the 1 heads that its config names"):
        open_llm(folder)
    model.config.num_mtp_layers = 0
    model.save_pretrained(tmp_path / "named")
    head_models.tiny_tokenizer().save_pretrained(tmp_path / "named")
    with pytest.raises(ValueError, match=r"names no heads \(num_mtp_layers\)"):
        open_llm(tmp_path / "named")
    with open_llm(folder, speculation="auto") as llm:
        assert isinstance(llm._engine.scheduler.proposer.drafter, SuffixDrafter)


def test_auto_takes_heads_where_the_checkpoint_has_them(folder_of):
    with open_llm(folder_of("glm4_moe"), speculation="auto") as llm:
        assert token_ids(generate(llm, prompts(), greedy(MAX_TOKENS))) == reference("glm4_moe")
        assert set(llm.stats().speculation.by_source) == {"heads"}


def test_a_checkpoint_with_a_part_of_a_head_is_refused_with_the_names(tmp_path):
    folder = head_models.save(tmp_path, *head_models.tiny_with_heads("glm4_moe"), without=("eh_proj", "hnorm"))
    for speculation in ("heads", "auto"):
        with pytest.raises(ValueError, match=r"layers\.0\.eh_proj\.weight.*layers\.0\.hnorm\.weight"):
            open_llm(folder, speculation=speculation)


def test_the_first_of_three_heads_drafts(tmp_path):
    model, heads = head_models.tiny_with_heads("glm4_moe", num_heads=3)
    folder = head_models.save(tmp_path, model, heads)
    with open_llm(folder) as llm:
        answers = token_ids(generate(llm, prompts(), greedy(10)))
        assert llm.stats().speculation.num_draft_tokens > 0
    with open_llm(folder, speculation=None) as llm:
        assert answers == token_ids(generate(llm, prompts(), greedy(10)))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"quantization": "int8"}, "heads are not quantised, and quantization is 'int8'"),
        ({"tensor_parallel_size": 2}, "speculation is 'heads' and tensor_parallel_size 2"),
    ],
)
def test_options_that_heads_do_not_work_with_are_refused(options, message, folder_of):
    with pytest.raises(ValueError, match=message):
        open_llm(folder_of("glm4_moe"), **options)


def test_blocks_too_small_for_two_hidden_states_are_refused(tmp_path):
    folder = head_models.save(
        tmp_path, *head_models.tiny_with_heads("glm4_moe", hidden_size=512, num_attention_heads=32)
    )
    with pytest.raises(
        ValueError, match=r"block_size is 16, and a block of the head's keys has 1,024 bytes, less than"
    ):
        open_llm(folder)


def test_a_loaded_module_is_refused():
    with pytest.raises(ValueError, match="a loaded module comes without the heads of its checkpoint"):
        LLM(head_models.trained("glm4_moe")[0], speculation="heads", skip_tokenizer_init=True)
