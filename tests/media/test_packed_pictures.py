"""Pictures in steps as a GPU packs them, without one: decodes in captured graphs, chunks with pictures outside."""

import copy

import pytest

from nanovllm import LLM, SamplingParams
from tests.support.gpu_steps import run_graphs_on_a_cpu
from tests.support.llms import check_engine, generate, token_ids
from tests.support.picture_models import expected, mixed_parts, picture_model, picture_prompt

OPTIONS = {"max_num_seqs": 4, "max_model_len": 200, "block_size": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("pool", [{"num_kv_blocks": 64}, {"num_kv_blocks": 14, "max_num_batched_tokens": 20}], ids=str)
@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_tokens_are_those_of_transformers_cold_and_warm(monkeypatch, family, pool):
    run_graphs_on_a_cpu(monkeypatch)
    own = [expected(family, *parts) for parts in mixed_parts(family)]
    with LLM(copy.deepcopy(picture_model(family)), **OPTIONS, **pool) as llm:
        for _ in range(2):
            prompts = [picture_prompt(family, *parts) for parts in mixed_parts(family)]
            assert token_ids(generate(llm, prompts, GREEDY)) == own
        assert llm._engine.model_runner.executor._forwards.graphs
        assert llm.stats().prefix_cache_hits > 0
        check_engine(llm)
