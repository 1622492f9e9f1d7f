"""Layouts of a checkpoint's quantised modules: which rows its tensors hold, decided by their names, dtypes and shapes.

A module's tensors decide, not the config's lists of targets and exceptions: so each module of a mixed checkpoint has
its own layout, and one without scales is plain. All is decided on tensors without memory, before a weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.errors import ModelLoadError
from nanovllm.models.quantised.rows import EXPONENTS, RowFormat, as_nibbles, nibbles

Tensors = Mapping[str, Tensor]  # a module's, by the last part of their names

# Names of a module's quantised tensors. Scales of activations are accepted and not read: activations stay as they are.
SUFFIXES = {
    "compressed-tensors": (
        "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale", "weight_shape",
        "weight_g_idx", "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
    ),
    "fp8": ("weight", "weight_scale_inv", "activation_scale"),
    "mxfp8": ("weight", "weight_scale_inv", "activation_scale"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "mxfp4": ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
}  # fmt: skip
_WORD = 32  # bits that packed integers share
_NVFP4_RUN = 16
_MXFP4_RUN = 32


class NoLayoutError(ValueError):
    """A module's tensors are of no layout that is kept; the message describes them."""


@dataclass(frozen=True)
class Layout:
    """Content of a module's tensors.

    Attributes:
        form: format of its rows.
        num_rows: outputs.
        blocks: the tensors as blocks [num_rows, bytes a row].
        order: [width], the input that each weight of a row multiplies; None for the inputs' own order.
        fault: description of wrong values, or None.
    """

    form: RowFormat
    num_rows: int
    blocks: Callable[[Tensors], Tensor]
    order: Tensor | None = None
    fault: Callable[[Tensors], str | None] = lambda tensors: None


def settings_of(quantisation: Any) -> dict[str, Any]:
    """A config's `quantization_config` as a dict of plain values."""
    return dict(quantisation if isinstance(quantisation, dict) else quantisation.to_dict())


def layout_of(settings: Mapping[str, Any], name: str, tensors: Tensors, width: int) -> Layout | None:
    """Layout of the module `name`; None if its weight is not quantised.

    Args:
        settings: the checkpoint's `quantization_config`.
        tensors: meta tensors, or with memory; one-dimensional ones have memory, since they may contradict others.
        width: inputs of the module.

    Raises ModelLoadError for tensors that contradict each other, NoLayoutError for those of another layout.
    """
    if tensors.keys() <= {"weight"}:
        return None
    if (projection := next(iter(tensors)).rpartition("_")[0]) in ("gate_up_proj", "down_proj"):
        return _of_expert_blocks(name, projection, tensors, width)
    if "weight_packed" in tensors:
        find = _of_packed_integers if tensors["weight_packed"].dtype == torch.int32 else _of_float4
    elif "weight_scale_2" in tensors:
        find = _of_float4
    elif "qweight" in tensors:
        find = _of_columns
    elif "weight" in tensors:
        find = _of_plain_values
    else:
        raise ModelLoadError(f"{name} has {', '.join(sorted(tensors))}, but no weight.")
    return find(settings, name, tensors, width)


def _need(name: str, tensors: Tensors, *suffixes: str) -> list[Tensor]:
    if missing := [suffix for suffix in suffixes if suffix not in tensors]:
        raise ModelLoadError(f"{name} has {', '.join(sorted(tensors))}, but no {missing[0]}.")
    return [tensors[suffix] for suffix in suffixes]


