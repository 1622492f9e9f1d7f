"""Compiles the project's GPU kernels before the first step, in parallel, by calling each on a few rows of zeros.

Each takes some tenths of a second, mostly in LLVM and an assembler without the interpreter's lock; the first step
would compile them one by one. A kernel missing here is compiled at its first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.attention.flex_gpu import layers_by_kind
from nanovllm.attention.flex_gpu_options import KernelOptions
from nanovllm.attention.step_tables import BUNDLE_NUMBERS, WIDE_NUMBERS, TableInputs
from nanovllm.core.config import EngineConfig
from nanovllm.execution.buckets import MIN_ROWS, GraphShape
from nanovllm.execution.step_inputs import RowInputs, SampleInputs, StepPacking, draw_tensors
from nanovllm.model import experts
from nanovllm.model.binding import ModelBinding
from nanovllm.model.fast.merged_linears import kernel_calls
from nanovllm.model.fast.rotary_attention import rotary_calls
from nanovllm.model.fast.stacked_layers import compile_calls_of
from nanovllm.process.device import DEVICE_LOCK, find_kernel
from nanovllm.process.gc_control import collector_paused
from nanovllm.sampling.penalties import PENALTY_FIELDS
from nanovllm.sampling.sampler import Sampler

_AT_ONCE = 32


def compile_ahead(binding: ModelBinding, config: EngineConfig) -> None:
    """Compile the kernels of layers, decodes, draws and options, and import PyTorch's compiler meanwhile.

    Args:
        config: with its block size and limits resolved.
    """
    assert config.block_size is not None and config.max_num_seqs is not None
    shape = GraphShape(MIN_ROWS, MIN_ROWS, 0)
    features = SampleInputs(), RowInputs(), TableInputs(config.block_size)
    packing = StepPacking(shape, MIN_ROWS, features)
    with torch.inference_mode(False):  # tensors made in a caller's inference mode could be written to only there
        inputs = packing.views(torch.zeros(packing.num_words + MIN_ROWS, dtype=torch.int32, device=binding.device))
        calls = [  # the longest first
            *_layer_calls(binding, MIN_ROWS, config.block_size),
            _start_compiler,
            *_decode_calls(binding, config.block_size, max(MIN_ROWS, config.max_num_seqs), inputs),
            *_draw_calls(binding, inputs),
            *_option_calls(binding),
        ]
    with DEVICE_LOCK, collector_paused():  # for the compiler's imports
        call_together([partial(_on_device, binding.device, call) for call in calls])


def _start_compiler() -> None:
    """Import PyTorch's compiler and start its compile worker processes."""
    from torch._inductor import compile_fx  # noqa: F401
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.use_process_pool()


def _decode_calls(binding: ModelBinding, block_size: int, max_decodes: int, inputs: Any) -> list[Callable[[], Any]]:
    """Decode attention for few rows, where a second kernel merges split outputs, and for many."""
    device = binding.device
    calls: list[Callable[[], Any]] = []
    tables = inputs.tables, inputs.decode_tables, inputs.decode_blocks, inputs.positions
    for layer in layers_by_kind(binding.layers):
        decodes = KernelOptions.for_layer(layer, device, block_size).decode_kernel(max_decodes, device)
        if decodes is None:
            continue
        traits = layer.traits
        query = torch.zeros(max_decodes, traits.num_heads, traits.head_dim, dtype=layer.dtype, device=device)
        sizes = block_size, traits.num_kv_heads
        caches = [torch.zeros(*sizes, d, dtype=layer.dtype, device=device) for d in (traits.head_dim, traits.value_dim)]
        sinks = query.new_zeros(traits.num_heads) if traits.has_sinks else None
        calls.append(partial(decodes.fill, *tables))
        for count in (MIN_ROWS, max_decodes):
            calls.append(partial(decodes.attend, query[:count], *caches, layer.scaling, None, sinks))
        if decodes.wide_members and max_decodes >= decodes.least_wide:
            calls.append(partial(_attend_in_wide_groups, decodes, tables, query, caches))
    return calls


