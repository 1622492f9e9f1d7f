"""Layouts of a checkpoint's quantised weights, by its format.

A weight's tensors decide, and the config only where they leave a choice: so each weight of a mixed checkpoint has its
own layout. All is decided by headers, before a weight is read. Values times scales are those of `transformers` and
`compressed-tensors`, bit for bit, where these read the same format right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from nanovllm.errors import ModelLoadError
from nanovllm.models.quantised.layout import (
    FLOATS,
    MX_BLOCK,
    Block,
    Layout,
    Taken,
    Tensors,
    Weight,
    as_stored,
    block_of,
    unit_of,
)
from nanovllm.models.quantised.packed_integers import of_columns, of_words
from nanovllm.models.quantised.rows import EXPONENTS, RowFormat

FP8 = ("F8_E4M3", "F8_E5M2")
_ENCODINGS = {"F8_E4M3": "float8", "F8_E5M2": "float8_e5m2", "I8": "int8"}
_SCALES = FLOATS | {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": EXPONENTS, "U8": EXPONENTS
}  # fmt: skip
_NVFP4_BLOCK = (1, 16)
_COMPRESSED_FORMATS = {
    "dense", "mixed-precision", "float-quantized", "naive-quantized", "int-quantized", "pack-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
}  # fmt: skip

LayoutOf = Callable[[Weight], Layout]


def layouts_of(source: Any, settings: Mapping[str, Any]) -> LayoutOf:
    """Function that finds the layout of a weight of a checkpoint.

    Args:
        source: the checkpoint, as messages name it.
        settings: its `quantization_config`.

    Raises ModelLoadError for settings that contradict themselves. The function raises it for tensors that contradict
    each other, and UnsupportedModelError for those of no layout.
    """
    try:
        return _layouts_of(settings)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"the quantization_config of {source} is not understood: {error!r}. Take another checkpoint of the model."
        ) from None


def _layouts_of(settings: Mapping[str, Any]) -> LayoutOf:
    method = settings["quant_method"]
    if any((settings.get("transform_config") or {}).values()):
        raise ValueError("transform_config rotates the inputs, which is not done here")
    if method == "compressed-tensors":
        schemes = _schemes_of(settings)
        return lambda weight: _of_compressed(weight, schemes)
    if method in ("gptq", "awq"):
        return lambda weight: of_columns(weight, settings)
    if method == "mxfp4":
        return _of_experts
    height, run = settings.get("weight_block_size", (128, 128)) or (0, 0)
    if type(height) is not int or type(run) is not int or min(height, run) < 0:
        raise ValueError(f"weight_block_size {[height, run]} is no pair of sizes")
    return lambda weight: _of_bytes(weight, (height, run))


# ------------------------------------------------------------------------------- fp8, mxfp8, fbgemm_fp8, modelopt


def _of_bytes(weight: Weight, block: Block) -> Layout:
    """Values of 8 bits [..., rows, width], or of 4 bits in pairs a byte, with a scale a block, a row, or a weight."""
    weight.need("values", "scales", optional=("unit",))
    if weight.dtype_of("values", *FP8, "I8", "U8") not in FP8:
        return _of_float4(weight, "times")
    return _of_numbers(weight, [block, (1, 0), (0, 0)], "times")


def _of_numbers(weight: Weight, blocks: Sequence[Block], operation: str = "") -> Layout:
    """Values of 8 bits: floats, or integers without a zero point or with one for each scale.

    Args:
        blocks: possible ones; a size of 0 is the weight's own.
    """
    shape = weight.shape_of("values")
    encoding = _ENCODINGS[weight.dtype_of("values", *_ENCODINGS)]
    scales = weight.dtype_of("scales", *_SCALES)
    block = block_of(weight, shape, blocks)
    has_zeros = encoding == "int8" and "zeros" in weight.parts
    if has_zeros:
        weight.dtype_of("zeros", "I8")
        weight.shape_of("zeros", weight.shape_of("scales"))
        encoding = "uint8"
    run = math.gcd(shape[-1], block[1])  # a row's last block may be a part
    form = RowFormat(encoding, shape[-1], run, _SCALES[scales], has_zeros, unit_of(weight, operation))

    def shifted(given: Tensors) -> Taken:
        return given["values"].view(torch.uint8) ^ 128, given["scales"], given["zeros"].short() + 128

    return Layout(form, shape, block, shifted if has_zeros else as_stored)


def _of_float4(weight: Weight, operation: str = "") -> Layout:
    """4-bit floats, two in a byte: MXFP4, or NVFP4 with a global scale for the runs' scales."""
    weight.dtype_of("values", "U8", "I8")
    scales = _SCALES[weight.dtype_of("scales", "F8_E8M0", "U8", "F8_E4M3")]
    weight.need("values", "scales", *(() if scales == EXPONENTS else ("unit",)))
    block = MX_BLOCK if scales == EXPONENTS else _NVFP4_BLOCK
    *rows, runs = (*weight.shape_of("scales"),) or (0,)
    width = runs * block[1]
    weight.shape_of("values", (*rows, width // 2), (*rows, runs, block[1] // 2))
    form = RowFormat("float4", width, block[1], scales, unit=unit_of(weight, operation))
    return Layout(form, (*rows, width), block, as_stored)


def _of_experts(weight: Weight) -> Layout:
    """GPT-OSS's experts in MXFP4, a run in 16 bytes; the plain weights are [num_experts, inputs, outputs]."""
    return replace(_of_float4(weight), is_transposed=True)


# --------------------------------------------------------------------------------------------- compressed-tensors


class Scheme(NamedTuple):
    """Weights of a group of the config; a size of 0 in a block is the weight's own."""

    num_bits: int
    is_symmetric: bool
    block: Block


def _schemes_of(settings: Mapping[str, Any]) -> list[Scheme]:
    groups = (settings.get("config_groups") or {}).values()
    for form in (settings.get("format"), *(group.get("format") for group in groups)):
        if form is not None and form not in _COMPRESSED_FORMATS:
            raise ValueError(f"format {form!r} is not read here, but {', '.join(sorted(_COMPRESSED_FORMATS))}")
    return [_scheme_of(group["weights"]) for group in groups if group.get("weights")]


def _scheme_of(weights: Mapping[str, Any]) -> Scheme:
    size = weights.get("group_size") or 0
    strategy = weights.get("strategy") or ("group" if size > 0 else "channel" if size else "tensor")
    if strategy == "block":
        block = tuple(map(int, weights["block_structure"]))
    else:
        block = {"tensor": (0, 0), "channel": (1, 0)}.get(strategy, (1, size))
    return Scheme(int(weights["num_bits"]), weights.get("symmetric", True), (block[0], block[1]))


def _of_compressed(weight: Weight, schemes: list[Scheme]) -> Layout:
    weight.need("values", "scales", optional=("zeros", "unit", "shape", "groups"))
    dtype = weight.dtype_of("values", "I8", "I32", "U8", *FP8)
    if dtype == "I32":
        sizes = [scheme.num_bits for scheme in schemes]
        return of_words(weight, sizes, lambda bits: _blocks_of(weight, schemes, bits))
    if weight.parts["values"].name.endswith("_packed"):
        _blocks_of(weight, schemes, 4)
        return replace(_of_float4(weight, "over"), rounded=torch.bfloat16)
    found = _of_numbers(weight, _blocks_of(weight, schemes, 8))
    return replace(found, rounded=FLOATS.get(weight.parts["scales"].dtype))


def _blocks_of(weight: Weight, schemes: list[Scheme], bits: int) -> list[Block]:
    """Blocks that weights of so many bits may have; raises ModelLoadError if there is none."""
    found = [scheme for scheme in schemes if scheme.num_bits == bits]
    if not found:
        raise weight.misfit("values", f"no group of the quantization_config has weights of {bits} bits")
    if not any(scheme.is_symmetric for scheme in found):
        weight.need("zeros", optional=[*weight.parts])
    return [scheme.block for scheme in found]
