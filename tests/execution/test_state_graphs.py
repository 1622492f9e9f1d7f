"""The executor of CUDA graphs for recurrent states without a GPU: greedy tokens are those of `transformers`.

A graph is a function that is called again, with what the packed step holds then. tests/gpu has the real ones.
"""

import pytest

from nanovllm import LLM
from nanovllm.fast.gpu.state_graphs import StateGraphExecutor
from tests.support.class_cases import chunk_prompts, own_answers
from tests.support.gpu_steps import run_graphs_on_a_cpu
from tests.support.llms import check_engine, generate, greedy, token_ids
from tests.support.tiny_classes import tiny_class_model

NUM_TOKENS = 14
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)
OPTIONS = {
    "max_model_len": 224, "max_num_seqs": 4, "num_kv_blocks": 7, "max_num_batched_tokens": 90, "block_size": 64,
}  # fmt: skip


@pytest.fixture
def on_a_cpu(monkeypatch):
    run_graphs_on_a_cpu(monkeypatch, chosen_by="beside_mixers", left_out=["compile_layers"])
    monkeypatch.setattr("nanovllm.features.states.state_kernels.find_kernel", lambda *_: None)


@pytest.mark.costly
@pytest.mark.parametrize("class_name", ["Qwen3_5ForCausalLM", "Mamba2ForCausalLM"])
def test_greedy_tokens_are_those_of_transformers(on_a_cpu, class_name):
    """With hits, preemption and steps of decodes, of chunks and of both; every slot held NaN before."""
    model = tiny_class_model(class_name)
    with LLM(model, **OPTIONS) as llm:
        runner = llm._engine.model_runner
        executor = runner.executor
        assert isinstance(executor, StateGraphExecutor)
        assert {shape.num_tiles for shape in executor._forwards.graphs} == {0}
        assert all(layer.chunks is not None for layer in runner.binding.mixers.layers)
        for states in runner.binding.caches.of_records:
            for state in states:
                state.fill_(float("nan"))
        for _ in range(2):
            found = token_ids(generate(llm, chunk_prompts(), GREEDY))
            assert found == own_answers(model, chunk_prompts(), NUM_TOKENS)
        check_engine(llm)
        assert llm.stats().num_preemptions > 0
        assert llm.stats().prefix_cache_hits > 0