def _attend_in_wide_groups(decodes: Any, tables: tuple[Any, ...], query: Tensor, caches: list[Tensor]) -> None:
    """Wide programs without work, and the cut of contexts with them."""
    nothing = query.new_zeros(MIN_ROWS, WIDE_NUMBERS, dtype=torch.int32)
    parts, bundles = nothing.view(-1)[:MIN_ROWS], nothing[:, :BUNDLE_NUMBERS].contiguous()
    wide = copy(decodes)  # other threads call the kernels without wide groups
    wide.fill(*tables, (parts, parts, bundles[:0], parts, nothing))
    for merges in (False, True):
        wide.attend_wide(query, *caches, 1.0, nothing, merges=merges)


def _layer_calls(binding: ModelBinding, num_rows: int, block_size: int) -> list[Callable[[], Any]]:
    """Kernels of merged linears, fused attention and stacked layers, for `num_rows` rows."""
    calls: list[Callable[[], Any]] = []
    if binding.may_stack_layers:
        calls += compile_calls_of(binding.layer_modules, binding.layers, binding.device, block_size)
    for layer in layers_by_kind(binding.layers):
        if (compile_prompts := KernelOptions.for_layer(layer, binding.device, block_size).compile_prompts) is not None:
            calls.append(compile_prompts)
    calls += [*kernel_calls(binding.model, num_rows), *experts.kernel_calls(binding.model, num_rows)]
    if not binding.mixers:  # with these, attention layers run uncompiled
        calls += rotary_calls(binding.layers[0], find_kernel("rotary", "rotate_and_store"), num_rows)
    return calls


def _draw_calls(binding: ModelBinding, inputs: Any) -> list[Callable[[], Any]]:
    """Kernels of draws and filters: of the model's logits, and of float32 ones, which a penalty or a bias leaves."""
    draw, own = Sampler(compiles=True).draw, draw_tensors(inputs)
    calls: list[Callable[[], Any]] = []
    filter_floors, masked = find_kernel("filter_floors", "filter_floors"), find_kernel("bit_masks", "masked")
    masks = _token_masks(binding)
    for dtype in dict.fromkeys((binding.dtype, torch.float32)):
        logits = _logits(binding, dtype)
        calls.append(partial(draw, logits, own, has_filters=False))
        if filter_floors is not None:
            calls.append(partial(filter_floors, logits, own))
        if masked is not None:
            calls += [partial(draw, logits, own, has_filters=False, masks=masks), partial(masked, logits, masks)]
    return calls


def _option_calls(binding: ModelBinding) -> list[Callable[[], Any]]:
    """Kernels of options that come before the draw or after it."""
    logits, device = _logits(binding, torch.float32), binding.device
    rows, entries = (torch.zeros(MIN_ROWS, *shape, dtype=dtype, device=device)
                     for shape, dtype in (((), torch.int64), ((PENALTY_FIELDS,), torch.int32)))  # fmt: skip
    is_allowed = torch.ones(logits.shape, dtype=torch.int8, device=device)
    of_kernels: dict[tuple[str, str], tuple[Any, ...]] = {
        ("penalties", "penalise"): (logits.clone(), entries, entries.view(-1), rows),
        ("penalties", "keep_allowed"): (logits.clone(), rows, is_allowed),
        ("bit_masks", "mask_in_place"): (logits.clone(), _token_masks(binding)),
        ("logprobs", "measure"): (_logits(binding, binding.dtype), rows, 1),
    }
    found = ((find_kernel(*names), arguments) for names, arguments in of_kernels.items())
    return [partial(kernel, *arguments) for kernel, arguments in found if kernel is not None]


def _logits(binding: ModelBinding, dtype: torch.dtype) -> Tensor:
    return torch.zeros(MIN_ROWS, binding.vocab_size, dtype=dtype, device=binding.device)


def _token_masks(binding: ModelBinding) -> Any:
    """Masks of a few rows; None without the kernels that read them."""
    words = torch.zeros(MIN_ROWS, -(-binding.vocab_size // 32), dtype=torch.int32, device=binding.device)
    token_masks = find_kernel("bit_masks", "TokenMasks")
    return token_masks and token_masks(words.new_zeros(MIN_ROWS), words)


def _on_device(device: torch.device, call: Callable[[], Any]) -> None:
    with torch.cuda.device(device):
        call()


def call_together(calls: Iterable[Callable[[], Any]]) -> None:
    """Call all in parallel threads without gradients; re-raises the first error."""

    def run(call: Callable[[], Any]) -> None:
        with torch.no_grad():
            call()

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for future in [pool.submit(run, call) for call in calls]:
            future.result()
