"""Steps with adapters as captured graphs, without a GPU: graphs are functions that are called again.

References in PyTorch stand in for all kernels; tests/gpu/test_adapters_on_gpu.py has the real ones.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.fast import graph_paths
from nanovllm.fast.gpu.adapter_graphs import AdapterGraphs, SlotInputs
from nanovllm.fast.gpu.step_inputs import Packing
from nanovllm.fast.layers import kernel_layers
from nanovllm.fast.layers.kernel_layers import KernelLayer
from nanovllm.features.costs.buckets import GraphShape
from nanovllm.features.costs.dummy_batches import dummy_batch
from nanovllm.features.packed_steps import HostStep
from nanovllm.layout import build_layout
from tests.support.adapter_files import KINDS, merged, save_adapter, save_kinds
from tests.support.dense_rotary import dense_rotate
from tests.support.gpu_steps import run_graphs_on_a_cpu
from tests.support.layer_kinds import own_answer
from tests.support.llms import check_engine, generate, greedy, token_ids
from tests.support.reference_parts import PARTS
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model

NAMES = [None, *KINDS]
NUM_TOKENS = 8
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)
OPTIONS = {
    "dtype": "float32", "max_model_len": 160, "max_num_seqs": 8, "num_kv_blocks": 80, "max_num_batched_tokens": 96,
    "block_size": 16,
}  # fmt: skip
PROMPTS = random_prompts(7, low=3, high=90, seed=3)
OF_PROMPTS = [NAMES[number % len(NAMES)] for number in range(len(PROMPTS))]
LAYERS = ["by kernels", "merged", "as they are"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    model = tiny_model()
    save_tiny(folder / "model")
    return folder / "model", save_kinds(folder, model), model


@pytest.fixture(scope="module")
def answers(saved):
    _, folders, model = saved
    models = {name: model if name is None else merged(model, folders[name]) for name in NAMES}
    return {
        (n, name): own_answer(models[name], prompt, NUM_TOKENS) for n, prompt in enumerate(PROMPTS) for name in NAMES
    }


@pytest.fixture
def open_llm(saved, monkeypatch):
    """Opens an engine of graphs, of layers as `LAYERS` names them, and loads adapters."""

    def opened(layers="by kernels", names=KINDS, **options):
        left_out = ["compile_layers", "stack_layers"]
        if layers != "by kernels":
            left_out += ["use_kernel_layers", "fuse_rotary"]
        if layers == "as they are":
            left_out.append("merge_linears")
        run_graphs_on_a_cpu(monkeypatch, left_out=left_out)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
        monkeypatch.setattr(kernel_layers, "find_kernel", lambda file, name: PARTS[name])
        monkeypatch.setattr("nanovllm.fast.replaced_layers.find_kernel", lambda file, name: dense_rotate)
        monkeypatch.setattr(graph_paths, "run_some_rows", run_a_chunk)
        folder, folders, _ = saved
        llm = LLM(folder, **OPTIONS | options)
        for name in names:
            llm.load_adapter(name, folders[name])
        return llm

    return opened


def run_a_chunk(binding, config, run_layers):
    """A step to compare layers, with no block twice in a table."""
    entries = dummy_batch(binding, config, [(0, 21)], apart=True).entries
    run_layers(build_layout(entries, config.block_size, {}, longest_first=True))


def adapter_graphs(llm):
    return llm._engine.model_runner.launch_step.__self__._device


def expected(answers):
    return [answers[each] for each in enumerate(OF_PROMPTS)]


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}, {"overlap": False}, {"max_loras": 2}], ids=str)
@pytest.mark.parametrize("layers", LAYERS)
def test_tokens_are_those_of_merged_weights_cold_and_warm(open_llm, answers, layers, options):
    with open_llm(layers, **options) as llm:
        binding = llm._engine.model_runner.binding
        by_kernels = [isinstance(binding.calls.get(module), KernelLayer) for module in binding.layer_modules]
        assert all(by_kernels) if layers == "by kernels" else not any(by_kernels)
        assert isinstance(adapter_graphs(llm), AdapterGraphs)
        for _ in range(3):
            assert token_ids(generate(llm, PROMPTS, GREEDY, adapter=OF_PROMPTS)) == expected(answers)
            while llm._engine.use_idle_time(captures=True):
                pass
        plain = token_ids(generate(llm, PROMPTS, GREEDY))
        assert plain == [answers[number, None] for number in range(len(PROMPTS))]
        assert llm.stats().prefix_cache_hits > 0
        check_engine(llm)


MIXED = [
    SamplingParams(seed=5, max_tokens=6, n=3),
    SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=9),
    SamplingParams(temperature=0.0, max_tokens=7, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=1),
    SamplingParams(seed=1, max_tokens=6, logit_bias={7: 4.0}),
]


def lists(outputs):
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


@pytest.mark.costly
@pytest.mark.parametrize(
    "options", [{}, {"num_kv_blocks": 14, "max_num_batched_tokens": 40}, {"speculation": "suffix"}], ids=str
)
def test_requests_of_every_kind_have_the_tokens_of_each_alone(open_llm, options):
    params = [MIXED[number % len(MIXED)] for number in range(len(PROMPTS))]
    with open_llm(**options) as llm:
        alone = [
            lists(generate(llm, [prompt], own, adapter=name))[0]
            for prompt, own, name in zip(PROMPTS, params, OF_PROMPTS, strict=True)
        ]
        llm.reset_prefix_cache()
        for _ in range(2):
            assert lists(generate(llm, PROMPTS, params, adapter=OF_PROMPTS)) == alone
        assert (llm.stats().num_preemptions > 0) == ("num_kv_blocks" in options)
        check_engine(llm)


def test_the_executor_is_as_it_was_after_each_step(open_llm):
    with open_llm() as llm:
        runner = llm._engine.model_runner
        own = runner.executor._forwards, runner.executor._packing, runner.binding.calls, runner.binding.rotary_changes
        changes = len(runner.binding.rotary_changes)
        generate(llm, PROMPTS, GREEDY, adapter=OF_PROMPTS)
        assert not {"_forward", "_run_whole"} & vars(runner.executor).keys()
        now = runner.executor._forwards, runner.executor._packing, runner.binding.calls, runner.binding.rotary_changes
        assert all(one is other for one, other in zip(own, now, strict=True))
        assert len(runner.binding.rotary_changes) == changes
        runner.binding.uninstall()
        assert not any({"forward", "product"} & vars(module).keys() for module in runner.binding.model.modules())


def test_shapes_that_come_often_and_decodes_in_idle_time_have_graphs(open_llm, answers):
    with open_llm() as llm:
        graphs, executor = adapter_graphs(llm), llm._engine.model_runner.executor
        for _ in range(20):
            generate(llm, PROMPTS[:2], GREEDY, adapter="b")
        found = graphs._forwards.graphs
        assert any(not shape.num_tiles for shape in found)
        own = set(executor._forwards.graphs.values())
        while llm._engine.use_idle_time(captures=True):
            pass
        assert {4, 8} <= {shape.num_decodes for shape in found if not shape.num_tiles}
        assert not own & set(found.values())
        assert token_ids(generate(llm, PROMPTS, GREEDY, adapter=OF_PROMPTS)) == expected(answers)


def test_a_larger_rank_and_further_layers_take_new_memory_and_drop_the_graphs(open_llm, saved, tmp_path):
    _, _, model = saved
    wide = save_adapter(tmp_path / "wide", model, rank=40, seed=8)
    right = own_answer(merged(model, wide), PROMPTS[2], NUM_TOKENS)
    with open_llm(names=["a"], max_loras=3) as llm:
        graphs = adapter_graphs(llm)
        before = generate(llm, [PROMPTS[2]], GREEDY, adapter="a")
        assert {factors.up.shape[1] for factors in graphs._factors.of_products.values()} == {16}
        while llm._engine.use_idle_time(captures=True):
            pass
        assert graphs._forwards.graphs and len(graphs._factors.of_products) == 4  # q, k and v; down; in two layers
        llm.load_adapter("wide", wide)
        assert not graphs._forwards.graphs
        assert token_ids(generate(llm, [PROMPTS[2]], GREEDY, adapter="wide")) == [right]
        assert {factors.up.shape[1] for factors in graphs._factors.of_products.values()} == {48}
        assert len(graphs._factors.of_products) == 8
        llm.reset_prefix_cache()
        assert token_ids(generate(llm, [PROMPTS[2]], GREEDY, adapter="a")) == token_ids(before)


def test_an_adapter_without_memory_is_not_loaded_and_others_go_on(open_llm, saved, tmp_path, monkeypatch, answers):
    _, _, model = saved
    wide = save_adapter(tmp_path / "wide", model, rank=40, seed=8)
    with open_llm() as llm:
        graphs = adapter_graphs(llm)
        generate(llm, PROMPTS, GREEDY, adapter=OF_PROMPTS)
        allocated = iter([graphs._factors._allocated] * 3)

        def failing(*given):
            for allocate in allocated:
                return allocate(*given)
            raise torch.OutOfMemoryError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(graphs._factors, "_allocated", failing)
            with pytest.raises(torch.OutOfMemoryError, match=r"rank 48 in 8 slots need 12 MiB .* Lower max_loras"):
                llm.load_adapter("wide", wide)
        assert "wide" not in llm.adapters
        assert token_ids(generate(llm, PROMPTS, GREEDY, adapter=OF_PROMPTS)) == expected(answers)
        check_engine(llm)


def test_a_changed_model_drops_the_graphs(open_llm, answers):
    with open_llm() as llm:
        graphs, executor = adapter_graphs(llm), llm._engine.model_runner.executor
        generate(llm, PROMPTS, GREEDY, adapter=OF_PROMPTS)
        while llm._engine.use_idle_time(captures=True):
            pass
        assert graphs._forwards.graphs
        executor.model_changed(in_place=False)
        assert not graphs._forwards.graphs and not executor._forwards.graphs
        llm.reset_prefix_cache()
        assert token_ids(generate(llm, PROMPTS, GREEDY, adapter=OF_PROMPTS)) == expected(answers)
        assert executor._forwards.graphs.keys() & executor._buckets.common() or executor._lacking


def test_a_closed_engine_keeps_no_factors(open_llm):
    with open_llm() as llm:
        graphs = adapter_graphs(llm)
        generate(llm, PROMPTS, GREEDY, adapter=OF_PROMPTS)
        assert graphs._factors.of_products
    assert not graphs._factors.of_products and not graphs._forwards.graphs


def test_rows_are_sorted_by_slot_with_chunks_after_padding():
    layout = SimpleNamespace(num_decodes=2, num_tokens=5)
    shape = GraphShape(4, 16, 3)
    slots = SlotInputs(5)
    slots.slots = np.array([3, -1, 0, 0, 2], np.int32)
    packing = Packing(slots.inputs, {"rows": shape.num_rows})
    to = packing.views(np.zeros(packing.num_words, np.int32))
    slots.fill(to, HostStep(layout, None, None, shape.num_decodes))
    assert to.adapter_starts.tolist() == [0, 2, 2, 3, 4, 4, 4, 4, 4]
    assert to.adapter_order[:4].tolist() == [4, 5, 6, 0]
    assert to.adapter_slots[:7].tolist() == [3, -1, -1, -1, 0, 0, 2] and (to.adapter_slots[7:] == -1).all()
