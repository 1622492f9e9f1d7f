"""The executor of CUDA graphs without a GPU, for models of several cache groups: greedy tokens are transformers' own.

Nothing is compiled or captured, and FlexAttention is a function that reads what the block masks list, so it is the
packed inputs, tables and masks of each group that are tried; tests/gpu has the kernels and the graphs.
"""

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.fast.attention.backends import AttentionChoice
from nanovllm.fast.attention.flex_gpu import GpuFlexAttention
from tests.support.gpu_steps import run_graphs_on_a_cpu
from tests.support.layer_kinds import expected, model, prompts
from tests.support.llms import check_engine, generate, token_ids

NUM_NEW_TOKENS = 18
OPTIONS = {"block_size": 16, "max_model_len": 160, "max_num_seqs": 6}


@pytest.fixture
def on_a_cpu(monkeypatch):
    run_graphs_on_a_cpu(monkeypatch, lambda _: None, compiles=False, left_out=["merge_linears", "fuse_rotary"])
    monkeypatch.setattr(AttentionChoice, "captures", lambda *_: False)


@pytest.mark.full
@pytest.mark.parametrize(
    "family, num_groups, options",
    [
        ("Mistral", 1, {"num_kv_blocks": 6, "max_num_batched_tokens": 22}),
        ("GptOss", 2, {"num_kv_blocks": 14, "max_num_batched_tokens": 22}),
        ("Gemma4Text", 2, {"num_kv_blocks": 80, "max_num_batched_tokens": 50}),
    ],
)
def test_greedy_tokens_are_those_of_transformers(on_a_cpu, family, num_groups, options):
    """In chunks beside decodes, with prompts beyond their windows, a cache cold and warm, and preemption."""
    with LLM(model(family), **OPTIONS, **options) as llm:
        runner = llm._engine.model_runner
        assert isinstance(runner.backend, GpuFlexAttention)
        assert (len(runner.backend.kinds) > 1) == (family != "Mistral")
        assert len(runner.pools.groups) == num_groups
        greedy = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS)
        for _ in range(2):
            found = token_ids(generate(llm, prompts(), greedy))
            assert found == expected(family, NUM_NEW_TOKENS)
        check_engine(llm)
        assert (llm.stats().num_preemptions > 0) == (family == "GptOss")