def _check(name: str, suffix: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelLoadError(
            f"{name}.{suffix} has the shape {list(tensor.shape)}, but its module's other tensors make it {list(shape)}."
        )


def _run_of(name: str, suffix: str, width: int, num_runs: int) -> int:
    if num_runs == 0 or width % num_runs:
        raise ModelLoadError(f"{name}.{suffix} has {num_runs} scales a row, which do not divide its {width} inputs.")
    return width // num_runs


def _of_packed_integers(settings: Mapping[str, Any], name: str, tensors: Tensors, width: int) -> Layout:
    """compressed-tensors' integers, neighbours of a row in words of 32 bits, the first in the lowest."""
    packed, scales = _need(name, tensors, "weight_packed", "weight_scale")
    if packed.dim() != 2:
        raise ModelLoadError(f"{name}.weight_packed has {packed.dim()} dimensions, not 2.")
    rows, words = packed.shape
    bits = next((bits for bits in range(1, 9) if -(-width * bits // _WORD) == words), None)
    if bits is None:
        raise ModelLoadError(f"{name}.weight_packed has {words} words a row, which hold no {width} integers.")
    if bits not in (4, 8) or width * bits % _WORD:
        raise NoLayoutError(f"{width} integers of {bits} bits in {words} words a row")
    zeros = tensors.get("weight_zero_point")
    num_runs = scales.shape[-1] if scales.dim() == 2 else 1
    run = _run_of(name, "weight_scale", width, num_runs)
    if scales.numel() > 1:
        _check(name, "weight_scale", scales, (rows, num_runs))
    if zeros is not None:
        _check(name, "weight_zero_point", zeros, (-(-rows * bits // _WORD), num_runs))
    _check_stored_shape(name, tensors, rows, width)
    order = _order_of(name, "weight_g_idx", tensors, width, num_runs)

    def blocks(given: Tensors) -> Tensor:
        values = given["weight_packed"].contiguous().view(torch.uint8)
        if order is not None:
            values = values[:, order] if bits == 8 else as_nibbles(nibbles(values)[:, order])
        found = given.get("weight_zero_point")
        points = None if found is None else _unpacked(found.T, bits)[:, :rows].T
        values = values ^ 128 if bits == 8 and points is None else values
        return form.join(values, given["weight_scale"].reshape(-1, num_runs), points)

    values = "uint4" if bits == 4 else "int8" if zeros is None else "uint8"
    form = RowFormat(values, width, run, scales.dtype, has_zeros=zeros is not None)
    return Layout(form, rows, blocks, order)


def _check_stored_shape(name: str, given: Tensors, rows: int, width: int) -> None:
    stored = given["weight_shape"].tolist() if "weight_shape" in given else [rows, width]
    if stored != [rows, width]:
        raise ModelLoadError(f"{name}.weight_shape is {stored}, but its module's weight is {[rows, width]}.")


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """[num_rows, words] int32 -> [num_rows, integers] uint8, the lowest bits first."""
    values = words.contiguous().view(torch.uint8)
    return nibbles(values) if bits == 4 else values


def _order_of(name: str, suffix: str, tensors: Tensors, width: int, num_runs: int) -> Tensor | None:
    """Inputs sorted by their groups, which become neighbours; None if they are already, as without act-order."""
    groups = tensors.get(suffix)
    if groups is None or (groups < 0).all():  # -1 before a calibration
        return None
    _check(name, suffix, groups, (width,))
    counts = torch.bincount(groups.clamp(min=0).long(), minlength=num_runs)
    if (groups < 0).any() or len(counts) > num_runs or (counts != width // num_runs).any():
        raise ModelLoadError(f"{name}.{suffix}: the inputs are not in {num_runs} groups of {width // num_runs} each.")
    order = torch.argsort(groups.long(), stable=True)
    return None if torch.equal(order, torch.arange(len(order), device=order.device)) else order


def _of_columns(settings: Mapping[str, Any], name: str, tensors: Tensors, width: int) -> Layout:
    """Weights [width, num_rows]: GPTQ packs neighbours of a column in words, AWQ of a row, interleaved."""
    is_awq = settings["quant_method"] == "awq"
    bits = int(settings.get("bits") or settings.get("w_bit") or 4)
    version = str(settings.get("version", "gemm")).lower()
    if bits not in ((4,) if is_awq else (4, 8)) or (version != "gemm" and is_awq):
        raise NoLayoutError(f"{settings['quant_method']} of {bits} bits{f', version {version}' if is_awq else ''}")
    packed, packed_zeros, scales = _need(name, tensors, "qweight", "qzeros", "scales")
    if scales.dim() != 2:
        raise ModelLoadError(f"{name}.scales has {scales.dim()} dimensions, not 2.")
    num_runs, rows = scales.shape
    in_word = _WORD // bits
    if rows % in_word or width % in_word:
        raise NoLayoutError(f"{rows} x {width} integers of {bits} bits, which are not of whole words")
    _check(name, "qweight", packed, (width, rows // in_word) if is_awq else (width // in_word, rows))
    _check(name, "qzeros", packed_zeros, (num_runs, rows // in_word))
    run = _run_of(name, "scales", width, num_runs)
    order = _order_of(name, "g_idx", tensors, width, num_runs)
    # The first version of GPTQ's files holds zero points less one.
    offset = 0 if is_awq or settings.get("checkpoint_format") == "gptq_v2" else 1
    is_symmetric = bits == 8 and settings.get("sym", True) is True

    def zeros_of(given: Tensors) -> Tensor:
        found = _unpacked(given["qzeros"], bits)
        return ((_in_order(found) if is_awq else found) + offset).T

    def blocks(given: Tensors) -> Tensor:
        if is_awq:
            values = as_nibbles(_in_order(_unpacked(given["qweight"], bits)).T)
        else:
            values = given["qweight"].T.contiguous().view(torch.uint8)
        if order is not None:
            values = values[:, order] if bits == 8 else as_nibbles(nibbles(values)[:, order])
        zeros = None if is_symmetric else zeros_of(given)
        return form.join(values ^ 128 if is_symmetric else values, given["scales"].T, zeros)

    def fault(given: Tensors) -> str | None:
        if is_symmetric and bool((zeros_of(given) != 128).any()):
            return f"{name}.qzeros holds zero points other than 128, but the config says that there are none (sym)"
        return None

    values = "uint4" if bits == 4 else "int8" if is_symmetric else "uint8"
    form = RowFormat(values, width, run, scales.dtype, has_zeros=not is_symmetric)
    return Layout(form, rows, blocks, order, fault)


def _in_order(codes: Tensor) -> Tensor:
    """AWQ's eight outputs of a word in their order: it stores 0, 2, 4, 6, 1, 3, 5, 7."""
    return codes.unflatten(1, (-1, 8))[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)


def _of_expert_blocks(name: str, projection: str, tensors: Tensors, width: int) -> Layout:
    """GPT-OSS's experts in MXFP4: blocks [num_experts, num_rows, num_runs, 16] bytes, and an exponent of each."""
    packed, scales = _need(name, tensors, f"{projection}_blocks", f"{projection}_scales")
    num_runs = width // _MXFP4_RUN
    rows = math.prod(scales.shape[:-1])
    _check(name, f"{projection}_blocks", packed, (*scales.shape[:-1], num_runs, _MXFP4_RUN // 2))
    _check(name, f"{projection}_scales", scales, (*scales.shape[:-1], num_runs))
    if width % _MXFP4_RUN or packed.dtype != torch.uint8 or scales.dtype != EXPONENTS:
        raise NoLayoutError(f"{width} inputs in {packed.dtype} with scales in {scales.dtype}")
    form = RowFormat("float4", width, _MXFP4_RUN, EXPONENTS)

    def blocks(given: Tensors) -> Tensor:
        return form.join(
            given[f"{projection}_blocks"].reshape(rows, -1), given[f"{projection}_scales"].reshape(rows, -1)
        )

    def fault(given: Tensors) -> str | None:
        has_nan = bool((given[f"{projection}_scales"] == 255).any())
        return f"{name}.{projection}_scales holds the exponent 255, which is no number" if has_nan else None

    return Layout(form, rows, blocks, fault=fault)


def _of_plain_values(settings: Mapping[str, Any], name: str, tensors: Tensors, width: int) -> Layout:
    """A weight of 8-bit integers or floats [num_rows, width], with scales of any shape."""
    weight = tensors["weight"]
    if "weight_scale_inv" in tensors and weight.dtype in (torch.int8, torch.uint8):
        return _of_float4(settings, name, tensors, width)
    encodings = {torch.int8: "int8", torch.float8_e4m3fn: "float8"}
    if weight.dtype not in encodings or weight.dim() != 2:
        raise NoLayoutError(f"a weight of {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}")
    suffix = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
    (scales,) = _need(name, tensors, suffix)
    rows = len(weight)
    _check(name, "weight", weight, (rows, width))
    height, run = _block_of(settings, name, suffix, scales, (rows, width))
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and (zeros.is_floating_point() or zeros.dtype == torch.float8_e4m3fn):
        zeros = None  # floats have none
    if zeros is not None:
        _check(name, "weight_zero_point", zeros, tuple(scales.shape))
    own_run = math.gcd(width, run)  # a row's last block may be a part
    encoding = encodings[weight.dtype] if zeros is None else "uint8"
    form = RowFormat(encoding, width, own_run, scales.dtype, has_zeros=zeros is not None)

    def spread(factors: Tensor) -> Tensor:
        """[num_rows, num_runs] of one for each block."""
        grid = factors.reshape(-(-rows // height), -1)
        wide = grid.repeat_interleave(run // own_run, dim=1)[:, : form.num_runs]
        return wide.repeat_interleave(height, dim=0)[:rows]

    def blocks(given: Tensors) -> Tensor:
        found = given["weight"].view(torch.uint8)
        if zeros is None:
            return form.join(found, spread(given[suffix]))
        return form.join(found ^ 128, spread(given[suffix]), spread(given["weight_zero_point"].short() + 128))

    def fault(given: Tensors) -> str | None:
        if encoding == "float8" and bool(((given["weight"].view(torch.uint8) & 127) == 127).any()):
            return f"{name}.weight holds values that are no numbers"
        has_nan = scales.dtype.itemsize == 1 and bool((given[suffix].view(torch.uint8) == 255).any())
        return f"{name}.{suffix} holds the exponent 255, which is no number" if has_nan else None

    return Layout(form, rows, blocks, fault=fault)


def _block_of(
    settings: Mapping[str, Any], name: str, suffix: str, scales: Tensor, shape: tuple[int, int]
) -> tuple[int, int]:
    """Rows and neighbours that share a scale."""
    rows, width = shape
    if scales.numel() == 1:
        return rows, width
    grid = (*scales.shape, 1)[:2]
    if scales.dim() <= 2 and grid[0] == rows:
        return 1, _run_of(name, suffix, width, grid[1])
    height, run = _block_size(settings) or (-(-rows // grid[0]), -(-width // grid[1]))
    _check(name, suffix, scales, (-(-rows // height), -(-width // run)))
    return height, run


def _block_size(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Block size by the settings, if they name one."""
    if size := settings.get("weight_block_size"):
        return int(size[0]), int(size[1])
    groups = (settings.get("config_groups") or {}).values()
    sizes = [(group.get("weights") or {}).get("block_structure") for group in groups]
    found = [tuple(size) for size in sizes if size]
    return found[0] if found else None


def _of_float4(settings: Mapping[str, Any], name: str, tensors: Tensors, width: int) -> Layout:
    """4-bit floats, two in a byte: MXFP4, or NVFP4 with a global scale for the runs' scales.

    compressed-tensors stores the reciprocal of the global scale, modelopt the scale itself.
    """
    values, suffix, unit, operation = "weight_packed", "weight_scale", "weight_global_scale", "over"
    if "weight_scale_2" in tensors:
        values, unit, operation = "weight", "weight_scale_2", "times"
    elif "weight_scale_inv" in tensors:  # experts of FP8 checkpoints
        values, suffix = "weight", "weight_scale_inv"
    packed, scales = _need(name, tensors, values, suffix)
    has_unit = scales.dtype == torch.float8_e4m3fn
    run = _NVFP4_RUN if has_unit else _MXFP4_RUN
    is_exponent = scales.dtype in (EXPONENTS, torch.float8_e8m0fnu)
    if packed.dtype not in (torch.int8, torch.uint8) or not (has_unit or is_exponent):
        raise NoLayoutError(f"4-bit floats in {packed.dtype} with scales in {scales.dtype}")
    if width % run:
        raise NoLayoutError(f"{width} inputs in runs of {run}")
    rows = len(packed)
    _check(name, values, packed, (rows, width // 2))
    _check(name, suffix, scales, (rows, width // run))
    form = RowFormat("float4", width, run, scales.dtype if has_unit else EXPONENTS, unit=operation if has_unit else "")
    if has_unit:
        (factor,) = _need(name, tensors, unit)
        if factor.numel() != 1 or not factor.isfinite() or factor == 0:
            raise ModelLoadError(f"{name}.{unit} is {factor.tolist()}; it must be one number other than 0.")

    def blocks(given: Tensors) -> Tensor:
        return form.join(given[values], given[suffix].view(form.scales), unit=given[unit] if has_unit else None)

    def fault(given: Tensors) -> str | None:
        has_nan = not has_unit and bool((given[suffix].view(torch.uint8) == 255).any())
        return f"{name}.{suffix} holds the exponent 255, which is no number" if has_nan else None

    return Layout(form, rows, blocks, fault=fault)
