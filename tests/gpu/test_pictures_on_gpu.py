"""Prompts with pictures on a GPU: chunks outside of graphs, decodes within, and the tokens of `generate`."""

import copy

import pytest

from nanovllm import LLM, SamplingParams
from tests.support.llms import check_engine, generate, token_ids
from tests.support.picture_models import expected, mixed_parts, picture_model, picture_prompt

OPTIONS = {"max_num_seqs": 4, "max_model_len": 200, "block_size": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("pool", [{"num_kv_blocks": 64}, {"num_kv_blocks": 14, "max_num_batched_tokens": 20}], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_tokens_are_those_of_transformers_cold_and_warm(family, overlap, pool):
    own = [expected(family, *parts) for parts in mixed_parts(family)]
    with LLM(copy.deepcopy(picture_model(family)).cuda(), overlap=overlap, **OPTIONS, **pool) as llm:
        for _ in range(2):
            prompts = [picture_prompt(family, *parts) for parts in mixed_parts(family)]
            assert token_ids(generate(llm, prompts, GREEDY)) == own
        assert llm.config.cuda_graphs and llm._engine.model_runner.executor._forwards.graphs
        assert llm.stats().prefix_cache_hits > 0
        check_engine(llm)


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_steps_of_text_beside_pictures_are_within_graphs(family):
    """A text request decodes while others with pictures come; its tokens do not depend on them."""
    own = expected(family, [5, 6, 7], max_tokens=60)
    with LLM(copy.deepcopy(picture_model(family)).cuda(), **OPTIONS, num_kv_blocks=64) as llm:
        stream = llm.stream([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        next(stream)
        for parts in mixed_parts(family):
            assert token_ids(generate(llm, [picture_prompt(family, *parts)], GREEDY)) == [expected(family, *parts)]
        assert [*stream][-1].outputs[0].token_ids == own
