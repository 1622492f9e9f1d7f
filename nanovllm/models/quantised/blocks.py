"""Linear layers and embeddings with quantised weights, in the block formats of GGUF files.

A weight's row is a run of blocks; each block holds some elements, a scale and maybe a minimum. This is the reference,
for any device: it dequantises, then computes as the plain layers do. CPU kernels repack the blocks and replace
`forward` (`models/packed_linears.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.errors import UnsupportedModelError
from nanovllm.models.kept_weights import KeptWeight
from nanovllm.models.quantised.parts import QuantisedParts
from nanovllm.models.quantised.rows import RowFormat

# Elements dequantised at a time, 4 MiB of float32: larger buffers are returned to the system and cleared page by page.
_ELEMENTS_AT_ONCE = 1 << 20


class BlockFormat(NamedTuple):
    """Storage format of a row.

    Attributes:
        elements: weights in a block; 0 if a block is a whole row of `num_bytes` plus one byte a weight.
        num_bytes: bytes of a block.
        dequantise: blocks [num_blocks, bytes] uint8 -> [num_blocks, elements] float32.
    """

    elements: int
    num_bytes: int
    dequantise: Callable[[Tensor], Tensor]

    def row_bytes(self, in_features: int) -> int:
        """Bytes of a row; raises ValueError if it is not a whole number of blocks."""
        if self.elements == 0:
            return self.num_bytes + in_features
        if in_features % self.elements:
            raise ValueError(f"rows of {in_features} elements are not of whole blocks of {self.elements}.")
        return in_features // self.elements * self.num_bytes

    def in_features(self, row_bytes: int) -> int:
        """The inverse of `row_bytes`; raises ValueError likewise."""
        if self.elements == 0:
            return row_bytes - self.num_bytes
        if row_bytes % self.num_bytes:
            raise ValueError(f"rows of {row_bytes} bytes are not of whole blocks of {self.num_bytes} bytes.")
        return row_bytes // self.num_bytes * self.elements


def _float(blocks: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """[num_blocks, 2 or 4] bytes of one number each -> [num_blocks, 1] float32."""
    return blocks.contiguous().view(dtype).float()


def _nibbles(values: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2, n]: the lower halves, then the upper ones."""
    values = values.contiguous()
    return torch.stack((values & 15, values >> 4), dim=-2)


def _dequantise_int8(blocks: Tensor) -> Tensor:
    return blocks[:, 4:].contiguous().view(torch.int8).float().mul_(_float(blocks[:, :4], torch.float32))


def _dequantise_q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(_float(blocks[:, :2]))


def _dequantise_q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).flatten(1).float().sub_(8).mul_(_float(blocks[:, :2]))


def _dequantise_q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).flatten(1).float().mul_(_float(blocks[:, :2])).add_(_float(blocks[:, 2:4]))


