"""Layouts of integers in words of 32 bits: of compressed-tensors, GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.errors import UnsupportedModelError
from nanovllm.models.quantised.layout import (
    FLOATS,
    Block,
    Layout,
    Shape,
    Taken,
    Tensors,
    Weight,
    WrongValuesError,
    block_of,
)
from nanovllm.models.quantised.rows import RowFormat, as_nibbles, nibbles

_WORD = 32


def of_words(weight: Weight, sizes: Sequence[int], blocks_of: Callable[[int], list[Block]]) -> Layout:
    """Layout of compressed-tensors: neighbours of a row, the first in a word's lowest bits; zero points of a column.

    Args:
        sizes: bits that a weight may have.
        blocks_of: possible blocks of weights of so many bits.
    """
    weight.need("values", "scales", optional=("zeros", "shape", "groups"))
    shape, bits = _shape_of(weight, sizes)
    block = block_of(weight, shape, blocks_of(bits))
    has_zeros = "zeros" in weight.parts
    if has_zeros:
        weight.dtype_of("zeros", "I32")
        weight.shape_of("zeros", (-(-shape[0] * bits // _WORD), -(-shape[1] // block[1])))
    is_odd = bits not in (4, 8) or shape[1] % 2 == 1

    def take(given: Tensors) -> Taken:
        values = given["values"].view(torch.uint8)[:, : shape[1] * bits // 8]
        zeros = _unpacked(given["zeros"].T, bits, shape[0]).T if has_zeros else None
        if is_odd:
            values = _unpacked(given["values"], bits, shape[1])
            zeros = torch.full_like(given["scales"], 1 << bits - 1) if zeros is None else zeros
        return values, given["scales"], zeros

    found = _of_integers(weight, shape, block, 0 if is_odd else bits, take, has_zeros=has_zeros or is_odd)
    return replace(found, rounded=found.form.scales)


def _shape_of(weight: Weight, sizes: Sequence[int]) -> tuple[Shape, int]:
    """(rows and width of the plain weight, bits of its integers)."""
    rows, words = weight.shape_of("values")
    stored = [rows, words * _WORD // max(*sizes, 1)]
    if "shape" in weight.parts:
        stored = weight.read(weight.parts["shape"]).tolist()
    for bits in sizes:
        if stored[:-1] == [rows] and -(-stored[1] * bits // _WORD) == words:
            return (rows, stored[1]), bits
    raise weight.misfit("values", f"{stored} integers of {' or '.join(map(str, sizes))} bits are other words")


def of_columns(weight: Weight, settings: Mapping[str, Any]) -> Layout:
    """Layout of weights [width, rows]: GPTQ packs neighbours of a column in words, AWQ of a row, interleaved."""
    is_awq = settings["quant_method"] == "awq"
    bits = settings.get("bits") or settings.get("w_bit") or 4
    version = str(settings.get("version", "gemm")).lower()
    if bits not in ((4,) if is_awq else (4, 8)) or (version != "gemm" and is_awq):
        raise UnsupportedModelError(
            f"{weight.name} is of {settings['quant_method']} of {bits} bits, version {version}, which has no layout "
            "here. Take a checkpoint of 4 bits, of AWQ in version gemm."
        )
    shape, num_runs = _shape_of_columns(weight, _WORD // bits, by_rows=is_awq)
    has_zeros = bits == 4 or settings.get("sym", True) is not True
    # The first version of GPTQ's files holds zero points less one.
    offset = 0 if is_awq or settings.get("checkpoint_format") == "gptq_v2" else 1

    def take(given: Tensors) -> Taken:
        zeros = _unpacked(given["zeros"], bits, shape[0])
        if is_awq:
            values = as_nibbles(_in_order(_unpacked(given["values"], bits, shape[0])).T)
            zeros = _in_order(zeros)
        else:
            values = given["values"].T.contiguous().view(torch.uint8)
        if not has_zeros and (zeros + offset != 128).any():
            raise WrongValuesError("zeros", "zero points other than 128, but the config says that there are none (sym)")
        return values, given["scales"].T, (zeros + offset).T

    return _of_integers(weight, shape, (1, shape[1] // num_runs), bits, take, has_zeros=has_zeros)


def _shape_of_columns(weight: Weight, in_word: int, *, by_rows: bool) -> tuple[Shape, int]:
    """(rows and width of the plain weight, runs of a row)."""
    weight.need("values", "zeros", "scales", optional=("groups",))
    weight.dtype_of("values", "I32")
    weight.dtype_of("zeros", "I32")
    num_runs, rows = (*weight.shape_of("scales"), 0, 0)[:2]
    words = (*weight.shape_of("values"), 0)[0]
    weight.shape_of("values", (words, rows // in_word if by_rows else rows))
    weight.shape_of("zeros", (num_runs, rows // in_word))
    width = words if by_rows else words * in_word
    if num_runs == 0 or width % num_runs:
        raise weight.misfit("scales", f"{num_runs} scales of an output do not divide its {width} inputs")
    return (rows, width), num_runs


def _in_order(codes: Tensor) -> Tensor:
    """AWQ's eight outputs of a word in their order: it stores 0, 2, 4, 6, 1, 3, 5, 7."""
    return codes.unflatten(1, (-1, 8))[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)


def _of_integers(
    weight: Weight, shape: Shape, block: Block, bits: int, take: Callable[[Tensors], Taken], *, has_zeros: bool
) -> Layout:
    """Whole numbers from 0 on, less a zero point; without one, less the half of their range.

    Args:
        bits: 4 for two numbers a byte, else one.
    """
    width = shape[1]
    if width % block[1]:
        raise weight.misfit("scales", f"{width} inputs are no whole groups of {block[1]}")
    encoding = "uint4" if bits == 4 else "uint8" if has_zeros else "int8"
    form = RowFormat(encoding, width, block[1], FLOATS[weight.dtype_of("scales", *FLOATS)], has_zeros)

    def signed(given: Tensors) -> Taken:
        values, scales, _ = take(given)
        return values ^ 128, scales, None

    order = _order_of(weight, width, width // block[1])
    return Layout(form, shape, block, signed if encoding == "int8" else take, order)


def _unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """[num_rows, words] int32 -> [num_rows, count] uint8, the lowest bits first."""
    values = words.contiguous().view(torch.uint8)
    if bits == 4:
        return nibbles(values)[:, :count]
    each = (values[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)[:, : count * bits]
    return (each.unflatten(1, (count, bits)) << torch.arange(bits, dtype=torch.uint8)).sum(2, dtype=torch.uint8)


def _order_of(weight: Weight, width: int, num_runs: int) -> Tensor | None:
    """Inputs sorted by their groups, which become neighbours; None if they are already, as without act-order."""
    if "groups" not in weight.parts:
        return None
    weight.shape_of("groups", (width,))
    groups = weight.read(weight.parts["groups"])
    if (groups < 0).all():  # -1 before a calibration
        return None
    order = torch.argsort(groups.long(), stable=True)
    if not torch.equal(groups[order].long(), torch.arange(num_runs).repeat_interleave(width // num_runs)):
        raise weight.misfit("groups", f"the inputs are not in {num_runs} groups of {width // num_runs} each")
    return None if torch.equal(order, torch.arange(width)) else order
