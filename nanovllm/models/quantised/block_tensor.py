"""A weight in quantised blocks that code takes for a plain tensor, such as the loader of `transformers`.

Stacked, joined and cut by whole rows it stays quantised, and cut by whole runs of each row, as ranks do; any other
operation computes with the dequantised weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.models.quantised.layout import Layout

_WEIGHTS_AT_ONCE = 1 << 20  # weights dequantised at a time
_aten = torch.ops.aten


class BlockTensor(Tensor):
    """A tensor with the shape and dtype of the plain weight, without its memory.

    blocks: [..., rows, bytes a row]. content: format of the rows, and the order of their weights. num_joined: number of
    the files' weights in it.
    """

    blocks: Tensor
    content: Layout
    num_joined: int

    @staticmethod
    def __new__(cls, blocks: Tensor, layout: Layout, dtype: torch.dtype, num_joined: int = 1) -> BlockTensor:
        *matrices, rows, _ = blocks.shape
        width = layout.form.width
        shape = (*matrices, width, rows) if layout.is_transposed else (*matrices, rows, width)
        found: BlockTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        found.blocks = blocks
        found.content = layout
        found.num_joined = num_joined
        return found

    def plain(self) -> Tensor:
        """The dequantised weight."""
        layout = self.content
        width = layout.form.width
        weight = torch.empty(*self.blocks.shape[:-1], width, dtype=self.dtype)
        rows = weight.view(-1, width)
        step = max(1, _WEIGHTS_AT_ONCE // width)
        order = slice(None) if layout.order is None else layout.order
        for at, blocks in enumerate(self.blocks.flatten(0, -2).split(step)):
            part = layout.form.weights(blocks)
            rows[at * step : at * step + step, order] = part.to(layout.rounded or part.dtype).to(self.dtype)
        return weight.transpose(-1, -2).contiguous() if layout.is_transposed else weight

    def with_blocks(self, blocks: Tensor, **changes: Any) -> BlockTensor:
        return BlockTensor(blocks, replace(self.content, **changes), self.dtype, self.num_joined)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        return nn.Parameter(self.plain(), requires_grad=False)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        found = _KEPT[func](*args) if func in _KEPT else None
        if found is not None:
            return found
        return func(*map(_plain, args), **{name: _plain(each) for name, each in (kwargs or {}).items()})


def _plain(argument: Any) -> Any:
    """An operator's argument with plain tensors in place of those in blocks."""
    if isinstance(argument, (list, tuple)):
        return [_plain(each) for each in argument]
    return argument.plain() if isinstance(argument, BlockTensor) else argument


def _joined(func: Any, tensors: Sequence[Any], dim: int = 0) -> BlockTensor | None:
    """Tensors joined by whole rows of one format; None for others."""
    tensors = [each for each in tensors if each.numel()]  # padding of no rows
    first = tensors[0]
    by_rows = dim % (first.dim() + (func is _aten.stack.default)) < first.dim() - 1
    if not by_rows or any(type(each) is not BlockTensor for each in tensors):
        return None
    layouts = [each.content for each in tensors]
    is_same = len(layouts) == 1 or all(each.form == first.content.form and each.order is None for each in layouts)
    if not is_same or first.content.is_transposed:
        return None
    joined = first.with_blocks(func([each.blocks for each in tensors], dim))
    joined.num_joined = sum(each.num_joined for each in tensors)
    return joined


def _sliced(
    tensor: BlockTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> BlockTensor | None:
    """Some rows, or the same whole runs of each row; None for others."""
    part = slice(*slice(start, end).indices(tensor.shape[dim])[:2])
    if step != 1 or tensor.content.is_transposed:
        return None
    if dim % tensor.dim() < tensor.dim() - 1:
        return tensor.with_blocks(tensor.blocks[(slice(None),) * (dim % tensor.dim()) + (part,)])
    form = tensor.content.form
    if tensor.content.order is not None or form.why_not_split(part.start, part.stop):
        return None
    parts = [tensor.blocks[..., each] for each in form.bytes_of(part.start, part.stop)]
    width = part.stop - part.start
    form = replace(form, width=width, run=min(form.run, width))
    return tensor.with_blocks(torch.cat(parts, dim=-1), form=form)


_KEPT: dict[Any, Callable[..., Tensor | None]] = {
    _aten.detach.default: lambda tensor: tensor.with_blocks(tensor.blocks),
    _aten.clone.default: lambda tensor: tensor.with_blocks(tensor.blocks.clone()),
    _aten.new_zeros.default: lambda tensor, size: torch.zeros(size, dtype=tensor.dtype),
    _aten.stack.default: partial(_joined, _aten.stack.default),
    _aten.cat.default: partial(_joined, _aten.cat.default),
    _aten.slice.Tensor: _sliced,
}
