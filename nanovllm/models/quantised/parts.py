"""The form in which kernels take quantised weights of all formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


class QuantisedParts(NamedTuple):
    """A quantised weight in one layout for all formats.

    Element k of a row is values[k] * scales[run] + minima[run], exact in float32 until the last rounding; a run is
    in_features / runs neighbouring elements. Zero points are subtracted from values; units multiply a row's scales.

    Attributes:
        values: [out_features, in_features] int8, or uint8 with num_bits used, or codes of floats in uint8.
        scales, minima: [out_features, runs] float16 or float32; minima only with uint8.
        num_bits: 8 for int8, else 4 or 5.
        zeros: [out_features, runs] uint8, in place of minima.
        units: [out_features, 1] float32.
        is_float: True if values are codes: of 4 bits (e2m1), with scales in bfloat16 that are half of theirs, or of 8
            (e4m3).
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None
    num_bits: int = 8
    zeros: Tensor | None = None
    units: Tensor | None = None
    is_float: bool = False

    def with_minima(self) -> QuantisedParts:
        """The same with minima in place of zero points."""
        if self.zeros is None:
            return self
        scales = self.scales.float()
        return self._replace(scales=scales, minima=-scales * self.zeros.float(), zeros=None)

    def joined(self, others: Sequence[QuantisedParts], join: Callable[[list[Tensor]], Tensor]) -> QuantisedParts:
        """This and other weights of its format, joined by outputs."""
        parts = [self, *others]
        if any(part.zeros is None for part in parts):
            parts = [part.with_minima() for part in parts]

        def joined(tensors: list[Tensor | None]) -> Tensor | None:
            found = [tensor for tensor in tensors if tensor is not None]
            return join(found) if found else None

        return parts[0]._replace(
            values=join([part.values for part in parts]),
            scales=join([part.scales for part in parts]),
            minima=joined([part.minima for part in parts]),
            zeros=joined([part.zeros for part in parts]),
            units=joined([part.units for part in parts]),
        )
