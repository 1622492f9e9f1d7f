"""A step packed for one transfer to a GPU: the named arrays that each feature adds to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nanovllm.layout import BatchLayout


class StepInput(NamedTuple):
    """One array of a packed step; zeros where the feature writes nothing.

    sizes: size of each dimension: a number, or a count of the packed step with padding: "samples", "rows", "decodes",
        "pairs" (of decodes), "wide" (the decodes of a step with wide groups, else 0), "tiles", "chunk_rows". None, for
        the last array: one dimension with all words that are left.
    """

    name: str
    dtype: type[np.generic]  # int32, int64 or float32
    sizes: tuple[int | str, ...] | None


class HostStep(NamedTuple):
    """A step on the host, before its arrays are packed into one transfer.

    plan: plan of the attention backend.
    draws: `sampler.DrawInputs` of the device's draw; None if the host's sampler draws.
    num_decodes: rows of decodes, padding included; rows of chunks follow.
    """

    layout: BatchLayout
    plan: Any
    draws: Any
    num_decodes: int


class StepFeature:
    """Arrays that one feature adds to a packed step, read by their names on the host and on the device."""

    inputs: tuple[StepInput, ...]

    def num_more_words(self, layout: BatchLayout) -> int:
        """32-bit words of the array without sizes."""
        return 0

    def fill(self, to: Any, step: HostStep) -> None:
        """Write the step into the arrays of the packed step `to`, which hold zeros."""
        raise NotImplementedError
