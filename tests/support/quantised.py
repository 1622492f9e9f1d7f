"""Quantised weights made of random bytes."""

import math

import torch

from nanovllm.models.quantised.blocks import FORMATS, QuantisedLinear
from nanovllm.models.quantised.rows import EXPONENTS, RowFormat

# Where the float16 scales of a block lie, by kind.
_SCALES = {
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def random_blocks(kind, num_rows, in_features, *, seed=0):
    """[num_rows, bytes a row] uint8: random bits, and scales of the size of a model's."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (num_rows, FORMATS[kind].row_bytes(in_features)), generator=generator).to(torch.uint8)
    if kind == "int8":
        scales = 0.001 + 0.001 * torch.rand(num_rows, 1, generator=generator)
        blocks[:, :4] = scales.view(torch.uint8)
        return blocks
    each = blocks.view(-1, FORMATS[kind].num_bytes)
    for at in _SCALES[kind]:
        scales = (0.01 + 0.01 * torch.rand(len(each), 1, generator=generator)) / (16 if kind.endswith("K") else 1)
        if at == 2 and kind in ("Q4_1", "Q5_1"):
            scales = (-8 if kind == "Q4_1" else -16) * scales  # so that values of both signs occur
        each[:, at : at + 2] = scales.half().view(torch.uint8)
    return blocks


# Formats of checkpoints' rows: (values, length of a run, 0 for the row, dtype of scales, zero points, unit).
ROWS = {
    "W8 rows": ("int8", 0, torch.bfloat16, False, ""),
    "W8 groups": ("int8", 128, torch.bfloat16, False, ""),
    "W4 groups": ("uint4", 64, torch.bfloat16, False, ""),
    "W4 zeros": ("uint4", 128, torch.float16, True, ""),
    "W4 exact zeros": ("uint4", 32, torch.float32, True, ""),
    "MXFP4": ("float4", 32, EXPONENTS, False, ""),
    "NVFP4": ("float4", 16, torch.float8_e4m3fn, False, "times"),
    "NVFP4 over": ("float4", 16, torch.float8_e4m3fn, False, "over"),
    "FP8 rows": ("float8", 0, torch.float32, False, ""),
    "FP8 blocks": ("float8", 128, torch.float32, False, ""),
    "MXFP8": ("float8", 32, EXPONENTS, False, ""),
}
KINDS = (*FORMATS, *ROWS)
_SIZES = {"int8": 0.002, "uint4": 0.02, "float4": 0.02, "float8": 0.0005}  # of scales


def random_layer(kind, num_rows, width, bias=None, *, dtype=torch.float32, seed=0):
    """A layer of one of KINDS: random bits, and scales of the size of a model's."""
    if kind in FORMATS:
        return QuantisedLinear(kind, random_blocks(kind, num_rows, width, seed=seed), bias, dtype=dtype)
    values, run, scales, has_zeros, unit = ROWS[kind]
    form = RowFormat(values, width, min(run, width) or width, scales, has_zeros, unit)
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(256, (num_rows, form.value_bytes), generator=generator).to(torch.uint8)
    if values == "float8":
        bits[bits & 127 == 127] = 0  # no numbers
    factors = _SIZES[values] * (1 + torch.rand(num_rows, form.num_runs, generator=generator))
    whole = None
    if unit:
        whole = torch.tensor([0.01 if unit == "times" else 100.0])
        factors = 100 * factors
    if scales == EXPONENTS:
        factors = torch.randint(-3, 4, factors.shape, generator=generator) + int(127 + math.log2(_SIZES[values]))
    zeros = torch.randint(16, factors.shape, generator=generator) if has_zeros else None
    return QuantisedLinear(form, form.join(bits, factors.to(scales), zeros, whole), bias, dtype=dtype)


def exact_product(layer, rows):
    """Rows times the dequantised weight, and its bias, in float64."""
    product = rows.double() @ layer.dequantise().double().T
    return product if layer.bias is None else product + layer.bias.double()