def q4_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of the eight groups of 32 of each block, [num_blocks, 8] float32."""
    low, middle, high = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)  # 6 bits each; upper 2 bits of the last 4 apart
    scales = torch.cat((low & 63, high & 15 | low >> 2 & 48), dim=1)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 2 & 48), dim=1)
    return _float(blocks[:, :2]) * scales.float(), _float(blocks[:, 2:4]) * minima.float()


def _bits(values: Tensor) -> Tensor:
    """[..., n] bytes -> [..., n, 8]: the lowest bit first."""
    return values[..., None] >> torch.arange(8, dtype=torch.uint8, device=values.device) & 1


def q5_values(blocks: Tensor, at: int) -> Tensor:
    """Integers 0 to 31 of each block, [num_blocks, 32] uint8; fifth bits are stored from byte `at`, the rest after."""
    return _nibbles(blocks[:, at + 4 :]).flatten(1) | _bits(blocks[:, at : at + 4]).flatten(1) << 4


def _dequantise_q5_0(blocks: Tensor) -> Tensor:
    return q5_values(blocks, 2).float().sub_(16).mul_(_float(blocks[:, :2]))


def _dequantise_q5_1(blocks: Tensor) -> Tensor:
    return q5_values(blocks, 4).float().mul_(_float(blocks[:, :2])).add_(_float(blocks[:, 2:4]))


def _dequantise_q4_k(blocks: Tensor) -> Tensor:
    scales, minima = q4_k_scales(blocks)
    values = _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).flatten(1, 2).float()  # [num_blocks, 8, 32]
    return values.mul_(scales[..., None]).sub_(minima[..., None]).flatten(1)


def q5_k_values(blocks: Tensor) -> Tensor:
    """Integers 0 to 31 of each block, [num_blocks, 256] uint8."""
    low = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).flatten(1, 2)  # [num_blocks, 8, 32]
    return (low | _bits(blocks[:, 16:48]).transpose(1, 2) << 4).flatten(1)


def _dequantise_q5_k(blocks: Tensor) -> Tensor:
    scales, minima = q4_k_scales(blocks)
    values = q5_k_values(blocks).unflatten(1, (8, 32)).float()
    return values.mul_(scales[..., None]).sub_(minima[..., None]).flatten(1)


def q6_k_values(blocks: Tensor) -> Tensor:
    """Integers -32 to 31 of each block, [num_blocks, 256] int8."""
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).reshape(-1, 8, 32)
    high = (
        blocks[:, 128:192].unflatten(1, (2, 1, 32))
        >> torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
        & 3
    )
    return ((low | high.reshape(-1, 8, 32) << 4).view(torch.int8) - 32).flatten(1)


def q6_k_scales(blocks: Tensor) -> Tensor:
    """Scales of the sixteen groups of 16 of each block, [num_blocks, 16] float32."""
    return _float(blocks[:, 208:]) * blocks[:, 192:208].contiguous().view(torch.int8).float()


def _dequantise_q6_k(blocks: Tensor) -> Tensor:
    values = q6_k_values(blocks).unflatten(1, (16, 16)).float()
    return values.mul_(q6_k_scales(blocks)[..., None]).flatten(1)


# "int8" is this engine's format: a row's float32 scale, then its int8 elements. The other formats are GGUF's.
FORMATS = {
    "int8": BlockFormat(0, 4, _dequantise_int8),
    "Q8_0": BlockFormat(32, 34, _dequantise_q8_0),
    "Q4_0": BlockFormat(32, 18, _dequantise_q4_0),
    "Q4_1": BlockFormat(32, 20, _dequantise_q4_1),
    "Q5_0": BlockFormat(32, 22, _dequantise_q5_0),
    "Q5_1": BlockFormat(32, 24, _dequantise_q5_1),
    "Q4_K": BlockFormat(256, 144, _dequantise_q4_k),
    "Q5_K": BlockFormat(256, 176, _dequantise_q5_k),
    "Q6_K": BlockFormat(256, 210, _dequantise_q6_k),
}
KIND_OF_OPTION = {"int8": "int8", "int4": "Q4_1"}  # keys: values of EngineConfig.quantization


def dequantise_blocks(kind: str, blocks: Tensor) -> Tensor:
    """[num_rows, bytes a row] uint8 -> [num_rows, in_features] float32, bit for bit as the package `gguf`."""
    form = FORMATS[kind]
    block_bytes = form.num_bytes if form.elements else blocks.shape[1]
    return form.dequantise(blocks.reshape(-1, block_bytes)).view(len(blocks), -1)


def quantise(weight: Tensor, kind: str) -> Tensor:
    """Blocks [num_rows, bytes a row] of a weight [num_rows, in_features]: "int8" or "Q4_1", rounded to nearest."""
    rows = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
    return torch.cat([_quantise_rows(part.detach().float(), kind) for part in weight.split(rows)])


def _quantise_rows(values: Tensor, kind: str) -> Tensor:
    if kind == "int8":
        scales = values.abs().amax(dim=1, keepdim=True) / 127
        whole = (values / scales.where(scales > 0, 1)).round().to(torch.int8)
        return torch.cat((scales.view(torch.uint8), whole.view(torch.uint8)), dim=1)
    groups = values.unflatten(1, (-1, 32))
    minima = groups.amin(dim=2, keepdim=True).half()
    scales = ((groups.amax(dim=2, keepdim=True) - minima.float()) / 15).half()
    divisors = scales.float().where(scales > 0, 1)
    whole = ((groups - minima.float()) / divisors).round().clamp(0, 15).to(torch.uint8)
    nibbles = whole[..., :16] | whole[..., 16:] << 4
    return torch.cat((scales.view(torch.uint8), minima.view(torch.uint8), nibbles), dim=2).flatten(1)


def _parts_of(kind: str, blocks: Tensor) -> QuantisedParts:
    """The parts of each block, [num_blocks, ...]."""
    if kind == "int8":
        return QuantisedParts(
            blocks[:, 4:].contiguous().view(torch.int8), blocks[:, :4].contiguous().view(torch.float32), None
        )
    if kind == "Q6_K":
        return QuantisedParts(q6_k_values(blocks), q6_k_scales(blocks), None)
    if kind in ("Q4_K", "Q5_K"):
        scales, minima = q4_k_scales(blocks)
        if kind == "Q5_K":
            return QuantisedParts(q5_k_values(blocks), scales, -minima, 5)
        return QuantisedParts(_nibbles(blocks[:, 16:].unflatten(1, (4, 32))).flatten(1), scales, -minima, 4)
    scales = blocks[:, :2].contiguous().view(torch.float16)
    if kind == "Q8_0":
        return QuantisedParts(blocks[:, 2:].contiguous().view(torch.int8), scales, None)
    if kind in ("Q4_0", "Q5_0"):
        zero = 8 if kind == "Q4_0" else 16
        if not (zero * scales).isfinite().all():
            scales = scales.float()
        values = _nibbles(blocks[:, 2:]).flatten(1) if kind == "Q4_0" else q5_values(blocks, 2)
        return QuantisedParts(values, scales, -zero * scales, 4 if kind == "Q4_0" else 5)
    minima = blocks[:, 2:4].contiguous().view(torch.float16)
    if kind == "Q5_1":
        return QuantisedParts(q5_values(blocks, 4), scales, minima, 5)
    return QuantisedParts(_nibbles(blocks[:, 4:]).flatten(1), scales, minima, 4)


class _Quantised(nn.Module):
    """Blocks [num_rows, bytes a row] of one kind."""

    blocks: Tensor

    def __init__(self, kind: str | RowFormat, blocks: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        if isinstance(kind, str) and kind not in FORMATS:
            raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(FORMATS)}.")
        if blocks.dtype != torch.uint8 or blocks.dim() != 2:
            raise ValueError(f"blocks must be uint8 [num_rows, bytes a row], not {blocks.dtype} {tuple(blocks.shape)}.")
        self._form = FORMATS[kind] if isinstance(kind, str) else kind
        self.kind = kind if isinstance(kind, str) else kind.name
        self.dtype = dtype
        self._row_elements = self._form.in_features(blocks.shape[1])
        self.register_buffer("blocks", blocks)

    def dequantise(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """[num_rows, in_features] float32, of all rows or some."""
        blocks = self.blocks[rows]
        return self._form.weights(blocks) if isinstance(self._form, RowFormat) else dequantise_blocks(self.kind, blocks)

    def quantised_parts(self) -> QuantisedParts:
        """The weight, for kernels that repack it."""
        form = self._form
        if isinstance(form, RowFormat):
            return form.parts(self.blocks)
        block_bytes = form.num_bytes if form.elements else self.blocks.shape[1]
        parts = _parts_of(self.kind, self.blocks.reshape(-1, block_bytes))
        rows = len(self.blocks)
        minima = None if parts.minima is None else parts.minima.reshape(rows, -1)
        values = parts.values.reshape(rows, -1)
        scales = parts.scales.reshape(rows, -1)
        return QuantisedParts(values, scales, minima, parts.num_bits)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("quantised weights are not loaded from a state dict. Load the model without quantization.")

    @property
    def form(self) -> str | RowFormat:
        """The first argument of the constructor."""
        return self._form if isinstance(self._form, RowFormat) else self.kind

    @property
    def has_parts(self) -> bool:
        """Whether `quantised_parts` has the weight."""
        return not isinstance(self._form, RowFormat) or self._form.has_kernel

    @property
    def weight(self) -> NoReturn:
        # Not AttributeError, which `nn.Module` would report as a missing attribute.
        raise UnsupportedModelError(
            "a module of this model reads the weight of a linear layer or embedding by itself, which is quantised. "
            "Leave quantization out."
        )


class QuantisedLinear(_Quantised):
    """A linear layer with quantised weights; outputs have the input's dtype.

    Args:
        kind: a key of FORMATS, or the format of a checkpoint's rows.
        blocks: [out_features, bytes a row] uint8, in that format.
        bias: [out_features] or None.
        dtype: dtype of the unquantised layer.

    Raises ValueError for partial blocks or another shape.
    """

    bias: nn.Parameter | None

    def __init__(
        self, kind: str | RowFormat, blocks: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(kind, blocks, dtype)
        self.out_features = len(blocks)
        self.in_features = self._row_elements
        self._kept = KeptWeight()
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    def padded(self, multiple: int) -> QuantisedLinear:
        """Pads the output dimension with zeros to a multiple; returns itself if it is one already."""
        missing = -self.out_features % multiple
        if missing == 0:
            return self
        nothing = self.blocks.new_zeros(missing, self.blocks.shape[1])  # scales of 0, in every kind
        bias = None if self.bias is None else F.pad(self.bias, (0, missing))
        return QuantisedLinear(self.form, torch.cat((self.blocks, nothing)), bias, dtype=self.dtype)

    def forward(self, states: Tensor) -> Tensor:
        step = max(1, _ELEMENTS_AT_ONCE // self.in_features)
        starts = range(0, self.out_features, step)
        weights: Iterable[Tensor] = (self.dequantise(slice(at, at + step)).to(states.dtype) for at in starts)
        if not torch.compiler.is_compiling():  # torch.compile would recompile for each number of passes
            weights = self._kept.over(weights, states, self.out_features * self.in_features)
        parts = [F.linear(states, weight) for weight in weights]
        products = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return products if self.bias is None else products + self.bias

    def free(self) -> None:
        """Free the weight, once packed products compute the layer."""
        self.blocks = self.blocks.new_empty(0, self.blocks.shape[1])
        self._kept.drop()

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, kind={self.kind}"


class SortedLinear(nn.Module):
    """A quantised layer that sorts its inputs by their groups first (act-order).

    No linear layer to kernels that fuse several; the layer in it is packed alone.
    """

    order: Tensor

    def __init__(self, linear: QuantisedLinear, order: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("order", order)

    def forward(self, states: Tensor) -> Tensor:
        products: Tensor = self.linear(states.index_select(-1, self.order))
        return products


class QuantisedEmbedding(_Quantised):
    """An embedding with quantised rows, dequantised to `dtype` on lookup.

    A tied head is a QuantisedLinear of the same `blocks`.
    """

    def __init__(self, kind: str, blocks: Tensor, *, dtype: torch.dtype, padding_idx: int | None = None) -> None:
        super().__init__(kind, blocks, dtype)
        self.num_embeddings = len(blocks)
        self.embedding_dim = self._row_elements
        self.padding_idx = padding_idx

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self.dequantise(token_ids.flatten())
        return rows.to(self.dtype).view(*token_ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, kind={self.kind}"
