"""A GPU's first use at start, in a thread: for a model that goes to a GPU, and not where one is in use."""

import json

import pytest
import torch
from torch import nn

from nanovllm.fast.gpu import early_start, option_kernels
from nanovllm.fast.gpu.early_start import begin_gpu


@pytest.fixture
def used(monkeypatch):
    """Arguments of the threads that begin; there is a GPU that nobody uses."""
    found = []
    monkeypatch.setattr(option_kernels, "use_gpu", lambda *arguments: found.append(arguments))
    monkeypatch.setattr(early_start.Thread, "start", lambda thread: thread.run())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    return found


@pytest.mark.parametrize(
    "model, options, expected",
    [
        ("folder", {}, [("folder", "cuda", "auto")]),
        ("folder", {"device": "cuda:1", "dtype": "float16"}, [("folder", "cuda:1", "float16")]),
        ("folder", {"device": "cpu"}, []),
        (nn.Linear(2, 2), {}, []),
    ],
)
def test_the_device_of_a_model_that_is_loaded_to_a_gpu_is_used(used, model, options, expected):
    begin_gpu(model, options)
    assert used == expected


def test_a_gpu_in_use_and_a_machine_without_one_are_left_alone(used, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    begin_gpu("folder", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    begin_gpu("folder", {})
    assert used == []


@pytest.mark.parametrize(
    "config", [{"dtype": "float16"}, {"torch_dtype": "float16"}, {"text_config": {"dtype": "float16"}}]
)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_kernels_are_those_of_the_vocabulary_and_dtype_that_a_folder_names(tmp_path, monkeypatch, config, dtype):
    (config.get("text_config") or config)["vocab_size"] = 1000
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked, called = [], []

    def option_calls(*sizes):
        asked.append(sizes)
        return [lambda: called.append(True)]

    monkeypatch.setattr(option_kernels, "option_calls", option_calls)
    monkeypatch.setattr(option_kernels, "find_kernel", lambda *_: None)
    monkeypatch.setattr(option_kernels, "on_device", lambda device, call: call() or called.append(device))
    option_kernels.use_gpu(str(tmp_path), "cpu", dtype)
    assert asked == [(1000, torch.float16 if dtype == "auto" else torch.bfloat16, torch.device("cpu"))]
    assert called == [True, torch.device("cpu")]


def test_an_error_is_left_to_the_engine(tmp_path):
    option_kernels.use_gpu("no folder", "cuda:99", "auto")
    option_kernels.use_gpu(str(tmp_path), "cpu", "auto")
