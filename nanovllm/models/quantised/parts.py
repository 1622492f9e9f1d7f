"""The form in which kernels take quantised weights of all formats."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class QuantisedParts(NamedTuple):
    """A quantised weight in one layout for all formats.

    Element k of a row is values[k] * scales[run] + minima[run], exact in float32 until the last rounding; a run is
    in_features / runs neighbouring elements.

    Attributes:
        values: [out_features, in_features] int8, or uint8 with num_bits used.
        scales, minima: [out_features, runs] float16 or float32; minima only with uint8.
        num_bits: 8 for int8, else 4 or 5.
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None
    num_bits: int = 8
