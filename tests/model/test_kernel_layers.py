"""Layers by our kernels: recognised, compared with their modules, and compiled where a model computes anything else.

References in PyTorch stand in for the kernels, which run on a GPU alone: see tests/gpu/test_kernels.py.
"""

import pytest
import torch

from nanovllm.fast.layers import kernel_layers
from nanovllm.fast.layers.kernel_layers import KernelLayer
from nanovllm.fast.layers.stacked_layers import unstack_layers
from nanovllm.fast.replaced_layers import FastLayers
from tests.support.decode_steps import answering_alike, binding_of, hidden_step, stack_layers, tiny_binding
from tests.support.reference_parts import PARTS
from tests.support.reference_stack import ReferenceStack, stand_in
from tests.support.scaled_parts import PLACES, scale_part
from tests.support.tiny_models import LLAMAS_KIND, tiny_model


@pytest.fixture(autouse=True)
def references(monkeypatch):
    """The kernels by name; a test may replace one."""
    found = dict(PARTS)
    monkeypatch.setattr(kernel_layers, "find_kernel", lambda file, name: found[name])
    return found


def run_by_kernels(binding):
    """Whether the layers run by the kernels after they were compared."""
    FastLayers(binding).use_kernel_layers(lambda: [hidden_step(binding, [0, 5, 20]), hidden_step(binding, [30, 31])])
    return all(isinstance(binding.calls.get(module), KernelLayer) for module in binding.layer_modules)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@LLAMAS_KIND
def test_layers_of_llamas_kind_run_by_kernels_and_answer_as_their_modules(family, dtype):
    binding = tiny_binding(family, dtype=dtype)
    with answering_alike(binding, [0, 17, 33]):
        assert run_by_kernels(binding)


def test_the_last_norm_and_the_rotary_embedding_run_by_kernels_too(references):
    binding = tiny_binding("qwen3")
    assert run_by_kernels(binding)
    base = binding.model.model
    assert base.norm in binding.calls and base.rotary_emb in binding.calls


@pytest.mark.parametrize("name", ["norm", "rotary_emb"])
def test_a_module_around_the_layers_that_differs_leaves_all_to_the_compiler(name, info_log):
    binding = tiny_binding()
    module = getattr(binding.model.model, name)
    own = module.forward

    def scaled(*args, **kwargs):
        output = own(*args, **kwargs)
        return output * 0.99 if name == "norm" else tuple(part * 0.99 for part in output)

    module.forward = scaled
    assert not run_by_kernels(binding)
    assert not binding.calls and "around them computes something else" in info_log.text


@pytest.mark.parametrize("place", PLACES)
def test_a_factor_of_half_a_percent_anywhere_in_a_layer_keeps_the_modules(place, monkeypatch):
    model = tiny_model(dtype=torch.bfloat16)
    scale_part(monkeypatch, place, 0.995)
    binding = binding_of(model, rotary=True)
    expected = hidden_step(binding, [0, 17])
    assert not run_by_kernels(binding)
    assert torch.equal(hidden_step(binding, [0, 17]), expected)


@pytest.mark.parametrize("name", ["norm", "add_and_norm", "gated"])
def test_a_wrong_kernel_is_not_used(name, references, info_log):
    right = references[name]

    def wrong(*args):
        output = right(*args)
        return (output[0], output[1] * 0.99) if name == "add_and_norm" else output * 0.99

    references[name] = wrong
    assert not run_by_kernels(tiny_binding())
    assert "layers are compiled: the kernel of the " in info_log.text


def test_a_kernel_that_does_not_compile_leaves_the_layers_to_the_compiler(references, info_log):
    def fails(*_):
        raise ValueError("no such instruction")

    references["gated"] = fails
    binding = tiny_binding()
    expected = hidden_step(binding, [0, 17])
    assert not run_by_kernels(binding)
    assert "no such instruction" in info_log.text
    assert torch.equal(hidden_step(binding, [0, 17]), expected)


@pytest.mark.parametrize("fields", [{"hidden_act": "gelu"}, {"attention_bias": True, "mlp_bias": True}], ids=str)
def test_layers_of_another_kind_or_with_further_parts(fields):
    binding = tiny_binding(**fields)
    expected = hidden_step(binding, [0, 17])
    assert run_by_kernels(binding) == ("hidden_act" not in fields)  # biases are the linear layers' own
    torch.testing.assert_close(hidden_step(binding, [0, 17]), expected, atol=0.06, rtol=0.06)


def test_without_a_step_to_compare_layers_are_compiled(info_log):
    binding = tiny_binding()
    FastLayers(binding).use_kernel_layers(lambda: None)
    assert not binding.calls and "no room to compare" in info_log.text


@pytest.mark.parametrize("is_wrong", [False, True])
def test_layers_in_one_launch_are_compared_with_layers_by_kernels(is_wrong, monkeypatch):
    binding = tiny_binding()
    assert run_by_kernels(binding)
    by_kernels = dict(binding.calls)
    stand_in(monkeypatch)
    if is_wrong:
        run = ReferenceStack.run
        monkeypatch.setattr(ReferenceStack, "run", lambda *args, **options: run(*args, **options) * 0.9)
    for module in binding.layer_modules:
        monkeypatch.setattr(module, "forward", None)  # modules do not run again
    stack_layers(binding)
    ReferenceStack.launches.clear()
    hidden_step(binding, [3])
    assert ReferenceStack.launches == ([] if is_wrong else [2])
    unstack_layers(binding)
    assert binding.calls == by_kernels or is_wrong


@pytest.mark.parametrize("seed", [2, 4])
def test_layers_in_one_launch_are_compared_by_steps_of_one_row_too(seed, monkeypatch):
    """A row's few K and V in bfloat16 round in one direction, by a quarter of a percent and more on average."""
    fields = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_layers": 4}
    binding = tiny_binding(seed=seed, intermediate_size=512, **fields)
    assert run_by_kernels(binding)
    stand_in(monkeypatch)
    stack_layers(binding, [0], [18], [98])
    assert binding.stacked is not None


def test_a_trial_run_of_a_capture_runs_the_first_layer_alone():
    binding = tiny_binding(num_layers=4)
    assert run_by_kernels(binding)
    expected, written = hidden_step(binding, [0, 17]), [cache.clone() for cache in binding.caches.of_layers]
    for cache in binding.caches.of_layers:
        cache.zero_()
    with kernel_layers.first_layer_alone():
        own = hidden_step(binding, [0, 17])
    assert not torch.equal(own, expected)
    are_written = [bool(cache.any()) for cache in binding.caches.of_layers]
    assert are_written == [True, False, False, False]
    for cache, before in zip(binding.caches.of_layers, written, strict=True):
        cache.copy_(before)
    assert torch.equal(hidden_step(binding, [0, 17]), expected)
