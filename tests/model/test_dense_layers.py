"""All between two layers' attention in one launch: where it runs, compared with layers by kernels, refused by reasons.

References in PyTorch stand in for the kernels, which run on a GPU alone: see tests/gpu/test_dense_layer.py.
"""

import contextlib
import re

import pytest
import torch

from nanovllm.errors import NotFusedError
from nanovllm.fast.kernels import dense_layer
from nanovllm.fast.layers import kernel_layers
from nanovllm.fast.layers.dense_layers import DenseLayer, dense_layer_compilations
from nanovllm.fast.layers.distances import rewriting
from nanovllm.fast.layers.kernel_layers import KernelLayer
from nanovllm.fast.layers.stacked_layers import unstack_layers
from nanovllm.fast.replaced_layers import FastLayers
from tests.support.decode_steps import answering_alike, hidden_step, stack_layers, tiny_binding
from tests.support.reference_dense import ReferenceDense
from tests.support.reference_parts import PARTS
from tests.support.reference_stack import ReferenceStack, stand_in
from tests.support.tiny_models import LLAMAS_KIND

POSITIONS = [0, 5, 20, 17, 3, 9]


@pytest.fixture(autouse=True)
def references(monkeypatch):
    monkeypatch.setattr(kernel_layers, "find_kernel", lambda file, name: PARTS[name])
    monkeypatch.setattr(dense_layer, "DenseLayers", ReferenceDense)
    monkeypatch.setattr(dense_layer, "why_not", lambda *_: None)
    yield
    ReferenceDense.launches.clear()
    ReferenceDense.compiled.clear()


def some_rows(binding):
    hidden_step(binding, [0, 5, 20])


def launched(binding, num_rows=16):
    """The launches of a step of so many rows, after the layers were compared in steps of 16 rows."""
    assert FastLayers(binding).use_kernel_layers(
        lambda: some_rows(binding), lambda: hidden_step(binding, POSITIONS, 16)
    )
    return launches_of(binding, num_rows)


def launches_of(binding, num_rows):
    ReferenceDense.launches.clear()
    hidden_step(binding, [1, 30], num_rows)
    return [*ReferenceDense.launches]


@pytest.mark.costly
@LLAMAS_KIND
def test_layers_answer_as_their_modules_and_leave_the_same_k_and_v(family):
    binding = tiny_binding(family, num_layers=3)
    with answering_alike(binding, POSITIONS, 16):
        assert launched(binding) == [(0, 16), (1, 16), (2, 16)]


@pytest.mark.parametrize("num_rows, is_launched", [(4, False), (8, False), (9, True), (16, True), (17, False)])
def test_steps_of_9_rows_up_to_the_largest_compared_ones_use_it(num_rows, is_launched):
    assert bool(launched(tiny_binding(), num_rows)) == is_launched
    assert ReferenceDense.compiled == [16]


@pytest.mark.parametrize("num_rows", [2, 8, 16])
def test_steps_of_fewer_rows_use_it_where_layers_are_too_large_for_a_stack(num_rows, monkeypatch):
    monkeypatch.setattr("nanovllm.fast.kernels.layer_stack.MAX_LAYER_BYTES", 2**10)
    assert launched(tiny_binding(), num_rows)
    assert ReferenceDense.compiled == [16]


def test_a_later_layer_starts_with_attention(monkeypatch):
    binding = tiny_binding(num_layers=3)
    launched(binding)
    normed = []
    of_states = DenseLayer.normed
    monkeypatch.setattr(DenseLayer, "normed", lambda layer, states: normed.append(states) or of_states(layer, states))
    hidden_step(binding, POSITIONS, 16)
    assert len(normed) == 1


