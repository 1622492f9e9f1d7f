"""Start check: compares compiled kernels with PyTorch on small random rows, in a few milliseconds.

It covers products and attention in all variants of the library: few and many rows, depths that fill matrix tiles and
others, quantised weights, single decodes and decodes with a common prefix, chunks; attention without and with every
trait, over scores of the range that models have. Fused layers are compared with a model's modules later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.fast.kernels.packed_product import PANEL, ProductStruct, pack, pack_quantised

if TYPE_CHECKING:
    from nanovllm.fast.kernels.cpp import Kernels

_BYTE_RUN = 32  # neighbours of a row with one scale, where rows become bytes: kRunOfRows in `csrc/few_rows.h`
_ROWS = (1, 3, 13, 43)  # numbers of rows of the compared products
PAGE = 32  # tokens per block: enough for a decode's longest runs
_MIDDLE = 53  # token of the longest context with element 0 of its key 0
# Kinds of queries in turn: factor of their random part, and rise of scores per token. Scores from -100 to 100, as a
# model has: maxima that rise in each block, an early one with all later tokens far below it, and equal scores.
_KINDS = ((1, 0.0), (1, 2.0), (1, -2.0), (0, 0.0), (1, 0.25))
# Relative to a row's norm. Measured without matrix tiles: up to 4.1e-3 in bfloat16, where results and attention weights
# are rounded by up to 2^-9 each, and 1.6e-6 in float32. A wrong factor of 0.99 exceeds it.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


class _Traits(NamedTuple):
    """Traits of attention as kernel arguments."""

    window: int
    chunk: int
    softcap: float
    sinks: Tensor | None

    def arguments(self) -> tuple[Any, ...]:
        return (*self[:3], None if self.sinks is None else self.sinks.data_ptr())


def first_wrong(kernels: Kernels, head_dim: int, value_dim: int) -> str | None:
    """Text that names the first wrong kernel and its error; None if all are right."""
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for name, own, expected in (
            *_products(kernels, generator),
            *_attention(kernels, head_dim, value_dim, generator),
        ):
            size = expected.norm(dim=-1).clamp(min=1e-6)
            distances = (own.double() - expected).norm(dim=-1) / size
            if not bool((distances <= TOLERANCE[kernels.dtype]).all()):  # NaN is wrong too
                return f"{name} differ by up to {distances.nan_to_num(torch.inf).max().item():.1e} of their size"
    return None


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def _products(kernels: Kernels, generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    for depth in (64, 40):
        weight = _random(generator, kernels.dtype, 2 * PANEL, depth)
        packed = pack(weight)
        struct = ProductStruct(packed.data_ptr(), None, 2 * PANEL, depth)
        yield from _product_rows(kernels, generator, struct, weight.double(), f"products of {{}} by {depth}")
    for depth in (192, 96):
        yield from _quantised_products(kernels, generator, _Runs(8, depth, torch.float32), depth)
    for runs in (_Runs(8, 32, torch.float16), _Runs(8, 16, torch.float32)):
        yield from _quantised_products(kernels, generator, runs, 192)
    for num_bits in (4, 5):
        for dtype in (torch.float16, torch.float32):
            yield from _quantised_products(kernels, generator, _Runs(num_bits, 32, dtype), 192)
    for parts, weight, name in _coded_weights(generator):
        yield from _packed_products(kernels, generator, parts, weight, f"products of {{}} by 256 {name}")


class _Parts(NamedTuple):
    """A quantised weight, as `models/quantised/parts.py` describes it."""

    values: Tensor
    scales: Tensor
    minima: Tensor | None
    num_bits: int
    zeros: Tensor | None = None
    units: Tensor | None = None
    is_float: bool = False


def _coded_weights(generator: torch.Generator) -> Iterator[tuple[_Parts, Tensor, str]]:
    """Weights with zero points, of 4-bit floats and of 8-bit ones: (parts, weight in float64, name)."""
    shape = (2 * PANEL, 256)

    def integers(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator, dtype=torch.uint8, device="cpu")

    def spread(numbers: Tensor, factors: Tensor) -> Tensor:
        return (numbers.double().unflatten(1, (factors.shape[1], -1)) * factors.double()[..., None]).flatten(1)

    nibbles = integers(0, 16, *shape)
    nibbles[:, 0] = 0
    scales, zeros = _random(generator, torch.float16, 2 * PANEL, 8), integers(0, 16, 2 * PANEL, 8)
    zeros[:, 0] = 0
    less = nibbles.double() - zeros.double().repeat_interleave(32, dim=1)
    yield _Parts(nibbles, scales, None, 4, zeros=zeros), spread(less, scales), "of 4 bits with zero points"
    doubled = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], device="cpu")[nibbles.long()]
    for run in (32, 16):
        halves = _random(generator, torch.bfloat16, 2 * PANEL, 256 // run)
        units = _random(generator, torch.float32, 2 * PANEL, 1) if run == 16 else None
        weight = spread(doubled, halves) * (1 if units is None else units.double())
        yield _Parts(nibbles, halves, None, 4, units=units, is_float=True), weight, f"4-bit floats in runs of {run}"
    codes = integers(0, 127, *shape) + 128 * integers(0, 2, *shape)
    codes[:, 0] = 0
    for run in (256, 128, 32):
        factors = _random(generator, torch.float32, 2 * PANEL, 256 // run)
        weight = spread(codes.view(torch.float8_e4m3fn).float(), factors)
        yield _Parts(codes, factors, None, 8, is_float=True), weight, f"8-bit floats in runs of {run}"


class _Runs(NamedTuple):
    """A quantisation: bits of a value, length of a run, dtype of its scale."""

    num_bits: int
    length: int
    dtype: torch.dtype


def _quantised_products(
    kernels: Kernels, generator: torch.Generator, runs: _Runs, depth: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Products with signed values (8 bits) and scales, or with unsigned values, scales and minima."""
    shape = (2 * PANEL, depth)
    size = (2 * PANEL, depth // runs.length)
    if runs.num_bits == 8:
        values = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8, device="cpu")
        minima = None
    else:
        values = torch.randint(0, 1 << runs.num_bits, shape, generator=generator, dtype=torch.uint8, device="cpu")
        minima = _random(generator, runs.dtype, *size)
    values[:, 0] = 0
    scales = _random(generator, runs.dtype, *size)
    weight = values.double().unflatten(1, (size[1], -1)) * scales.double()[..., None]
    if minima is not None:
        weight += minima.double()[..., None]
    name = f"products of {{}} by {depth} of {runs.num_bits} bits in runs of {runs.length} ({runs.dtype})"
    parts = _Parts(values, scales, minima, runs.num_bits)
    yield from _packed_products(kernels, generator, parts, weight.flatten(1), name)


