"""Linear layers with packed weights of 4 or 8 bits on a GPU: `packed_rows_cuda/`.

Products of few rows read the packed weight once; for more rows it is widened to a plain matrix first. Weights are laid
out as the tensor cores' operand, so that a lane of a warp loads its part with instructions of 16 bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.fast.kernels import nvrtc
from nanovllm.fast.kernels.operators import define_operator

CHUNK = 64
TILE = 16
FEW_ROWS = 8  # most rows of the kernel for few
_FEWEST_ROWS = (3, 6)  # most rows for which it is faster; and if inputs fit into shared memory at once
_MORE_ROWS = (32, 64, 128)  # sizes of the kernels for Hopper
_FEW_PANEL = 4096  # inputs that all warps take in their turns before others are loaded
_FEW_BLOCKS = 3  # most blocks of a multiprocessor
_FEW_SLOTS = 3  # pairs of chunks of a warp on their way
_FEW_OWN_BYTES = 11 * 1024  # static shared memory of a block, and 1 KiB of the system's
_FEW_BYTES = 66 * 1024  # most shared memory for inputs, if they need not be there at once
_SHARED_BYTES = 227 * 1024  # a block's shared memory; GPUs of capability 12 have less
_MOST_FEW_BYTES = _SHARED_BYTES - 10 * 1024  # most that a block allocates at its launch
_MORE_BYTES = 200 * 1024  # a block's shared memory
_WARPGROUPS = 4
_GROUPS = (4, 2, 1)  # warpgroups of a block with outputs of their own
_MAX_BLOCKS = 8  # most blocks of a portable cluster
_SCALES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
)  # order of the source's constants
_SOURCES = Path(__file__).with_name("packed_rows_cuda")
KINDS = ("int4", "float4", "int8", "float8")  # likewise
BYTES = KINDS[2:]  # kinds of a byte each
_SHIFTS = ("", "added", "subtracted")  # likewise
_MACROS = ("NUMBER", "KIND", "ZERO", "SCALE", "SHIFTS", "RUN")


def why_not(device: torch.device) -> str | None:
    """Why a device has no products of packed weights; None if it has."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"{device} is no GPU of CUDA here"
    if torch.cuda.get_device_capability(device)[0] < 9:
        return f"{torch.cuda.get_device_name(device)} has no clusters of blocks"
    properties: Any = torch.cuda.get_device_properties(device)
    if properties.shared_memory_per_block_optin < _SHARED_BYTES:
        return f"{torch.cuda.get_device_name(device)} has too little shared memory"
    return None if nvrtc.is_available() else "there is no libnvrtc beside PyTorch nor on the loader's path"


class Form(NamedTuple):
    """Constants that are compiled into the kernels of a weight.

    Attributes:
        dtype: bfloat16 or float16, of inputs and outputs; others are multiplied by the dequantised weight.
        kind: a name in `KINDS`.
        zero: 8 or 0, subtracted from 4-bit integers.
        scale: dtype of scales and shifts.
        shifts: "added" for minima of runs, "subtracted" for zero points, or "".
        run: inputs with one scale, 16, 32 or a multiple of 64; 0 if only units multiply.
    """

    dtype: torch.dtype
    kind: str
    zero: int
    scale: torch.dtype
    shifts: str
    run: int

    @property
    def definitions(self) -> dict[str, int]:
        """Macros of the source."""
        return {
            "NUMBER": _SCALES.index(self.dtype), "KIND": KINDS.index(self.kind), "ZERO": self.zero,
            "SCALE": _SCALES.index(self.scale), "SHIFTS": _SHIFTS.index(self.shifts), "RUN": self.run,
        }  # fmt: skip

    @property
    def text(self) -> str:
        """The form as an argument of the operator."""
        return " ".join(map(str, self.definitions.values()))


