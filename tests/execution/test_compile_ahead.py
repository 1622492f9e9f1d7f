"""Kernels compiled before the first step: each one that a model's steps call, several at a time."""

import threading

import pytest
import torch

import nanovllm.fast.kernels.skinny_linear  # noqa: F401  registers the operators
from nanovllm.fast.gpu.option_kernels import call_together
from nanovllm.fast.layers import merged_linears
from nanovllm.fast.layers.merged_linears import kernel_calls, merging
from tests.support.tiny_models import tiny_model


def test_calls_run_at_the_same_time_and_without_gradients():
    barrier, modes = threading.Barrier(5, timeout=20), []

    def call():
        barrier.wait()
        modes.append(torch.is_grad_enabled())

    call_together([call] * 5)
    assert modes == [False] * 5


def test_a_call_that_fails_is_not_passed_over():
    def fails():
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        call_together([fails, lambda: None])


def test_products_of_each_size_are_called_once(monkeypatch):
    monkeypatch.setattr(merged_linears, "_suits_kernel", lambda weight: True)
    model = tiny_model("qwen3", num_layers=3)
    with merging(model, model.model.layers), torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    called = [(call.func, tuple(part.shape for part in call.args)) for call in kernel_calls(model, 4)]
    linear, add = torch.ops.nanovllm.linear, torch.ops.nanovllm.linear_and_add
    heads, hidden, inner = 8 * 128, 256, 128
    qkv, gate_up = (heads + 2 * 2 * 128, hidden), (2 * inner, hidden)
    output, down = (hidden, heads), (hidden, inner)
    expected = [(linear, ((4, shape[1]), shape)) for shape in (qkv, gate_up, output, down)]
    expected += [(add, ((4, shape[1]), shape, (4, hidden))) for shape in (output, down)]
    assert sorted(called, key=str) == sorted(expected, key=str)