def test_a_layer_that_gets_other_states_than_the_last_ones_output_computes_its_own_queries():
    binding = tiny_binding()
    launched(binding)
    calls = binding.calls
    first, second = (calls[module] for module in binding.layer_modules)
    calls[binding.layer_modules[0]] = lambda *args, **kwargs: first(*args, **kwargs) * 2.0
    binding.uninstall()
    own = hidden_step(binding, POSITIONS, 16)
    calls[binding.layer_modules[0]] = lambda *args, **kwargs: first.by_kernels(*args, **kwargs) * 2.0
    calls[binding.layer_modules[1]] = second.by_kernels
    binding.uninstall()
    torch.testing.assert_close(hidden_step(binding, POSITIONS, 16), own, atol=0.06, rtol=0.06)


@pytest.mark.parametrize("place", ["hidden", "query", "keys", "values"])
def test_a_kernel_that_errs_by_some_percent_is_not_used(place, monkeypatch, info_log):
    run = ReferenceDense.run

    def wrong(self, index, layer, *args):
        hidden, query = run(self, index, layer, *args)
        if place in ("keys", "values") and layer.keys is not None:
            getattr(layer, place)[args[-1]] *= 1.05
        return hidden * (1.05 if place == "hidden" else 1), query * (1.05 if place == "query" else 1)

    monkeypatch.setattr(ReferenceDense, "run", wrong)
    binding = tiny_binding()
    assert launched(binding) == []
    assert re.search("layers run in several launches: (the next|.* computes something else)", info_log.text)
    calls = [binding.calls[module] for module in binding.layer_modules]
    assert all(type(call) is KernelLayer for call in calls)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_a_kernel_that_writes_no_k_or_v_of_the_next_layer_is_not_used(name, monkeypatch, info_log):
    run = ReferenceDense.run

    def forgets(self, index, layer, *args):
        cache = getattr(layer, name)
        return run(self, index, layer if cache is None else layer._replace(**{name: cache.clone()}), *args)

    monkeypatch.setattr(ReferenceDense, "run", forgets)
    binding = tiny_binding()
    hidden_step(binding, POSITIONS, 16)  # the same K and V
    assert launched(binding) == []
    assert f"its {name} differ by up to 2.0e+00" in info_log.text


