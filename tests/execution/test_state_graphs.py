"""The executor of CUDA graphs for recurrent states without a GPU: greedy tokens are those of `transformers`.

A graph is a function that is called again, with what the packed step holds then. tests/gpu has the real ones.
"""

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.fast import graph_paths
from nanovllm.fast.attention import flex_gpu_options
from nanovllm.fast.attention.backends import AttentionChoice
from nanovllm.fast.gpu import cuda_graphs
from nanovllm.fast.gpu.state_graphs import StateGraphExecutor
from nanovllm.fast.replaced_layers import FastLayers
from nanovllm.features.states import state_kernels
from tests.support.class_cases import chunk_prompts, own_answers
from tests.support.gpu_steps import SMALL_GPU, compute_without_kernels
from tests.support.llms import check_engine
from tests.support.tiny_classes import tiny_class_model

NUM_TOKENS = 14
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS = {
    "max_model_len": 224, "max_num_seqs": 4, "num_kv_blocks": 7, "max_num_batched_tokens": 90, "block_size": 64,
}  # fmt: skip


class CalledAgain:
    """A pool of graphs that run their function at each replay."""

    def __init__(self, device): ...

    def capture(self, run, **_):
        run()
        return type("Graph", (), {"replay": staticmethod(run)})

    def synchronize(self): ...

    def reset(self): ...


@pytest.fixture
def on_a_cpu(monkeypatch):
    compute_without_kernels(monkeypatch)
    monkeypatch.setattr(flex_gpu_options.Gpu, "from_device", classmethod(lambda *_: SMALL_GPU))
    for module in (flex_gpu_options, state_kernels):
        monkeypatch.setattr(module, "find_kernel", lambda *_: None)
    choice = AttentionChoice("flex", compiles=True, uses_graphs=True, kernels=())
    monkeypatch.setattr(AttentionChoice, "beside_mixers", classmethod(lambda *_: choice))
    monkeypatch.setattr(graph_paths, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(FastLayers, "compile_layers", lambda _: None)
    monkeypatch.setattr(cuda_graphs, "GraphPool", CalledAgain)
    monkeypatch.setattr(cuda_graphs, "to_device", lambda array, _: torch.from_numpy(array))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **rest: empty(*sizes, **rest))


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
            found = [output.outputs[0].token_ids for output in llm.generate(chunk_prompts(), GREEDY, use_tqdm=False)]
            assert found == own_answers(model, chunk_prompts(), NUM_TOKENS)
        check_engine(llm)
        assert llm.stats().num_preemptions > 0
        assert llm.stats().prefix_cache_hits > 0
