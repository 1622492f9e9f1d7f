"""Heads of a checkpoint on a GPU, with graphs and without: tokens without drafts, and drafts of a dense pass."""

import functools

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.features.speculation import lengths
from nanovllm.features.speculation.heads.head_drafter import HeadDrafter
from tests.support import heads as head_models
from tests.support.llms import assert_idle_and_whole, generate, greedy, token_ids

OPTIONS = {
    "dtype": "float32", "block_size": 16, "num_kv_blocks": 200, "max_model_len": 300, "max_num_seqs": 32,
    "num_speculative_tokens": 3,
}  # fmt: skip
MAX_TOKENS = 40
WAYS = {
    "graphs": {},
    "graphs, one by one": {"overlap": False},
    "no graphs": {"cuda_graphs": False},
    "small pool": {"num_kv_blocks": 22, "max_num_batched_tokens": 80},
}
KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.4},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
    "prompt logprobs": {"temperature": 0.0, "prompt_logprobs": 1},
    "n": {"temperature": 1.0, "n": 3},
}


@pytest.fixture(autouse=True)
def _steps_are_free(monkeypatch):
    monkeypatch.setattr(lengths, "PLAIN_WINDOW", 10**9)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return functools.cache(
        lambda family: head_models.save(tmp_path_factory.mktemp(family), *head_models.trained(family))
    )


@functools.cache
def on_gpu(family):
    model, heads = head_models.trained(family)
    model, heads = model.cuda(), heads.cuda()
    heads.tie_with_main_model(model)
    return model, heads


@functools.cache
def prompts():
    ids = head_models.text_ids().tolist()
    return [ids[90 * number : 90 * number + length] for number, length in enumerate((4, 17, 33, 48, 70))]


@pytest.mark.parametrize("family", head_models.FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_without_drafts_and_drafts_those_of_a_dense_pass(family, way, folder_of, monkeypatch):
    compared = []
    propose = HeadDrafter.propose

    def compare(self, requests):
        found = propose(self, requests)
        for request, drafts in zip(requests, found, strict=True):
            if drafts and request.params.temperature == 0.0:
                compared.append(drafts == head_models.greedy_drafts(*on_gpu(family), request.token_ids, len(drafts)))
        return found

    for kind, params in KINDS.items():
        sampling = SamplingParams(seed=5, max_tokens=MAX_TOKENS, **params)
        found = []
        for speculation in (None, "heads"):
            with (
                monkeypatch.context() as patch,
                LLM(folder_of(family), speculation=speculation, **(OPTIONS | WAYS[way])) as llm,
            ):
                patch.setattr(HeadDrafter, "propose", compare)
                outputs = [*generate(llm, prompts(), sampling), *generate(llm, prompts(), sampling)]
                found.append([c.token_ids for output in outputs for c in output.outputs])
                stats = llm.stats().speculation
                assert_idle_and_whole(llm)
        assert found[0] == found[1], kind
        assert stats.num_accepted_tokens > 0.1 * stats.num_draft_tokens > 0, kind
        assert stats.num_failures == 0
    assert sum(compared) >= 0.98 * len(compared) > 0  # ties of float32 sums in another order


def test_draft_graphs_are_captured_and_dropped_with_the_others(folder_of):
    with LLM(folder_of("glm4_moe"), speculation="heads", **OPTIONS) as llm:
        wanted = token_ids(generate(llm, prompts(), greedy(MAX_TOKENS)))
        graphs = llm._engine.model_runner.executor.draft_steps
        drafter = llm._engine.scheduler.proposer.drafter
        steps = drafter._step.__self__
        assert steps._graphs and graphs is not None
        llm._engine.model_runner.executor.model_changed(in_place=False)
        assert not steps._graphs
        assert token_ids(generate(llm, prompts(), greedy(MAX_TOKENS))) == wanted
