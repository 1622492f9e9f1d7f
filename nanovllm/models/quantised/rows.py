"""Rows of quantised weights as checkpoints in the format of `transformers` store them.

    unit (float32, of some) | scales of the runs | zero points, a byte a run (of some) | values

A run is a number of neighbouring weights with one scale: a group, a block's width, or the whole row. Nothing is
rounded: values, scales and zero points are those of the file, in the widths of the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nanovllm.models.quantised.parts import QuantisedParts

# Twice the numbers of 4-bit floats (e2m1), by code: whole numbers, so that kernels multiply them as bytes.
DOUBLED_FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_BITS = {"int8": 8, "uint8": 8, "uint4": 4, "float8": 8, "float8_e5m2": 8, "float4": 4}  # a value's, by encoding
_RUN_OF_KERNELS = 32
_LONG_RUN = 128  # a run of 8-bit floats
_ZERO_OF_SIGNED = 8  # zero point of nibbles that are stored without one
EXPONENTS = torch.uint8  # dtype of scales that are powers of two (e8m0): 2^(byte - 127)


@dataclass(frozen=True)
class RowFormat:
    """Layout of a row.

    Attributes:
        values: "int8", "uint8" or "uint4" (minus a zero point), "float8" (e4m3), "float8_e5m2" or "float4" (e2m1). Of
            two in a byte the first has the lower half.
        width: weights of a row.
        run: neighbours with one scale; divides the width.
        scales: dtype of the scales; EXPONENTS for powers of two.
        has_zeros: True if each run has a zero point.
        unit: operation of the row's unit on its scales, "times" or "over"; "" for rows without one.
    """

    values: str
    width: int
    run: int
    scales: torch.dtype
    has_zeros: bool = False
    unit: str = ""

    @property
    def num_runs(self) -> int:
        return self.width // self.run

    @cached_property
    def _sizes(self) -> tuple[int, int, int, int]:
        """Bytes of each part."""
        unit = 4 if self.unit else 0
        zeros = self.num_runs if self.has_zeros else 0
        return unit, self.num_runs * self.scales.itemsize, zeros, self.width * _BITS[self.values] // 8

    @property
    def row_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def value_bytes(self) -> int:
        return self._sizes[3]

    @property
    def name(self) -> str:
        """Every field, as the name of a kind."""
        dtype = "e8m0" if self.scales == EXPONENTS else str(self.scales).removeprefix("torch.")
        extras = ("", " with zeros")[self.has_zeros] + (f" {self.unit} a unit" if self.unit else "")
        return f"{self.values} x {self.width} in runs of {self.run} with scales in {dtype}{extras}"

    def in_features(self, row_bytes: int) -> int:
        """The width; raises ValueError for rows of another size."""
        if row_bytes != self.row_bytes:
            raise ValueError(f"rows of {row_bytes} bytes are not {self.name}, which takes {self.row_bytes}.")
        return self.width

    def why_not_split(self, start: int, stop: int) -> str:
        """Description of a run that these weights of a row cut; "" without one."""
        is_whole = self.run == self.width or (start % self.run == 0 and stop % self.run == 0)
        return "" if is_whole else f"weights {start} to {stop} of {self.width} are no whole runs of {self.run}"

    def bytes_of(self, start: int, stop: int) -> list[slice]:
        """Bytes of a row that hold some of its weights, which must be whole runs."""
        unit, scales, zeros, values = self._sizes
        runs = (0, 1) if self.run == self.width else (start // self.run, stop // self.run)
        found = [slice(0, unit)]
        at = unit
        for size, (first, last), count in (
            (scales, runs, self.num_runs), (zeros, runs, self.num_runs), (values, (start, stop), self.width)
        ):  # fmt: skip
            found.append(slice(at + size * first // count, at + size * last // count))
            at += size
        return found

    def join(self, values: Tensor, scales: Tensor, zeros: Tensor | None = None, unit: Tensor | None = None) -> Tensor:
        """Blocks [num_rows, bytes a row] of the parts.

        Args:
            values: [num_rows, ...] of any dtype, in the bytes of the format.
            scales: [num_rows or 1, num_runs or 1].
            zeros: [num_rows, num_runs] of whole numbers from 0 to 255.
            unit: one number.
        """
        rows = len(values)
        parts = [scales.expand(rows, self.num_runs), values]
        if zeros is not None:
            parts.insert(1, zeros.to(torch.uint8))
        if unit is not None:
            parts.insert(0, unit.float().reshape(1, 1).expand(rows, 1))
        return torch.cat([part.contiguous().view(torch.uint8).view(rows, -1) for part in parts], dim=1)

    def weights(self, blocks: Tensor) -> Tensor:
        """[num_rows, width] float32, dequantised."""
        unit, scales, zeros, values = self._split(blocks)
        numbers = self._numbers(values).unflatten(1, (self.num_runs, self.run))
        if zeros is not None:
            numbers -= zeros[..., None].float()
        return numbers.mul_(self._scales_of(unit, scales)[..., None]).flatten(1)

    def _split(self, blocks: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor]:
        unit, scales, zeros, values = blocks.split(self._sizes, dim=1)
        return (
            unit.contiguous().view(torch.float32) if self.unit else None,
            scales.contiguous().view(self.scales),
            zeros if self.has_zeros else None,
            values.contiguous(),
        )

    def _numbers(self, values: Tensor) -> Tensor:
        """Values as float32, before the scale; whole ones less a zero point of 8 where none is stored."""
        if self.values == "int8":
            return values.view(torch.int8).float()
        if self.values == "uint8":
            return values.float()
        if self.values == "float8":
            return values.view(torch.float8_e4m3fn).float()
        if self.values == "float8_e5m2":
            return values.view(torch.float8_e5m2).float()
        if self.values == "float4":
            numbers = 0.5 * torch.tensor(DOUBLED_FLOAT4, dtype=torch.float32, device=values.device)
            pairs = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), dim=1)  # two numbers a byte
            return pairs.index_select(0, values.flatten().int()).view(len(values), -1)
        return nibbles(values).float().sub_(0 if self.has_zeros else _ZERO_OF_SIGNED)

    def _scales_of(self, unit: Tensor | None, scales: Tensor) -> Tensor:
        """[num_rows, num_runs] float32, units included."""
        if self.scales == EXPONENTS:
            bits = scales.int() << 23
            return torch.where(bits == 0, 1 << 22, bits).view(torch.float32)  # 2^-127 is subnormal
        numbers = scales.float()
        if unit is not None:
            numbers = numbers * unit if self.unit == "times" else numbers / unit
        return numbers

    @property
    def has_kernel(self) -> bool:
        """Whether CPU kernels multiply the format."""
        if self.values in ("int8", "float8"):
            least = 16 if self.values == "int8" else _RUN_OF_KERNELS
            return not self.has_zeros and (self.run == self.width or self.run % least == 0)
        if self.values == "float4":
            return self.run in (16, 32)
        return self.values == "uint4" and self.run % _RUN_OF_KERNELS == 0

    def parts(self, blocks: Tensor) -> QuantisedParts:
        """Parts for the kernels; `has_kernel` must hold."""
        unit, stored, zeros, values = self._split(blocks)
        if self.values == "float4":
            return self._float4_parts(unit, stored, values)
        scales = self._scales_of(unit, stored)
        if self.values == "float8":
            run = self.run if self.run == self.width else _LONG_RUN if self.run % _LONG_RUN == 0 else _RUN_OF_KERNELS
            return QuantisedParts(values, self._in_runs(scales, run), None, is_float=True)
        if self.values == "int8" and self.run == self.width:
            return QuantisedParts(values.view(torch.int8), scales, None)
        halves = scales.half()
        is_exact = torch.equal(halves.float(), scales) and bool((halves * _ZERO_OF_SIGNED).isfinite().all())
        scales = halves if is_exact else scales
        if self.values == "int8":
            run = _RUN_OF_KERNELS if is_exact and self.run % _RUN_OF_KERNELS == 0 else 16
            return QuantisedParts(
                values.view(torch.int8), self._in_runs(scales if run > 16 else scales.float(), run), None
            )
        if zeros is None:
            minima = self._in_runs(-_ZERO_OF_SIGNED * scales, _RUN_OF_KERNELS)  # exact, unless it overflows
            parts = QuantisedParts(nibbles(values), self._in_runs(scales, _RUN_OF_KERNELS), minima, 4)
        else:
            zeros, scales = (self._in_runs(each, _RUN_OF_KERNELS) for each in (zeros, scales))
            parts = QuantisedParts(nibbles(values), scales, None, 4, zeros=zeros)
            parts = parts if is_exact else parts.with_minima()
        return parts

    def _float4_parts(self, unit: Tensor | None, stored: Tensor, values: Tensor) -> QuantisedParts:
        """Numbers are doubled, so scales are half of theirs: powers of two and e4m3, which bfloat16 holds."""
        halves = self._scales_of(None, stored).mul_(0.5).bfloat16()
        units = unit
        if self.run == 16 and units is None:
            units = torch.ones(len(stored), 1, device=stored.device)
        elif units is not None and self.unit == "over":
            units = torch.where(units == 0, 0, 1 / units)  # 0 in rows of padding
        return QuantisedParts(nibbles(values), halves, None, 4, units=units, is_float=True)

    def _in_runs(self, factors: Tensor, run: int) -> Tensor:
        """Factors of shorter runs."""
        return factors.repeat_interleave(self.run // run, dim=1)


def nibbles(values: Tensor) -> Tensor:
    """[num_rows, bytes] -> [num_rows, 2 * bytes] uint8: of each byte the lower half, then the upper one."""
    return torch.stack((values & 15, values >> 4), dim=-1).flatten(1)


def as_nibbles(codes: Tensor) -> Tensor:
    """The inverse of `nibbles`, of an even number of uint8 codes from 0 to 15."""
    return codes[:, ::2] | codes[:, 1::2] << 4
