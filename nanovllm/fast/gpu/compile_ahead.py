"""Compiles the project's GPU kernels before the first step, in parallel, by calling each on a few rows of zeros.

Each takes some tenths of a second, mostly in LLVM and an assembler without the interpreter's lock; the first step
would compile them one by one. A kernel missing here is compiled at its first call.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.device import DEVICE_LOCK, find_kernel
from nanovllm.fast.attention.flex_gpu import layers_by_kind
from nanovllm.fast.attention.flex_gpu_options import KernelOptions
from nanovllm.fast.attention.step_tables import BUNDLE_NUMBERS, WIDE_NUMBERS, TableInputs
from nanovllm.fast.gpu.option_kernels import call_apart, call_together, on_device, option_calls
from nanovllm.fast.gpu.step_inputs import RowInputs, SampleInputs, StepPacking
from nanovllm.fast.host.gc_control import collector_paused
from nanovllm.fast.layers import few_experts
from nanovllm.fast.layers.dense_layers import dense_layer_compilations
from nanovllm.fast.layers.kernel_layers import kernel_layer_calls
from nanovllm.fast.layers.merged_linears import kernel_calls
from nanovllm.fast.layers.rotary_attention import rotary_calls
from nanovllm.fast.layers.stacked_layers import compile_calls_of, may_stack_layers
from nanovllm.features.costs.buckets import MIN_ROWS, Buckets, GraphShape
from nanovllm.features.engine_config import EngineConfig
from nanovllm.model import ModelBinding
from nanovllm.models import experts


def compile_ahead(binding: ModelBinding, config: EngineConfig) -> None:
    """Compile the kernels of layers, decodes, draws and options, and import PyTorch's compiler where layers need it.

    Args:
        config: options with block size and limits resolved.
    """
    assert config.block_size is not None and config.max_num_seqs is not None
    cuda_calls = _cuda_calls(binding, config.block_size, config.max_num_seqs)
    call_apart([partial(on_device, binding.device, call) for call in cuda_calls])
    shape = GraphShape(MIN_ROWS, MIN_ROWS, 0)
    features = SampleInputs(), RowInputs(), TableInputs(config.block_size)
    packing = StepPacking(shape, MIN_ROWS, features)
    with torch.inference_mode(False):  # tensors made in a caller's inference mode could be written to only there
        inputs = packing.views(torch.zeros(packing.num_words + MIN_ROWS, dtype=torch.int32, device=binding.device))
        around = (
            kernel_layer_calls(binding.layer_modules, binding.layers, MIN_ROWS) if may_stack_layers(binding) else []
        )
        calls = [  # the longest first
            *([] if around else [_start_compiler]),
            *_decode_calls(binding, config.block_size, Buckets(config).max_decodes, inputs),
            *option_calls(binding.vocab_size, binding.dtype, binding.device),
            *_layer_calls(binding, MIN_ROWS),
            *around,
        ]
    with DEVICE_LOCK, collector_paused():  # the compiler's imports would trigger collections
        call_together([partial(on_device, binding.device, call) for call in calls])


def _start_compiler() -> None:
    """Import PyTorch's compiler and start its compile worker processes."""
    from torch._inductor import compile_fx  # noqa: F401
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.use_process_pool()


def _decode_calls(binding: ModelBinding, block_size: int, max_decodes: int, inputs: Any) -> list[Callable[[], Any]]:
    """Decode attention for few rows, where a second kernel merges split outputs, and for many."""
    device = binding.device
    calls: list[Callable[[], Any]] = []
    tables = inputs.tables, inputs.decode_tables, inputs.decode_blocks, inputs.decode_positions
    for layer in layers_by_kind(binding.layers):
        decodes = KernelOptions.for_layer(layer, device, block_size).decode_kernel(max_decodes, device)
        if decodes is None:
            continue
        traits = layer.traits
        query = torch.zeros(max_decodes, traits.num_heads, traits.head_dim, dtype=layer.dtype, device=device)
        sizes = block_size, traits.num_kv_heads
        dtype = layer.cache_dtype or layer.dtype
        caches = [torch.zeros(*sizes, width, dtype=dtype, device=device) for width in layer.row_widths]
        sinks = query.new_zeros(traits.num_heads) if traits.has_sinks else None
        calls.append(partial(decodes.fill, *tables))
        for count in (MIN_ROWS, max_decodes):
            calls.append(partial(decodes.attend, query[:count], *caches, layer.scaling, None, sinks))
        if decodes.wide_members and max_decodes >= decodes.least_wide:
            calls += _wide_calls(decodes, tables, query, caches)
    return calls


def _wide_calls(decodes: Any, tables: tuple[Any, ...], query: Tensor, caches: list[Tensor]) -> list[Callable[[], Any]]:
    """Wide programs without work, and the cut of contexts with them."""
    nothing = query.new_zeros(MIN_ROWS, WIDE_NUMBERS, dtype=torch.int32)
    parts = nothing.view(-1)[:MIN_ROWS]
    bundles = nothing[:, :BUNDLE_NUMBERS].contiguous()
    wide = copy(decodes)  # other threads call the kernels without wide groups
    fill = partial(wide.fill, *tables, (parts, parts, bundles[:0], parts, nothing))
    return [fill, *(partial(decodes.attend_wide, query, *caches, 1.0, nothing, merges=each) for each in (False, True))]


def _cuda_calls(binding: ModelBinding, block_size: int, max_num_seqs: int) -> list[Callable[[], Any]]:
    """Kernels in CUDA C++: stacked layers, all between two layers' attention, attention of prompts."""
    calls: list[Callable[[], Any]] = []
    if may_stack_layers(binding):
        layers = binding.layer_modules, binding.layers, binding.device
        calls += [*compile_calls_of(*layers, block_size), *dense_layer_compilations(*layers, max_num_seqs)]
    for layer in layers_by_kind(binding.layers):
        if (compile_prompts := KernelOptions.for_layer(layer, binding.device, block_size).compile_prompts) is not None:
            calls.append(compile_prompts)
    return calls + few_experts.kernel_calls(binding.model)


def _layer_calls(binding: ModelBinding, num_rows: int) -> list[Callable[[], Any]]:
    """Kernels of merged linears and fused attention, for `num_rows` rows."""
    calls = [*kernel_calls(binding.model, num_rows), *experts.kernel_calls(binding.model, num_rows)]
    if not binding.mixers:  # a model with mixers runs attention layers uncompiled
        calls += rotary_calls(binding.layers[0], find_kernel("rotary", "rotate_and_store"), num_rows)
    return calls