def _packed_products(
    kernels: Kernels, generator: torch.Generator, parts: _Parts, weight: Tensor, name: str
) -> Iterator[tuple[str, Tensor, Tensor]]:
    packed, kind = pack_quantised(parts)
    panels = torch.tensor([[0, kind], [packed.shape[1], kind]], dtype=torch.int64, device="cpu")
    struct = ProductStruct(packed.data_ptr(), None, *weight.shape, panels.data_ptr())
    is_whole = not (parts.is_float and parts.num_bits == 8)
    byte_run = min(_BYTE_RUN, weight.shape[1] // parts.scales.shape[1]) if is_whole else 0
    yield from _product_rows(kernels, generator, struct, weight, name, byte_run=byte_run)


def _product_rows(
    kernels: Kernels,
    generator: torch.Generator,
    product: ProductStruct,
    weight: Tensor,
    name: str,
    *,
    byte_run: int = 0,
) -> Iterator[tuple[str, Tensor, Tensor]]:
    num_outputs, depth = weight.shape
    bias = _random(generator, kernels.dtype, num_outputs)
    product.bias = bias.data_ptr()
    for num_rows in _ROWS:
        rows = _random(generator, kernels.dtype, num_rows, depth)
        if product.panels:  # one large element, so that all others are in the low plane of split rows
            rows[:, 0] = 64
        multiplied = rows.double()
        if byte_run and 0 < kernels.least_byte_rows <= num_rows and depth % _BYTE_RUN == 0:
            multiplied = _in_bytes(rows, byte_run)
        expected = multiplied @ weight.T + bias.double()
        # All threads for most rows, and few of quantised weights, which each splits: calls wait on a busy machine.
        is_by_all = num_rows == _ROWS[-1] or (product.panels and num_rows == _ROWS[1])
        threads = torch.get_num_threads() if is_by_all else 1
        for function, dtype, num_threads in (
            (kernels.linear, kernels.dtype, threads),
            (kernels.linear_unrounded, torch.float32, 1),
        ):
            own = torch.empty(num_rows, num_outputs, dtype=dtype, device="cpu")
            function(ctypes.byref(product), rows.data_ptr(), own.data_ptr(), num_rows, num_threads)
            yield name.format(num_rows), own, expected


def _in_bytes(rows: Tensor, run: int) -> Tensor:
    """Rows rounded as the kernels round them: to 8 bits, with a scale for each run; float64."""
    runs = rows.float().unflatten(1, (-1, run))
    most = runs.abs().amax(dim=2, keepdim=True)
    inverse = torch.full_like(most, 127) / most  # `127 / most` rounds twice
    return ((runs.double() * inverse.double()).round() * (most / 127).double()).flatten(1)


def _attention(
    kernels: Kernels, head_dim: int, value_dim: int, generator: torch.Generator
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Attention of sequences of up to 107 tokens with two shared first pages, in caches filled with NaN elsewhere."""
    num_kv_heads = 2
    num_heads = 2 * kernels.num_groups
    shared = 2
    num_members = max(2, -(-16 // kernels.num_groups))
    contexts = [shared * PAGE + 7 + 36 * (member % 2) for member in range(num_members)]
    width = -(-max(contexts) // PAGE)
    tables = torch.arange(num_members * width, device="cpu").reshape(num_members, width) + shared
    tables[:, :shared] = torch.arange(shared, device="cpu")
    keys, values = (
        _random(generator, kernels.dtype, (int(tables.max()) + 1) * PAGE, num_kv_heads, size)
        for size in (head_dim, value_dim)
    )
    seen = [_slots(tables[member], end) for member, end in enumerate(contexts)]
    keys = _coarse(keys)
    for slots in seen:
        keys[slots, :, 0] = _ramp(len(slots)).to(kernels.dtype)[:, None]
    unseen = torch.ones(len(keys), dtype=torch.bool, device="cpu").index_fill_(0, torch.cat(seen), False)
    keys[unseen], values[unseen] = torch.nan, torch.nan
    plain = _Traits(0, 0, 0.0, None)
    every = _Traits(20, 0, 2.0, _random(generator, torch.float32, num_heads))
    sizes = width, PAGE, num_kv_heads, head_dim**-0.5, torch.get_num_threads()
    caches = keys.data_ptr(), values.data_ptr(), tables.data_ptr()
    members = torch.arange(num_members, device="cpu")
    groupings = {  # first member of each group, and number of shared tokens
        "decodes": (torch.arange(num_members + 1, device="cpu"), [0] * num_members, plain),
        "decodes with traits": (torch.arange(num_members + 1, device="cpu"), [0] * num_members, every),
        "decodes with a common prefix": (torch.tensor([0, num_members], device="cpu"), [shared * PAGE], plain),
    }
    queries = _queries(generator, kernels.dtype, num_members, num_heads, head_dim)
    ends = torch.tensor(contexts, device="cpu")
    for name, (starts, num_shared, traits) in groupings.items():
        own = queries.new_empty(num_members, num_heads, value_dim)
        counts = torch.tensor(num_shared, device="cpu")
        kernels.decode(
            queries.data_ptr(), *caches, ends.data_ptr(), members.data_ptr(), starts.data_ptr(), counts.data_ptr(),
            own.data_ptr(), num_members, len(counts), *sizes, *traits.arguments(),
        )  # fmt: skip
        for member, slots in enumerate(seen):
            yield name, own[member], _dense(queries[member][None], keys[slots], values[slots], traits)[0]
    begin = 21
    end = contexts[1]
    queries = _queries(generator, kernels.dtype, end - begin, num_heads, head_dim)
    first_row, start, count = torch.tensor([[0], [begin], [end - begin]], device="cpu")
    for name, traits in (("chunks", plain), ("chunks with traits", every)):
        own = queries.new_empty(end - begin, num_heads, value_dim)
        kernels.chunk(
            queries.data_ptr(), *caches[:2], tables[1].data_ptr(), first_row.data_ptr(), start.data_ptr(),
            count.data_ptr(), own.data_ptr(), 1, *sizes, *traits.arguments(),
        )  # fmt: skip
        yield name, own, _dense(queries, keys[seen[1]], values[seen[1]], traits)


def _coarse(values: Tensor) -> Tensor:
    """Values in steps of 1/16, so that sums of their products are exact in float32 however large they are."""
    return (values * 16).round() / 16


def _ramp(num_tokens: int) -> Tensor:
    """Element 0 of the keys of a context."""
    return torch.arange(num_tokens, device="cpu") - _MIDDLE


def _queries(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Queries [num_rows, num_heads, head_dim] of all kinds; element 0 scales `_ramp`, the others are random."""
    rows, heads, head_dim = shape
    queries = _coarse(_random(generator, dtype, *shape))
    kinds = (torch.arange(rows, device="cpu")[:, None] + torch.arange(heads, device="cpu")) % len(_KINDS)
    sizes, rises = torch.tensor(_KINDS, device="cpu").T[:, kinds]
    queries *= sizes[..., None].to(dtype)
    queries[..., 0] = (rises * head_dim**0.5).round().to(dtype)
    return queries


def _slots(table: Tensor, end: int) -> Tensor:
    positions = torch.arange(end, device="cpu")
    return table[positions // PAGE] * PAGE + positions % PAGE


def _dense(queries: Tensor, keys: Tensor, values: Tensor, traits: _Traits) -> Tensor:
    """Reference attention [num_rows, num_heads, value_dim] float64 of the last rows of the context."""
    num_rows, num_heads, head_dim = queries.shape
    groups = num_heads // keys.shape[1]
    total = len(keys)
    keys, values = (cache.double().repeat_interleave(groups, 1) for cache in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * head_dim**-0.5
    if traits.softcap:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    positions = torch.arange(total - num_rows, total, device="cpu")[:, None]
    tokens = torch.arange(total, device="cpu")
    hidden = tokens > positions
    if traits.window:
        hidden = hidden | (tokens <= positions - traits.window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if traits.sinks is not None:
        scores = torch.cat([scores, traits.sinks.double()[:, None, None].expand(-1, num_rows, 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :total], values)
