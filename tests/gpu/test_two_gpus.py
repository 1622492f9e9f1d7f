"""A model on two GPUs: the tokens of `transformers`, with CUDA graphs and without, and an end by a rank that ends.

Where there is one GPU, both ranks are on it.
"""

import numpy as np
import pytest
import torch

from nanovllm import LLM, EngineDeadError, SamplingParams, StepError
from nanovllm.features.speculation import lengths
from tests.support.equality import model, prompts, reference
from tests.support.fp8_caches import OPTION, own_answer
from tests.support.shared_gpu import share_one_gpu
from tests.support.tiny_models import save_tiny

SMALL = {
    "tensor_parallel_size": 2, "max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512,
    "num_kv_blocks": 80, "block_size": 64,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def generate(llm, params):
    return [output.outputs[0].token_ids for output in llm.generate(prompts()[:12], params, use_tqdm=False)]


@pytest.fixture(scope="module", autouse=True)
def gpus():
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.device_count() == 1:
            share_one_gpu(patch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), "qwen3")


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"attention_backend": "flex"}], ids=["eager", "graphs"])
def test_tokens_equal_those_of_transformers_and_of_one_gpu(folder, options):
    expected = [reference(model("qwen3"), prompt) for prompt in prompts()[:12]]
    kinds = [{}, {"top_p": 0.9}, {"repetition_penalty": 1.3}, {"logprobs": 2, "prompt_logprobs": 1}]
    sampled = [SamplingParams(seed=5, max_tokens=16, **kind) for kind in kinds]
    with LLM(folder, **SMALL, **options) as llm:
        assert generate(llm, GREEDY) == expected
        found = [generate(llm, params) for params in sampled]
        llm._engine.model_runner.capture_ahead()
        assert generate(llm, GREEDY) == expected, "after a capture while idle"
    with LLM(folder, **SMALL | {"tensor_parallel_size": 1}, enforce_eager=True) as llm:  # compiles nothing
        assert found == [generate(llm, params) for params in sampled]


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {}], ids=["eager", "graphs"])
def test_ranks_keep_their_heads_of_k_and_v_in_8_bit_floats(folder, options):
    wanted = [own_answer(model("qwen3"), prompt, 20) for prompt in prompts()[:12]]
    with LLM(folder, dtype="float32", **SMALL, **options, **OPTION) as llm:
        assert generate(llm, GREEDY) == wanted
        assert generate(llm, GREEDY) == wanted, "with a warm cache"


def test_prefixes_return_from_the_memory_and_the_files_of_both_ranks(folder, tmp_path):
    expected = [reference(model("qwen3"), prompt) for prompt in prompts()[:12]]
    options = SMALL | {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 40, "prefix_cache_host_bytes": 2**26}
    for number in range(2):
        with LLM(folder, **options, prefix_cache_dir=str(tmp_path)) as llm:
            assert generate(llm, GREEDY) == expected
            assert generate(llm, GREEDY) == expected
            stats = llm.stats().tiers
            assert stats.num_loaded_blocks > 0 and stats.num_failed_reads == 0
            assert (stats.num_read_blocks > 0) == bool(number)


@pytest.mark.costly
@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"attention_backend": "flex"}], ids=["eager", "graphs"])
def test_embeddings_are_those_of_one_gpu(folder, options):
    found = []
    for size in (2, 1):
        with LLM(folder, **SMALL | options | {"tensor_parallel_size": size}) as llm:
            found.append([output.embedding for output in llm.embed(prompts()[:12], normalize=False, use_tqdm=False)])
            generate(llm, GREEDY)
    for own, other in zip(*found, strict=True):
        np.testing.assert_allclose(own, other, atol=2e-2)


def test_drafts_change_no_token(folder, monkeypatch):
    monkeypatch.setattr(lengths, "PLAIN_WINDOW", 10**9)  # drafts never rest
    params = SamplingParams(seed=5, temperature=0.8, top_p=0.9, max_tokens=30)
    with LLM(folder, **SMALL, enforce_eager=True) as llm:
        expected = generate(llm, params)
    with LLM(folder, **SMALL, attention_backend="flex", speculation="suffix") as llm:
        for _ in "cold", "drafted from the first":
            assert generate(llm, params) == expected
        assert llm.stats().speculation.num_accepted_tokens > 20


@pytest.mark.full
def test_a_rank_that_ends_ends_the_engine(folder):
    with LLM(folder, **SMALL, enforce_eager=True) as llm:
        stream = llm.stream(prompts()[3], SamplingParams(temperature=0.0, max_tokens=400))
        next(stream)
        llm._engine.model_runner.workers._processes[0].kill()
        with pytest.raises(StepError, match="exit code -9"):
            for _ in stream:
                pass
        with pytest.raises(EngineDeadError):
            llm.generate([[1, 2]], use_tqdm=False)
