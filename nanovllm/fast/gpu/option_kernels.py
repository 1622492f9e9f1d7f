"""Compiles kernels of draws and options, which depend on a model's vocabulary alone; first use of a GPU's libraries.

A start does this while it imports transformers, and again with the kernels of the model, where it then finds them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from nanovllm.device import DEVICE_LOCK, find_kernel
from nanovllm.fast.fast_draws import fast_sampler
from nanovllm.fast.gpu.step_inputs import RowInputs, SampleInputs, StepPacking, draw_tensors
from nanovllm.features.costs.buckets import MIN_ROWS, GraphShape
from nanovllm.features.penalties.penalties import PENALTY_FIELDS

_AT_ONCE = 32


def use_gpu(model: Any, device: str, dtype: str) -> None:
    """Use a GPU's libraries once, then compile the kernels of a model's options, if its folder names its vocabulary.

    Args:
        model, dtype: arguments of `LLM`.
    """
    with suppress(Exception), DEVICE_LOCK, torch.no_grad():  # the engine meets an error again
        table = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
        scale = table.float().square().mean(dim=-1, keepdim=True).rsqrt()
        ((table * scale).to(table.dtype) @ table.T).cos().sum().item()
        # Triton reads its own files once, and would in each of several threads.
        if (kernel := find_kernel("layer_parts", "with_sampled")) is not None:
            kernel(*table.new_zeros(2, MIN_ROWS, dtype=torch.int64))
        config = json.loads((Path(str(model)) / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        name = (config.get("dtype") or config["torch_dtype"]) if dtype == "auto" else dtype
        calls = option_calls(config["vocab_size"], getattr(torch, name), table.device)
        call_together([partial(on_device, table.device, call) for call in calls])


def option_calls(vocab_size: int, dtype: torch.dtype, device: torch.device) -> list[Callable[[], Any]]:
    """Calls of all kernels of draws and options, for logits of `dtype`."""
    with torch.inference_mode(False):
        packing = StepPacking(GraphShape(MIN_ROWS, MIN_ROWS, 0), MIN_ROWS, (SampleInputs(), RowInputs()))
        inputs = packing.views(torch.zeros(packing.num_words, dtype=torch.int32, device=device))
        sizes = vocab_size, dtype, device
        return [*_draw_calls(*sizes, inputs), *_option_calls(*sizes), *_row_calls(inputs)]


def _draw_calls(vocab_size: int, dtype: torch.dtype, device: torch.device, inputs: Any) -> list[Callable[[], Any]]:
    """Kernels of draws and filters: of the model's logits, and of float32 ones, which a penalty or a bias leaves."""
    draw = fast_sampler(compiles=True).draw
    own = draw_tensors(inputs)
    calls: list[Callable[[], Any]] = []
    floor_launches = find_kernel("filter_floors", "floor_launches")
    masked = find_kernel("bit_masks", "masked")
    masks = _token_masks(vocab_size, device)
    for each in dict.fromkeys((dtype, torch.float32)):
        logits = torch.zeros(MIN_ROWS, vocab_size, dtype=each, device=device)
        calls.append(partial(draw, logits, own, has_filters=False))
        if floor_launches is not None:
            calls += floor_launches(logits, own)[0]
        if masked is not None:
            calls += [partial(draw, logits, own, has_filters=False, masks=masks), partial(masked, logits, masks)]
    return calls


def _option_calls(vocab_size: int, dtype: torch.dtype, device: torch.device) -> list[Callable[[], Any]]:
    """Kernels of options that come before the draw or after it."""
    logits = torch.zeros(MIN_ROWS, vocab_size, dtype=torch.float32, device=device)
    rows, entries = (torch.zeros(MIN_ROWS, *shape, dtype=dtype, device=device)
                     for shape, dtype in (((), torch.int64), ((PENALTY_FIELDS,), torch.int32)))  # fmt: skip
    is_allowed = torch.ones(logits.shape, dtype=torch.int8, device=device)
    of_kernels: dict[tuple[str, str], tuple[Any, ...]] = {
        ("penalties", "penalise"): (logits.clone(), entries, entries.view(-1), rows),
        ("penalties", "keep_allowed"): (logits.clone(), rows, is_allowed),
        ("bit_masks", "mask_in_place"): (logits.clone(), _token_masks(vocab_size, device)),
        ("logprobs", "measure"): (logits.to(dtype), rows, 1),
    }
    found = ((find_kernel(*names), arguments) for names, arguments in of_kernels.items())
    return [partial(kernel, *arguments) for kernel, arguments in found if kernel is not None]


def _row_calls(inputs: Any) -> list[Callable[[], Any]]:
    kernel = find_kernel("layer_parts", "with_sampled")
    return [] if kernel is None else [partial(kernel, inputs.token_ids, inputs.noise_keys)]


def _token_masks(vocab_size: int, device: torch.device) -> Any:
    """Masks of a few rows; None without the kernels that read them."""
    words = torch.zeros(MIN_ROWS, -(-vocab_size // 32), dtype=torch.int32, device=device)
    token_masks = find_kernel("bit_masks", "TokenMasks")
    return token_masks and token_masks(words.new_zeros(MIN_ROWS), words)


def call_apart(calls: Iterable[Callable[[], Any]]) -> None:
    """Call each in a thread, without waiting: a later use of a result waits for it, or sees the error."""
    for call in calls:
        Thread(target=_run_quietly, args=(call,)).start()


def _run_quietly(call: Callable[[], Any]) -> None:
    with suppress(Exception):
        call()


def on_device(device: torch.device, call: Callable[[], Any]) -> None:
    with torch.cuda.device(device):
        torch.zeros(1, device=device)  # PyTorch takes the GPU's context, which a driver's call in a new thread lacks
        call()


def call_together(calls: Iterable[Callable[[], Any]]) -> None:
    """Call all in parallel threads without gradients; re-raises the first error."""

    def run(call: Callable[[], Any]) -> None:
        with torch.no_grad():
            call()

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for future in [pool.submit(run, call) for call in calls]:
            future.result()