@pytest.mark.parametrize("factor", [1.0, 1.01])
@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
def test_k_and_v_that_err_by_a_hundredth_in_scale_differ(part, factor):
    cache = torch.randn(2, 32, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    before, slots = cache.clone(), torch.arange(5, 15)
    written = cache[:, slots] + 0.002 * cache[:, slots].roll(1, dims=1)  # rounded otherwise
    written[part] *= factor
    expectation = pytest.raises(NotFusedError, match="in scale") if factor != 1 else contextlib.nullcontext()
    with expectation, rewriting("a layer", cache, slots):
        cache[:, slots] = written
    assert torch.equal(cache, before)


@pytest.mark.parametrize("name", ["mlp_bias", "attention_bias"])
def test_biases_that_it_has_not_are_named(name, info_log):
    assert launched(tiny_binding(**{name: True})) == []
    assert "layers run in several launches: LlamaDecoderLayer has a bias" in info_log.text


def test_layers_larger_than_those_that_gain_are_left_as_they_are(monkeypatch, info_log):
    monkeypatch.setattr(dense_layer, "MAX_LAYER_BYTES", 2**10)
    assert launched(tiny_binding()) == []
    assert "MiB a layer are more than" in info_log.text


def test_rows_with_which_it_is_no_faster_run_by_kernels(monkeypatch):
    monkeypatch.setattr(dense_layer, "_LARGE_BYTES", 2**10)
    binding = tiny_binding()
    compare = lambda: [hidden_step(binding, POSITIONS, count) for count in (128, 64)]  # noqa: E731
    assert FastLayers(binding).use_kernel_layers(lambda: some_rows(binding), compare)
    assert launches_of(binding, 64) and not launches_of(binding, 65)
    assert ReferenceDense.compiled == [64]


def test_without_a_step_of_so_many_decodes_it_is_not_used(info_log):
    binding = tiny_binding()
    assert FastLayers(binding).use_kernel_layers(lambda: some_rows(binding), lambda: None)
    assert "no step of so many decodes fits" in info_log.text
    assert launches_of(binding, 16) == []


def test_the_layers_in_one_launch_serve_fewer_rows_and_leave_more_to_it(monkeypatch):
    stand_in(monkeypatch)
    binding = tiny_binding()
    assert launched(binding)
    stack_layers(binding)
    ReferenceStack.launches.clear()
    assert launches_of(binding, 4) == [] and ReferenceStack.launches == [2]
    assert launches_of(binding, 16) == [(0, 16), (1, 16)] and ReferenceStack.launches == [2]
    unstack_layers(binding)
    assert launches_of(binding, 4) == [] and launches_of(binding, 12) == [(0, 12), (1, 12)]


def test_weights_that_moved_are_read_where_they_are():
    binding = tiny_binding()
    launched(binding)
    before = hidden_step(binding, POSITIONS, 16)
    down = binding.layer_modules[0].mlp.down_proj
    down.weight = torch.nn.Parameter(down.weight * 3, requires_grad=False)
    after = hidden_step(binding, POSITIONS, 16)
    assert not torch.allclose(after, before, atol=0.01)
    expected = [binding.calls[module].by_kernels for module in binding.layer_modules]
    binding.calls |= dict(zip(binding.layer_modules, expected, strict=True))
    binding.uninstall()
    torch.testing.assert_close(after, hidden_step(binding, POSITIONS, 16), atol=0.06, rtol=0.06)


def test_a_trial_run_of_a_capture_launches_the_first_layer_alone():
    binding = tiny_binding(num_layers=3)
    launched(binding)
    with kernel_layers.first_layer_alone():
        assert launches_of(binding, 16) == [(0, 16)]
    assert launches_of(binding, 16) == [(0, 16), (1, 16), (2, 16)]


@pytest.mark.parametrize("max_rows, sizes", [(8, []), (9, [16]), (40, [16, 32, 64]), (300, [16, 32, 64, 128])])
def test_what_an_engine_may_use_is_compiled_ahead(max_rows, sizes, monkeypatch):
    assert sizes_compiled_ahead(max_rows, monkeypatch) == sizes


def test_few_decodes_of_layers_too_large_for_a_stack_have_it_compiled(monkeypatch):
    monkeypatch.setattr("nanovllm.fast.kernels.layer_stack.MAX_LAYER_BYTES", 2**10)
    assert sizes_compiled_ahead(1, monkeypatch) == [16]


def sizes_compiled_ahead(max_rows, monkeypatch):
    compiled = []
    monkeypatch.setattr(dense_layer, "machine_code", lambda sizes, device, num_rows, **_: compiled.append(num_rows))
    binding = tiny_binding()
    calls = dense_layer_compilations(binding.layer_modules, binding.layers, binding.device, max_rows)
    for call in calls:
        call()
    return compiled


def test_what_the_kernel_does_not_serve_is_named(monkeypatch):
    monkeypatch.undo()
    sizes = dense_layer.DenseSizes(1024, 3072, 16, 8, 128)
    assert dense_layer.why_not(sizes, torch.bfloat16, torch.device("cpu")) is not None
    assert (sizes.query, sizes.qkv) == (2048, 4096)
    available = 232_448  # bytes of a Hopper's multiprocessor
    for served in (sizes, dense_layer.DenseSizes(256, 512, 4, 2, 64), dense_layer.DenseSizes(4096, 12_288, 32, 8, 128)):
        for num_rows in dense_layer.NUM_ROWS:
            plan = dense_layer.Plan.of(served, num_rows, num_processors=132, shared_bytes=available)
            assert plan.shared_bytes(num_rows) <= available and plan.weight_slots >= 4 and plan.input_slots >= 2
            for splits, depth in ((plan.output_splits, served.query), (plan.down_splits, served.inner)):
                assert 1 <= splits <= depth // 128
    large = dense_layer.DenseSizes(2560, 9728, 32, 8, 128)
    plan = dense_layer.Plan.of(large, 16, num_processors=132, shared_bytes=available)
    assert plan[:4] == (3, 3, 2, 1)  # 40 tiles by 3 give 120 of 132 blocks an item, by 2 only 80