def pack_codes(codes: Tensor, kind: str) -> Tensor:
    """Codes [outputs, inputs] uint8 as the kernels load them, [tiles, chunks, bytes]; zeros pad both sizes."""
    outputs, width = codes.shape
    padded = F.pad(codes, (0, -width % CHUNK, 0, -outputs % TILE))
    # tile, half of it (h), output (g) | chunk, step, pair (q), quad (t), number (e)
    split = padded.view(-1, 2, 8, padded.shape[1] // CHUNK, 4, 2, 4, 2).transpose(5, 6)
    if kind in BYTES:  # steps come by twos
        split = split.unflatten(4, (2, 2)).permute(0, 3, 4, 2, 6, 5, 7, 8, 1)
        return split.reshape(len(split), split.shape[1], -1).contiguous()
    ordered = split.permute(0, 3, 2, 5, 4, 7, 6, 1)  # [tile, chunk, g, t, step, e, q, h]
    is_float = kind == "float4"
    halves = _float4_words(ordered.flatten(-2).int()) if is_float else ordered[..., 0] | ordered[..., 1] << 4
    return halves.reshape(len(halves), halves.shape[1], -1).contiguous()


def _float4_words(four: Tensor) -> Tensor:
    """[..., 4] codes -> [..., 2] bytes: four magnitudes of 3 bits, and their signs from the highest bit down."""
    places = torch.arange(4, device=four.device, dtype=torch.int32)
    words = ((four & 7) << 3 * places).sum(-1) + ((four >> 3) << (15 - places)).sum(-1)
    return torch.stack((words & 255, words >> 8), dim=-1).to(torch.uint8)


def unpack_codes(packed: Tensor, kind: str) -> Tensor:
    """Codes of all tiles and chunks, padding included: the inverse of `pack_codes`."""
    tiles, chunks, _ = packed.shape
    if kind in BYTES:  # [tile, chunk, two steps, g, t, step, q, e, h]
        split = packed.view(tiles, chunks, 2, 8, 4, 2, 2, 2, 2).permute(0, 8, 3, 1, 2, 5, 6, 4, 7)
        return split.reshape(tiles * TILE, chunks * CHUNK)
    halves = packed.view(tiles, chunks, 8, 4, 4, 2, 2)  # [tile, chunk, g, t, step, e, byte]
    if kind == "int4":
        codes = torch.stack((halves & 15, halves >> 4), dim=-1)
    else:
        words = halves[..., 0].int() | halves[..., 1].int() << 8
        places = torch.arange(4, device=packed.device, dtype=torch.int32)
        codes = (words[..., None] >> 3 * places & 7 | (words[..., None] >> 15 - places & 1) << 3).to(torch.uint8)
        codes = codes.unflatten(-1, (2, 2))
    # [tile, chunk, g, t, step, e, q, h] -> [tile, h, g, chunk, step, q, t, e]
    return codes.permute(0, 7, 2, 1, 4, 6, 3, 5).reshape(tiles * TILE, chunks * CHUNK)


def dequantised(
    codes: Tensor, scales: Tensor | None, shifts: Tensor | None, units: Tensor | None, outputs: int, width: int,
    form: str,
) -> Tensor:  # fmt: skip
    """The weight [outputs, width] float32 of packed parts, on any device."""
    _, kind, zero, _, how, run = (int(each) for each in form.split())
    numbers = _numbers(unpack_codes(codes, KINDS[kind])[:outputs, :width], KINDS[kind]) - zero
    factors = [None if each is None else _unpack_factors(each, run, outputs, width) for each in (scales, shifts)]
    if factors[1] is not None and _SHIFTS[how] == "subtracted":
        numbers = numbers - factors[1]
    if units is not None:
        factors[0] = units[:, None] if factors[0] is None else factors[0] * units[:, None]
    if factors[0] is not None:
        numbers = numbers * factors[0]
    return numbers + factors[1] if factors[1] is not None and _SHIFTS[how] == "added" else numbers


def _numbers(codes: Tensor, kind: str) -> Tensor:
    if kind == "float8":
        return codes.view(torch.float8_e4m3fn).float()
    if kind != "float4":
        return (codes.view(torch.int8) if kind == "int8" else codes).float()
    last = codes & 1
    exponent = codes >> 1 & 3
    magnitudes = torch.where(exponent > 0, (2 + last) << exponent, 2 * last).float() * 0.25
    return torch.where(codes > 7, -magnitudes, magnitudes)


def _unpack_factors(packed: Tensor, run: int, outputs: int, width: int) -> Tensor:
    """[outputs, width] float32 of the factors of `pack_factors`."""
    factors = packed.permute(0, 4, 2, 1, 3).reshape(len(packed) * TILE, -1)[:outputs].float()
    return factors.repeat_interleave(run, dim=1)[:, :width]


def pack_factors(factors: Tensor, run: int) -> Tensor:
    """Scales or shifts [outputs, runs] in the order of the kernels, [tiles, groups, 8, runs of a chunk, 2]."""
    in_chunk = max(1, CHUNK // run)
    padded = F.pad(factors, (0, -factors.shape[1] % in_chunk, 0, -factors.shape[0] % TILE))
    return padded.view(-1, 2, 8, padded.shape[1] // in_chunk, in_chunk).permute(0, 3, 2, 4, 1).contiguous()


class Weights(ctypes.Structure):
    """A packed weight as the kernels take it."""

    _fields_ = [
        *((name, c_void_p) for name in ("codes", "scales", "shifts", "units")),
        *((name, c_int) for name in ("outputs", "width", "chunks", "groups")),
    ]  # fmt: skip


class _Call(ctypes.Structure):
    _fields_ = [
        ("weights", Weights),
        *((name, c_void_p) for name in ("states", "bias", "output", "norm", "residual", "slots")),
        ("rows", c_int), ("bytes", c_int), ("epsilon", c_float), ("gated", c_int),
    ]  # fmt: skip


@cache
def _few(form: str, device: torch.device) -> nvrtc.CudaFunction:
    own = {"PANEL": _FEW_PANEL, "SLOTS": _FEW_SLOTS, "BLOCKS": _FEW_BLOCKS}
    return function_of("2_few.cu", "few_packed_rows", form, own, device, 256, _MOST_FEW_BYTES)


def _few_slot_bytes(form: str) -> int:
    """Shared memory of a block for weights on their way; four lanes have the same factors."""
    return 8 * _FEW_SLOTS * 2 * (_code_bytes(form) + 4 * _factor_bytes(form))


@cache
def _more(form: str, rows: int, groups: int, device: torch.device) -> nvrtc.CudaFunction:
    parts = _WARPGROUPS // groups
    step_bytes = parts * rows * CHUNK * 2 * (2 if rows <= 64 else 1)
    slots = min(4, _MORE_BYTES // step_bytes)
    own = {"ROWS": rows, "GROUPS": groups, "PARTS": parts, "SLOTS": slots}
    shared = max(slots * step_bytes + 16 * slots * parts, parts * rows * groups * 64 * 4)
    return function_of("3_more.cu", "more_packed_rows", form, own, device, 128 * _WARPGROUPS, shared)


@cache
def widening(form: str, device: torch.device) -> nvrtc.CudaFunction:
    return function_of("4_widen.cu", "widen_all", form, {}, device, 256, 0)


def function_of(
    file: str, name: str, form: str, definitions: dict[str, int], device: torch.device, num_threads: int, shared: int
) -> nvrtc.CudaFunction:
    major, minor = torch.cuda.get_device_capability(device)
    source = nvrtc.joined_sources(nvrtc.BFLOAT16, _SOURCES / "1_parts.h", _SOURCES / file)
    values = zip(_MACROS, map(int, form.split()), strict=True)
    with torch.cuda.device(device):
        architecture = f"sm_{major}{minor}{'a' if file.startswith('3') else ''}"
        own = {"TYPE": '"f16"' if form.startswith("0") else '"bf16"'}
        code = nvrtc.compile_source(source, architecture, {**dict(values), **own, **definitions})
        return nvrtc.CudaFunction(code, name, num_threads=num_threads, shared_bytes=shared)


def dtype_of(form: str) -> torch.dtype:
    """The dtype of inputs and outputs of a form's text."""
    return _SCALES[int(form[0])]


def chunk_bytes(form: str) -> int:
    """Bytes of a chunk of a tile, with the factors of its runs, by a form's text."""
    return _code_bytes(form) + _factor_bytes(form)


def _code_bytes(form: str) -> int:
    return CHUNK * TILE // (1 if KINDS[int(form.split()[1])] in BYTES else 2)


def _factor_bytes(form: str) -> int:
    _, _, _, scale, shifts, run = (int(each) for each in form.split())
    runs = 0 if run == 0 else max(1, CHUNK // run)
    return runs * TILE * _SCALES[scale].itemsize * (2 if shifts else 1)


def max_rows(device: torch.device) -> int:
    """Rows of a product that reads the packed weight."""
    return _MORE_ROWS[-1] if torch.cuda.get_device_capability(device)[0] == 9 else FEW_ROWS


def compile_kernels(form: Form, device: torch.device) -> None:
    """Make all kernels of a form, which is not possible while a graph is captured."""
    calls: list[Callable[[], object]] = [partial(_few, form.text, device), partial(widening, form.text, device)]
    if max_rows(device) > FEW_ROWS:
        calls += [partial(_more, form.text, rows, groups, device) for rows in _MORE_ROWS for groups in _GROUPS]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda call: call(), calls))


@cache
def num_processors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def memory_of_processor(device: torch.device) -> int:
    """Bytes of shared memory of a multiprocessor."""
    found: int = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return found


def _groups_of(outputs: int, device: torch.device) -> int:
    """Warpgroups of a block with outputs of their own: they share inputs where there are blocks enough."""
    enough = 0.7 * num_processors(device)
    return next((groups for groups in _GROUPS if outputs >= 64 * groups * enough), 1)


def _blocks_of(num_blocks: int, num_chunks: int, device: torch.device) -> int:
    """Blocks among which the depth is divided, about one for each multiprocessor in all."""
    blocks = 1
    while blocks < _MAX_BLOCKS and num_blocks * blocks * 3 <= 2 * num_processors(device) and num_chunks >= 32 * blocks:
        blocks *= 2
    return blocks


class Rest(NamedTuple):
    """Further parts of a layer in the launch of a product of few rows.

    Attributes:
        norm: [width], weight of an RMS norm of the rows; None without.
        epsilon: the norm's.
        residual: [rows, outputs], added to the outputs.
        slots: [rows] int64, slots of K and V, 0 for padding, which comes last: its outputs are zeros.
        gated: the first half of the products are gates: outputs are silu(gate) * up.
    """

    norm: Tensor | None = None
    epsilon: float = 0.0
    residual: Tensor | None = None
    slots: Tensor | None = None
    gated: bool = False


_NOTHING = Rest()


def fits(num_rows: int, width: int, form: str) -> bool:
    """Whether so many rows can be normalised in a product's launch."""
    needed = _few_slot_bytes(form) + _few_bytes(num_rows, width)
    return num_rows <= FEW_ROWS and needed <= _MOST_FEW_BYTES


def _few_bytes(num_rows: int, width: int) -> int:
    """Shared memory for whole rows."""
    return num_rows * (-(-width // _FEW_PANEL) * 2 * _FEW_PANEL + 16)


def _multiply_few(
    rows: Tensor, weights: Weights, bias: Tensor | None, output: Tensor, form: str, rest: Rest = _NOTHING
) -> None:
    """Write the products of up to `FEW_ROWS` rows [num_rows, width], and the rest, to the output."""
    needed = _few_bytes(len(rows), weights.width)
    of_inputs = needed if rest.norm is not None else min(needed, _FEW_BYTES)
    parts = rows, bias, output, rest.norm, rest.residual, rest.slots
    pointers = (None if part is None else part.data_ptr() for part in parts)
    call = _Call(weights, *pointers, len(rows), of_inputs, rest.epsilon, int(rest.gated))
    shared = _few_slot_bytes(form) + of_inputs
    at_once = min(_FEW_BLOCKS, memory_of_processor(rows.device) // (shared + _FEW_OWN_BYTES))
    units = -(-weights.outputs // TILE) // (2 if rest.gated else 1)
    num_blocks = min(units, max(1, at_once) * num_processors(rows.device))
    _few(form, rows.device).launch_early(num_blocks, call, shared_bytes=shared)


def _multiply(rows: Tensor, weights: Weights, bias: Tensor | None, output: Tensor, form: str) -> None:
    """Write the products of a number of rows up to `max_rows`, [rows, outputs]."""
    device = rows.device
    count = len(rows)
    is_whole = _few_bytes(count, weights.width) <= _FEW_BYTES
    if count <= (_FEWEST_ROWS[is_whole] if max_rows(device) > FEW_ROWS else FEW_ROWS):
        _multiply_few(rows, weights, bias, output, form)
        return
    groups = 1 if count <= _MORE_ROWS[0] else _groups_of(weights.outputs, device)
    num_blocks = -(-weights.outputs // (64 * groups))
    blocks = _blocks_of(num_blocks, weights.chunks, device)
    function = _more(form, next(each for each in _MORE_ROWS if each >= count), groups, device)
    pointers = rows.data_ptr(), None if bias is None else bias.data_ptr(), output.data_ptr()
    function.launch_early(num_blocks * blocks, _Call(weights, *pointers, rows=count), cluster=blocks)


def _packed_linear(
    states: Tensor, codes: Tensor, scales: Tensor | None, shifts: Tensor | None, units: Tensor | None,
    bias: Tensor | None, outputs: int, form: str,
) -> Tensor:  # fmt: skip
    """states [..., width] times the transposed weight, plus the bias: [..., outputs].

    Args:
        codes, scales, shifts: results of `pack_codes` and `pack_factors`.
        units: [outputs] float32.
        form: text of the weight's `Form`.
    """
    width = states.shape[-1]
    rows = states.reshape(-1, width).contiguous()
    weights = weights_of(codes, scales, shifts, units, outputs, width)
    if not states.is_cuda or rows.dtype != dtype_of(form):
        weight = dequantised(codes, scales, shifts, units, outputs, width, form)
        return F.linear(states, weight.to(states.dtype), bias)
    if len(rows) > max_rows(states.device):
        plain = states.new_empty(outputs, width)
        with torch.cuda.device(states.device):
            num_warps = codes.shape[0] * codes.shape[1]
            widening(form, states.device).launch(-(-num_warps // 8), weights, c_void_p(plain.data_ptr()))
        return F.linear(states, plain, bias)
    output = states.new_empty(*states.shape[:-1], outputs)
    if len(rows) == 0:
        return output
    with torch.cuda.device(states.device):
        _multiply(rows, weights, bias, output, form)
    return output


def fused_product(
    states: Tensor, parts: Sequence[Tensor | None], bias: Tensor | None, outputs: int, form: str, rest: Rest
) -> Tensor:
    """The product of up to `FEW_ROWS` rows [num_rows, width] with the rest of a layer, in one launch.

    Args:
        states: rows of the form's dtype, on a GPU; a norm has to fit (`fits`).
        parts: codes, scales, shifts and units; these and others as of `packed_linear`.
    """
    codes, scales, shifts, units = parts
    assert codes is not None
    rows = states.contiguous()
    output = states.new_empty(len(rows), outputs // 2 if rest.gated else outputs)
    weights = weights_of(codes, scales, shifts, units, outputs, rows.shape[1])
    with torch.cuda.device(states.device):
        _multiply_few(rows, weights, bias, output, form, rest)
    return output


def weights_of(
    codes: Tensor, scales: Tensor | None, shifts: Tensor | None, units: Tensor | None, outputs: int, width: int
) -> Weights:
    pointers = (None if each is None else each.data_ptr() for each in (codes, scales, shifts, units))
    return Weights(*pointers, outputs, width, codes.shape[1], 0 if scales is None else scales.shape[1])


def _fake(
    states: Tensor, codes: Tensor, scales: Tensor | None, shifts: Tensor | None, units: Tensor | None,
    bias: Tensor | None, outputs: int, form: str,
) -> Tensor:  # fmt: skip
    return states.new_empty(*states.shape[:-1], outputs)


packed_linear = define_operator("nanovllm::packed_linear", _packed_linear, _fake)
