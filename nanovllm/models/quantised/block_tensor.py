"""A weight in quantised blocks that code takes for a plain tensor, such as the loader of `transformers`.

Stacked and joined by rows it stays quantised; any other operation computes with the dequantised weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is _aten.detach.default:
            return BlockTensor(args[0].blocks, args[0].content, args[0].dtype, args[0].num_joined)
        if func in (_aten.stack.default, _aten.cat.default) and (first := _joinable(func, *args)) is not None:
            joined = func([each.blocks for each in args[0]], *args[1:])
            return BlockTensor(joined, first.content, first.dtype, sum(each.num_joined for each in args[0]))
        return func(*map(_plain, args), **{name: _plain(each) for name, each in (kwargs or {}).items()})


def _plain(argument: Any) -> Any:
    """An operator's argument with plain tensors in place of those in blocks."""
    if isinstance(argument, (list, tuple)):
        return [_plain(each) for each in argument]
    return argument.plain() if isinstance(argument, BlockTensor) else argument


def _joinable(func: Any, tensors: Sequence[Any], dim: int = 0) -> BlockTensor | None:
    """The first of tensors that are joined by whole rows of one format; None for others."""
    first = tensors[0]
    by_rows = dim % (first.dim() + (func is _aten.stack.default)) < first.dim() - 1
    if not by_rows or any(type(each) is not BlockTensor for each in tensors):
        return None
    layouts = [each.content for each in tensors]
    is_same = all(each.form == first.content.form and each.order is None for each in layouts)
    return first if is_same and not first.content.is_transposed else None
