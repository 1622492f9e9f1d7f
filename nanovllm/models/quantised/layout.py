"""A quantised weight in files, checked by headers, and the rows that its tensors hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.errors import ModelLoadError
from nanovllm.models.headers import StoredTensor
from nanovllm.models.quantised.rows import EXPONENTS, RowFormat, as_nibbles, nibbles

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MX_BLOCK = (1, 32)

Tensors = Mapping[str, Tensor]  # a weight's, by role
Shape = tuple[int, ...]
Block = tuple[int, int]  # rows and neighbours that share a scale
Taken = tuple[Tensor, Tensor, Tensor | None]


class WrongValuesError(Exception):
    """Values that are no numbers or contradict the config: the role of their tensor, and a description."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A quantised weight in files.

    Attributes:
        name: the plain weight's.
        parts: its tensors by role: values, scales, zeros, unit, shape, groups.
        read: reads a tensor; called for small ones alone.
    """

    name: str
    parts: Mapping[str, StoredTensor]
    read: Callable[[StoredTensor], Tensor]

    def need(self, *roles: str, optional: Sequence[str] = ()) -> None:
        """Raise ModelLoadError unless there are tensors of these roles, and of no others than the optional ones."""
        if missing := [role for role in roles if role not in self.parts]:
            raise ModelLoadError(
                f"{self.name} has no {missing[0]}, but {', '.join(map(str, self.parts.values()))}. The checkpoint is "
                "incomplete: fetch it again."
            )
        if unknown := [self.parts[role] for role in self.parts if role not in (*roles, *optional)]:
            raise ModelLoadError(
                f"{unknown[0]} of {unknown[0].path.name} is a part of {self.name} that is not understood here, and "
                "leaving it out would change the weight. Take another checkpoint of the model."
            )

    def shape_of(self, role: str, *wanted: Shape) -> Shape:
        """The shape of a part, one of those wanted, of any if there are none."""
        shape = self.parts[role].shape
        if wanted and shape not in wanted:
            raise self.misfit(role, f"its shape would be {' or '.join(str(list(each)) for each in wanted)}")
        return shape

    def dtype_of(self, role: str, *wanted: str) -> str:
        dtype = self.parts[role].dtype
        if dtype not in wanted:
            raise self.misfit(role, f"it is stored in {dtype}, and its format has {' or '.join(wanted)}")
        return dtype

    def misfit(self, role: str, what: str) -> ModelLoadError:
        """The error for a tensor that contradicts the others or the config."""
        tensor = self.parts[role]
        others = [str(other) for each, other in self.parts.items() if each != role] or ["its config"]
        return ModelLoadError(
            f"{tensor} of {tensor.path.name} does not fit {', '.join(others)}: {what}. The checkpoint is damaged, or "
            "its config.json is another's."
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Content of a weight's tensors.

    Attributes:
        form: format of its rows.
        shape: [..., rows, width], of one matrix or several.
        block: rows and neighbours with one scale; the last blocks may be cut by the weight's end.
        take: values in the format's bytes, scales and zero points, one for each block.
        order: [width], the input that each weight of a row multiplies; None for the inputs' own order.
        is_transposed: True if the plain weight is [..., width, rows].
        rounded: dtype to which the format's own library rounds weights; None for float32.
    """

    form: RowFormat
    shape: Shape
    block: Block
    take: Callable[[Tensors], Taken]
    order: Tensor | None = None
    is_transposed: bool = False
    rounded: torch.dtype | None = None

    @property
    def why_not_kept(self) -> str:
        """Description of the lack of kernels; "" for rows that kernels multiply."""
        form = self.form
        return "" if form.has_kernel else f"no kernel multiplies {form.values} in runs of {form.run}"

    def blocks(self, given: Tensors) -> Tensor:
        """[rows of all matrices, bytes a row]; raises WrongValuesError for values that are no numbers."""
        form = self.form
        values, scales, zeros = self.take(given)
        values = values.view(torch.uint8).reshape(-1, form.value_bytes)
        factors = self._spread(scales.view(form.scales))
        if form.values == "float8" and ((values & 127) == 127).any():
            raise WrongValuesError("values", "values that are no numbers")
        if form.scales == EXPONENTS and (factors == 255).any():
            raise WrongValuesError("scales", "the exponent 255, which is no number")
        if self.order is not None:
            is_packed = form.values == "uint4"
            values = as_nibbles(nibbles(values)[:, self.order]) if is_packed else values[:, self.order]
        return form.join(values, factors, None if zeros is None else self._spread(zeros), given.get("unit"))

    def _spread(self, factors: Tensor) -> Tensor:
        """[rows of all matrices, num_runs] of one for each block."""
        *matrices, rows, _ = self.shape
        height, run = self.block
        grid = factors.reshape(*matrices, -(-rows // height), -1).repeat_interleave(height, dim=-2)[..., :rows, :]
        return grid.repeat_interleave(run // self.form.run, dim=-1)[..., : self.form.num_runs].flatten(0, -2)


def as_stored(given: Tensors) -> Taken:
    """Values and scales of a file, without zero points."""
    return given["values"], given["scales"], None


def block_of(weight: Weight, shape: Shape, blocks: Sequence[Block]) -> Block:
    """The block, of those possible, that the scales of a weight are for; raises ModelLoadError for another number."""
    if len(shape) < 2:
        raise weight.misfit("values", "a quantised weight is a matrix")
    *matrices, rows, width = shape
    if weight.parts["scales"].dtype in ("F8_E8M0", "U8"):
        blocks = [*blocks, MX_BLOCK]  # experts in MXFP4 or MXFP8, other layers in larger blocks
    blocks = [(height or rows, run or width) for height, run in blocks]
    grids = [(*matrices, -(-rows // height), -(-width // run)) for height, run in blocks]
    given = weight.shape_of("scales")
    if math.prod(given) == math.prod(matrices):
        given = (*matrices, 1, 1)  # one for each matrix, however it is shaped
    elif given == shape[:-1]:
        given = (*given, 1)
    return blocks[grids.index(given if given in grids else weight.shape_of("scales", *grids))]


def unit_of(weight: Weight, operation: str) -> str:
    """The operation of the unit on scales, "" without one; raises ModelLoadError for one that is no factor."""
    if "unit" not in weight.parts:
        return ""
    weight.shape_of("unit", (1,), ())
    factor = weight.read(weight.parts["unit"]).reshape(1)
    if not factor.isfinite() or factor == 0:
        raise weight.misfit("unit", f"it is {factor.tolist()}, and must be one number other than 0")
    return operation
