"""Windows, chunks, soft-caps, sinks, keys wider than values on a GPU: kernels, and engines with graphs and without."""

import copy
import functools
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.features.costs.buckets import GraphShape
from tests.support.gpu_steps import GpuStep, backend_of, run
from tests.support.layer_kinds import MODELS, expected, model, prompts
from tests.support.llms import check_engine
from tests.support.paged_cases import MIXED_STEPS, SPANS, TRAITS, PagedCase
from tests.support.tiny_models import tiny_tokenizer

NUM_NEW_TOKENS = 18  # the shortest prompt moves beyond its window within them
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS)
OPTIONS = {
    "block_size": 16, "num_kv_blocks": 80, "max_model_len": 160, "max_num_seqs": 6, "max_num_batched_tokens": 50,
}  # fmt: skip
DECODES = [(100, 1), (7, 1), (33, 1), (0, 1), (16, 1), (300, 1)]
# In float32 the library counts experts' rows on the host, and some releases' Gemma 3n copies a number from there: these
# run without graphs.
IN_GRAPHS = [family for family in MODELS if family not in ("GptOss", "DeepseekV2", "Gemma3nText")]


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "flex"])
@pytest.mark.parametrize("trait", TRAITS)
def test_every_trait_over_poisoned_blocks_equals_dense_attention(trait, by_kernel):
    for spans in (SPANS, MIXED_STEPS["a whole prompt"], DECODES):
        case = PagedCase(spans, keeps_for_boundary=True, **TRAITS[trait])
        case.check(run(case, by_kernel=by_kernel))


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "flex"])
@pytest.mark.parametrize(("head_dim", "value_dim", "groups"), [(256, 256, 2), (64, 64, 8), (192, 128, 1)])
def test_real_head_sizes_in_bfloat16_equal_dense_attention(head_dim, value_dim, groups, by_kernel):
    """Those of Gemma 3, gpt-oss and DeepSeek."""
    traits = {"window": 70, "softcap": 5.0, "has_sinks": True, "value_dim": value_dim}
    sizes = {"head_dim": head_dim, "groups": groups, "block_size": 64, "dtype": torch.bfloat16}
    for spans in (SPANS, DECODES):
        case = PagedCase(spans, keeps_for_boundary=True, **sizes, **traits)
        case.check(run(case, by_kernel=by_kernel))


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "flex"])
def test_one_captured_graph_serves_steps_of_any_contexts(by_kernel):
    """Whose windows begin in other blocks: what the step before left in the tables is not read."""
    traits = {"window": 40, "has_sinks": True, "softcap": 0.9}
    cases = [
        PagedCase(spans, keeps_for_boundary=True, seed=seed, **traits)
        for seed, spans in enumerate([SPANS, [(120, 1), (64, 60), (3, 1)], [(0, 90), (200, 1)]])
    ]
    backend, buckets = backend_of(cases[0], "cuda", by_kernel=by_kernel)
    shape = GraphShape(8, 256, 32)
    steps = [GpuStep(case, "cuda", buckets, shape) for case in cases]
    static, caches = copy.deepcopy(steps[0]), [cache.clone() for cache in cases[0].caches]
    flat = torch.zeros(4096, dtype=torch.int32, device="cuda")
    static.inputs, static.case = steps[0].packing.views(flat), copy.copy(cases[0])
    static.case.caches = caches
    flat[: len(steps[0].packed)] = steps[0].packed
    with torch.no_grad():
        static.attend(backend)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = static.attend(backend)
    for step in (*steps, steps[0]):
        step.write()
        flat[: len(step.packed)] = step.packed
        static.states[0].copy_(step.states[0])
        static.sinks.copy_(step.sinks)
        for to, cache in zip(caches, step.case.caches, strict=True):
            to.copy_(cache)
        graph.replay()
        step.case.check(output[step.rows])


def answers(source, rounds, **options):
    found = []
    own = {"tokenizer": tiny_tokenizer(), "dtype": "float32"} if isinstance(source, Path) else {}
    with LLM(source, **(OPTIONS | own | options)) as llm:
        for _ in range(rounds):
            found.append([o.outputs[0].token_ids for o in llm.generate(prompts(), GREEDY, use_tqdm=False)])
        check_engine(llm)
        runner = llm._engine.model_runner
        assert runner.backend.__class__.__name__ != "SdpaAttention"
        several = len(runner.binding.layers) > 1 and len({layer.traits for layer in runner.binding.layers}) > 1
        assert (len(runner.backend.kinds) > 1) == several
        if llm.config.cuda_graphs:
            assert runner.executor._forwards.graphs
        return found, llm.stats()


@functools.cache
def saved(family, folder):
    model(family).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", IN_GRAPHS)
def test_greedy_tokens_within_graphs_are_those_of_transformers_cold_and_warm(family, tmp_path):
    """Prompts beyond their windows, in chunks, beside decodes; float32."""
    found, _ = answers(saved(family, tmp_path), 2, cuda_graphs=True)
    assert found == 2 * [expected(family, NUM_NEW_TOKENS)]


@pytest.mark.costly
@pytest.mark.parametrize("family", MODELS)
def test_small_budgets_and_preemption_change_no_token_without_graphs(family):
    num_blocks = 6 if family == "Mistral" else 14  # of windows alone, no sequence holds more than three
    small = {"max_num_batched_tokens": 22, "num_kv_blocks": num_blocks, "cuda_graphs": None}
    if family in IN_GRAPHS:
        small["cuda_graphs"] = False
    found, stats = answers(copy.deepcopy(model(family)).cuda(), 1, **small)
    assert found == [expected(family, NUM_NEW_TOKENS)]
    assert stats.num_preemptions > 0 or family == "Mistral"


@pytest.mark.parametrize("family", ["Gemma3Text", "Gemma4Text"])
def test_preemption_changes_no_token_within_graphs(family):
    found, stats = answers(
        copy.deepcopy(model(family)).cuda(), 2, max_num_batched_tokens=22, num_kv_blocks=14, cuda_graphs=True
    )
    assert found == 2 * [expected(family, NUM_NEW_TOKENS)]
    assert stats.num_preemptions > 0


@pytest.mark.costly
@pytest.mark.parametrize("family", ["GptOss", "DeepseekV2"])
def test_experts_in_bfloat16_are_captured_and_answer_as_without_graphs(family):
    """The same kernels on the same shapes, so to the last bit."""
    results = []
    for graphs in (True, False):
        module = copy.deepcopy(model(family)).to(torch.bfloat16).cuda()
        results.append(answers(module, 2, cuda_graphs=graphs, overlap=graphs)[0])
    assert results[0] == results[1]
