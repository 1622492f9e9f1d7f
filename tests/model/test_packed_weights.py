"""The order of packed weights, element by element, and which plain weights may be freed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nanovllm.errors import UnsupportedModelError
from nanovllm.kernels.packed_product import LANES, PANEL, pack
from nanovllm.model.packed_linears import with_weights_hidden

DEPTH = 62


def matrix(num_outputs: int, dtype: torch.dtype, depth: int = DEPTH) -> torch.Tensor:
    return torch.arange(num_outputs * depth).view(num_outputs, depth).mul(7).remainder(251).to(dtype)


def in_order(rows: torch.Tensor) -> torch.Tensor:
    """[num_panels, depth / step, PANEL, step] of rows that are in their panels' order, by the definition."""
    step = 4 // rows.element_size()
    packed = torch.empty(len(rows) // PANEL, rows.shape[1] // step, PANEL, step, dtype=rows.dtype)
    for output, row in enumerate(rows):
        packed[output // PANEL, :, output % PANEL] = row.view(-1, step)
    return packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(32,), (64, 32, 96), (48, 16), (16, 16, 32)], ids=str)
def test_weights_are_packed_side_by_side(sizes, dtype):
    weights = [matrix(size, dtype) + index for index, size in enumerate(sizes)]
    packed = pack(*weights)
    assert packed.is_contiguous()
    assert torch.equal(packed, in_order(torch.cat(weights)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_outputs", [16, 32, 48, 96])
def test_interleaved_weights_share_each_panel(num_outputs, dtype):
    first, second = matrix(num_outputs, dtype), matrix(num_outputs, dtype) + 3
    pairs = zip(first.split(LANES), second.split(LANES), strict=True)
    expected = in_order(torch.cat([part for pair in pairs for part in pair]))
    assert torch.equal(pack(first, second, interleave=True), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_lie_anyhow_are_packed_alike(dtype):
    expected = in_order(matrix(32, dtype))
    wide, shifted = torch.zeros(32, 2 * DEPTH, dtype=dtype), torch.zeros(32 * DEPTH + 1, dtype=dtype)
    wide[:, 1 : DEPTH + 1] = matrix(32, dtype)
    shifted[1:] = matrix(32, dtype).flatten()
    assert torch.equal(pack(wide[:, 1 : DEPTH + 1]), expected)
    assert torch.equal(pack(shifted[1:].view(32, DEPTH)), expected)
    assert torch.equal(pack(matrix(32, dtype).t().contiguous().t()), expected)
    assert torch.equal(pack(nn.Parameter(matrix(32, dtype))), expected)


class Reader(nn.Module):
    """Two linear layers, of which the second is used past itself if so wished."""

    def __init__(self, *, reads_directly: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reads_directly = reads_directly

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows)
        return F.linear(rows, self.second.weight, self.second.bias) if self.reads_directly else self.second(rows)


@pytest.mark.parametrize("reads_directly", [False, True])
def test_weights_are_freed_only_if_no_module_reads_them_directly(reads_directly):
    model, rows, calls = Reader(reads_directly=reads_directly), torch.randn(3, 4), []
    expected = model(rows)

    def probe() -> torch.Tensor:
        calls.append(model.second.weight.numel())
        try:
            return model(rows)
        except RuntimeError as error:
            raise UnsupportedModelError(str(error)) from error

    seen, may_be_freed = with_weights_hidden(model, probe)
    assert torch.equal(seen, expected)
    assert may_be_freed == (set() if reads_directly else {model.first, model.second})
    assert calls == ([0, 16] if reads_directly else [0])
    assert torch.equal(model(rows), expected)
    assert not {"forward"} & (vars(model.first).keys() | vars(model.second).keys())
